#include "comm/nccl/connection.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <thread>
#include <utility>

#include "cuda/runtime.h"
#include "index.h"
#include "text.h"

namespace weft::cuda {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kAbortSeconds = 10;  // the streams go on at once, the rest is to free memory

bool is_over(const PooledEvent& event) {
  const cudaError_t result = cudaEventQuery(event.get());
  clear_last_error(result);  // not ready is not an error; others show in the caller's next call
  return result != cudaErrorNotReady;
}

bool is_fault(ncclResult_t result) { return result != ncclSuccess && result != ncclInProgress; }

// Ends a communicator by ncclCommAbort or ncclCommDestroy, which join threads of NCCL. Where those wait for a process
// that is stopped, they are left to themselves after so many seconds.
void end_within(double seconds, int device, ncclComm_t comm, ncclResult_t (*end)(ncclComm_t)) {
  std::promise<void> promise;
  const std::future<void> ended = promise.get_future();
  std::thread thread([device, comm, end, done = std::move(promise)]() mutable {
    cudaSetDevice(device);
    end(comm);
    done.set_value();
  });
  if (ended.wait_for(std::chrono::duration<double>(seconds)) == std::future_status::ready) {
    thread.join();
  } else {
    thread.detach();
  }
}

}  // namespace

void check(ncclResult_t result, const char* call) {
  if (!is_fault(result)) return;
  throw Error(text("NCCL: ", call, ": ", ncclGetErrorString(result)),
              "see that every rank has a GPU of its own and that all make the same calls; NCCL_DEBUG=INFO says more");
}

bool StreamCall::begun() { return is_over(ready); }
bool StreamCall::ended() { return is_over(done); }

NcclConnection::NcclConnection(int device, const ncclUniqueId& id, Index ranks, detail::Watch::Connection who)
    : device_(device), time_limit_(who.time_limit), recorder_(who.recorder) {
  const Index rank = who.rank;
  who.begin = [this] {
    cudaSetDevice(device_);
    // Questions about events must not end a capture that another thread makes.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    clear_last_error(cudaThreadExchangeStreamCaptureMode(&mode));
  };
  who.fault = [this] { return fault(); };
  who.abort = [this] { abort(); };
  watch_ = std::make_unique<detail::Watch>(std::move(who));
  {
    const std::lock_guard lock(mutex_);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    WEFT_NCCL(ncclCommInitRankConfig(&comm_, static_cast<int>(ranks), id, static_cast<int>(rank), &config));
  }
  until_issued(-1);
}

NcclConnection::~NcclConnection() {
  if (watch_ == nullptr) return;
  watch_->finish();  // not before the calls in the stream have ended or were given up
  const DeviceGuard on(device_, std::nothrow);
  if (comm_ == nullptr) return;
  // While an exception unwinds, other ranks may be elsewhere.
  if (std::uncaught_exceptions() > 0) {
    end_within(std::min(time_limit_, kAbortSeconds), device_, comm_, ncclCommAbort);
  } else {
    end_within(time_limit_, device_, comm_, ncclCommDestroy);
  }
}

// With the mutex held.
ncclResult_t NcclConnection::state() {
  ncclResult_t now = ncclSuccess;
  const ncclResult_t asked = ncclCommGetAsyncError(comm_, &now);
  return asked == ncclSuccess ? now : asked;
}

// A non-blocking communicator starts, and puts work into the stream, in a thread of its own. The first messages between
// two ranks also connect them, which ends by the time limit.
void NcclConnection::until_issued(Index call) {
  constexpr int kBusy = 1000;  // questions before it sleeps between them
  const auto begin = Clock::now();
  for (int asked = 0;; ++asked) {
    ncclResult_t now = ncclSuccess;
    {
      const std::lock_guard lock(mutex_);
      watch_->check();  // the abort of the watch waits for the mutex
      now = state();
    }
    if (now == ncclSuccess) return;
    if (asked < kBusy) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    std::optional<std::string> said;
    if (is_fault(now)) said = text("NCCL: ", ncclGetErrorString(now));
    watch_->look(call, std::chrono::duration<double>(Clock::now() - begin).count(), said);
  }
}

// In the thread of the watch, which does not wait for a thread that is in NCCL.
std::optional<std::string> NcclConnection::fault() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || comm_ == nullptr) return std::nullopt;
  const ncclResult_t now = state();
  if (!is_fault(now)) return std::nullopt;
  return text("NCCL: ", ncclGetErrorString(now));
}

void NcclConnection::abort() {
  const std::lock_guard lock(mutex_);
  if (comm_ != nullptr)
    end_within(std::min(time_limit_, kAbortSeconds), device_, std::exchange(comm_, nullptr), ncclCommAbort);
}

std::shared_ptr<StreamCall> NcclConnection::begin(cudaStream_t caller, std::span<const Message> sends,
                                                  std::span<const Message> receives) {
  auto call = std::make_shared<StreamCall>(watch_->post(sends, receives));
  WEFT_CUDA(cudaEventRecord(call->ready.get(), caller));
  WEFT_CUDA(cudaStreamWaitEvent(stream_.get(), call->ready.get()));
  return call;
}

void NcclConnection::end(const std::shared_ptr<StreamCall>& call) {
  WEFT_CUDA(cudaEventRecord(call->done.get(), stream_.get()));
  if (!is_captured(stream_.get())) watch_->add(call);  // a captured call runs later, and any number of times
}

}  // namespace weft::cuda
