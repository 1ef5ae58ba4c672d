// A connection of NCCL between ranks on GPUs. It is non-blocking: no call of NCCL waits for a peer. A Watch aborts it
// if a rank fails or does not come, which releases the streams that wait for it; every later call is then a PeerError.
#pragma once

#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include <nccl.h>

#include "comm/cuda/stream_signs.h"
#include "comm/watch.h"
#include "cuda/handle_pool.h"
#include "weft/communicator.h"

namespace weft::cuda {

void check(ncclResult_t result, const char* call);
#define WEFT_NCCL(call) ::weft::cuda::check((call), #call)

// A call in the connection's stream.
struct StreamCall final : detail::QueuedCall {
  using QueuedCall::QueuedCall;
  bool begun() override;
  bool ended() override;
  std::optional<std::string> disagreement() override { return signs.disagreement(); }

  StreamSigns signs;        // that travel with it
  PooledEvent ready, done;  // the point that the caller's stream had reached; the end of the call
};

class NcclConnection {
 public:
  // Collective. Ends by PeerError if not all ranks come within the time limit.
  NcclConnection(int device, const ncclUniqueId& id, Index ranks, detail::Watch::Connection who);
  ~NcclConnection();
  NcclConnection(const NcclConnection&) = delete;
  NcclConnection& operator=(const NcclConnection&) = delete;

  int device() const { return device_; }
  cudaStream_t stream() const { return stream_.get(); }
  detail::Watch& watch() const { return *watch_; }

  // A new call, which begins where the caller's stream is.
  std::shared_ptr<StreamCall> begin(cudaStream_t caller, std::span<const Message> sends,
                                    std::span<const Message> receives);
  // Calls issue(comm, stream) as one group of NCCL, and returns when NCCL has put its work into the stream.
  template <class Issue>
  void group(const StreamCall& call, const Issue& issue) {
    std::exception_ptr failed;
    {
      const std::lock_guard lock(mutex_);
      watch_->check();
      WEFT_NCCL(ncclGroupStart());
      try {
        issue(comm_, stream_.get());
      } catch (...) {
        failed = std::current_exception();
      }
      try {
        WEFT_NCCL(ncclGroupEnd());
      } catch (...) {
        if (!failed) failed = std::current_exception();
      }
    }
    until_issued(call.record.number);  // if a lost rank is the reason, this names it
    if (failed) std::rethrow_exception(failed);
  }
  // The call is in the stream, and is watched from now on.
  void end(const std::shared_ptr<StreamCall>& call);
  // The caller's stream waits for the call.
  void queued(const StreamCall& call) const { recorder_->set(call.record.number, detail::RecordedCall::State::queued); }

 private:
  ncclResult_t state();
  void until_issued(Index call);
  std::optional<std::string> fault();
  void abort();

  const int device_;
  const double time_limit_;
  std::shared_ptr<detail::FlightRecorder> recorder_;
  PooledStream stream_{true};  // high priority, because the next step waits for these messages
  std::mutex mutex_;           // one thread at a time is in NCCL
  ncclComm_t comm_ = nullptr;
  std::unique_ptr<detail::Watch> watch_;  // destroyed first: its thread uses the rest
};

}  // namespace weft::cuda
