// Texts that forked ranks leave where the process that started them sees them.
#pragma once

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include <sys/mman.h>

#include "index.h"

namespace weft::test {

class Said {
 public:
  explicit Said(Index ranks) : bytes_(at(ranks) * kLetters) {
    void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    letters_ = static_cast<char*>(memory);
  }
  ~Said() { ::munmap(letters_, bytes_); }
  Said(const Said&) = delete;
  Said& operator=(const Said&) = delete;

  void put(Index rank, const std::string& text) const {
    std::memcpy(letters_ + at(rank) * kLetters, text.data(), std::min(text.size(), kLetters - 1));
  }
  std::string of(Index rank) const { return letters_ + at(rank) * kLetters; }

 private:
  static constexpr std::size_t kLetters = 1000;
  std::size_t bytes_;
  char* letters_;
};

}  // namespace weft::test
