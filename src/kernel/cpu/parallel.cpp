#include "kernel/cpu/parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <thread>

#include <pthread.h>

#include "text.h"
#include "weft/kernel.h"

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
  // Asked once, because the answer opens a file.
  static const int machine = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int wanted = limit.load();
  return wanted == 0 ? machine : std::min(wanted, machine);
}

// Workers that help callers. A caller works itself and never waits for a worker to become free: when it has no work
// left, it withdraws the places that no worker took, and waits for those that did.
class Pool {
 public:
  void run(int threads, const std::function<void()>& body) {
    Call call = {body, threads - 1};
    std::list<Call*> entry = {&call};
    {
      const std::lock_guard lock(guard_);
      start_workers(call.open);
      calls_.splice(calls_.end(), entry);
    }
    for (int i = 1; i < threads; ++i) wanted_.notify_one();
    std::exception_ptr failure = attempt(body);
    std::unique_lock lock(guard_);
    calls_.remove(&call);
    call.finished.wait(lock, [&] { return call.working == 0; });
    if (!failure) failure = call.failure;
    if (failure) std::rethrow_exception(failure);
  }

 private:
  struct Call {
    const std::function<void()>& body;
    int open;         // places for workers that none has taken
    int working = 0;  // workers that are inside body
    std::exception_ptr failure = nullptr;
    std::condition_variable finished = {};
  };

  static std::exception_ptr attempt(const std::function<void()>& body) {
    try {
      body();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  void start_workers(int wanted) {
    try {
      for (; workers_ < wanted; ++workers_) std::thread([this] { work(); }).detach();
    } catch (const std::exception&) {  // no more threads, or no memory for them: fewer do the same work
    }
  }

  void work() {
    std::unique_lock lock(guard_);
    for (;;) {
      wanted_.wait(lock, [&] { return !calls_.empty(); });
      Call& call = *calls_.front();
      if (--call.open == 0) calls_.pop_front();
      ++call.working;
      lock.unlock();
      std::exception_ptr failure = attempt(call.body);
      lock.lock();
      if (failure) call.failure = failure;
      if (--call.working == 0) call.finished.notify_one();
    }
  }

  std::mutex guard_;
  std::condition_variable wanted_;
  std::list<Call*> calls_;  // those with open places, the oldest first
  int workers_ = 0;
};

Pool* shared_pool = nullptr;

// The pool is never destroyed: the program's threads may still attend while the process ends. A process made by fork()
// has none of its parent's workers, so it gets a pool of its own.
Pool& pool() {
  static const bool made = [] {
    shared_pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { shared_pool = new Pool; });
    return true;
  }();
  static_cast<void>(made);
  return *shared_pool;
}

}  // namespace

Index worth_threads(Index pairs, Index width) { return 1 + pairs / ((Index{1} << 20) / width + 1); }

void on_threads(Index worth, const std::function<void()>& body) {
  const int n = static_cast<int>(std::min<Index>(threads(), worth));
  if (n <= 1)
    body();
  else
    pool().run(n, body);
}

}  // namespace cpu
}  // namespace weft
