#include "kernel/cpu/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "index.h"
#include "text.h"
#include "weft/kernel.h"

#ifdef WEFT_TBB
#include <tbb/parallel_for.h>
#include <tbb/partitioner.h>
#endif

namespace weft {
namespace {

std::atomic<int> limit{0};

}  // namespace

void set_cpu_threads(int threads) {
  if (threads < 0) throw Error(text(threads, " threads"), "give 1 or more, or 0 for as many as the machine has");
  limit = threads;
}

namespace cpu {

namespace {

int threads() {
  const int machine = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int wanted = limit.load();
  return wanted == 0 ? machine : std::min(wanted, machine);
}

}  // namespace

Index worth_threads(Index pairs, Index width) { return 1 + pairs / ((Index{1} << 20) / width + 1); }

void on_threads(Index worth, const std::function<void()>& body) {
  const int n = static_cast<int>(std::min<Index>(threads(), worth));
  if (n <= 1) {
    body();
    return;
  }
#ifdef WEFT_TBB
  tbb::parallel_for(0, n, [&](int) { body(); }, tbb::simple_partitioner());
#else
  std::mutex guard;
  std::exception_ptr failure;
  const auto guarded = [&] {
    try {
      body();
    } catch (...) {
      const std::lock_guard lock(guard);
      failure = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  others.reserve(at(n) - 1);
  try {
    for (int i = 1; i < n; ++i) others.emplace_back(guarded);
  } catch (const std::exception&) {  // no more threads, or no memory for them: fewer do the same work
  }
  guarded();
  for (std::thread& t : others) t.join();
  if (failure) std::rethrow_exception(failure);
#endif
}

}  // namespace cpu
}  // namespace weft
