// A thread's working memory, aligned to cache lines; it is reallocated only to grow.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

#include "index.h"
#include "weft/config.h"

namespace weft::cpu {

class Scratch {
 public:
  float* get(Index floats) {
    if (floats > size_) {
      size_ = 0;
      memory_.reset();
      memory_.reset(static_cast<float*>(::operator new(at(floats) * sizeof(float), kAlign)));
      size_ = floats;
    }
    return memory_.get();
  }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(float* p) const { ::operator delete(p, kAlign); }
  };
  std::unique_ptr<float, Free> memory_;
  Index size_ = 0;
};

}  // namespace weft::cpu
