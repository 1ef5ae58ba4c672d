// The thread pool of the CPU kernels, which calls from several threads (ranks) share, and memory for its threads.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <new>

#include "index.h"
#include "weft/config.h"

namespace weft::cpu {

// Runs body() on as many threads as are allowed and worth it, at least once; workers pull their work from a shared
// counter, so fewer of them only take longer. An exception of any worker is thrown here.
void on_threads(Index worth, const std::function<void()>& body);
// How many threads a call is worth: one for every million products, which take a core some ten microseconds.
Index worth_threads(Index pairs, Index width);

// A thread's working memory, aligned to cache lines; it is reallocated only to grow.

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
