// A call packs what is not contiguous, sends and receives everything as one NCCL group in a stream of its own, and
// unpacks. Events order all of it; the CPU waits for nothing.
#include <vector>

#include <nccl.h>

#include "comm/cuda/packed_message.h"
#include "comm/cuda/transports.h"
#include "cuda/handle_pool.h"
#include "cuda/runtime.h"
#include "index.h"
#include "text.h"

namespace weft::cuda {
namespace {

void check(ncclResult_t result, const char* call) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  throw Error(text("NCCL: ", call, ": ", ncclGetErrorString(result)),
              "see that every rank has a GPU of its own and that all make the same calls; NCCL_DEBUG=INFO says more");
}
#define WEFT_NCCL(call) check((call), #call)

}  // namespace

// What all calls of the communicators of one device share.
class NcclConnection {
 public:
  explicit NcclConnection(int of_device) : device(of_device) {}
  ~NcclConnection() {
    if (comm != nullptr) ncclCommDestroy(comm);
  }
  NcclConnection(const NcclConnection&) = delete;
  NcclConnection& operator=(const NcclConnection&) = delete;

  int device;
  ncclComm_t comm = nullptr;
  PooledStream stream{true};  // high priority, because the next step waits for these messages
  PooledEvent ready;          // the point that the caller's stream has reached
};

namespace {

class NcclExchange final : public Request::Pending {
 public:
  NcclExchange(std::shared_ptr<NcclConnection> link, Index rank, const Place& place, std::vector<Message> sends,
               std::vector<Message> receives)
      : link_(std::move(link)), device_(place.device), caller_(static_cast<cudaStream_t>(place.stream)) {
    const cudaStream_t stream = link_->stream.get();
    WEFT_CUDA(cudaEventRecord(link_->ready.get(), caller_));
    WEFT_CUDA(cudaStreamWaitEvent(stream, link_->ready.get()));
    sends_ = pack_sends(std::move(sends), stream);
    for (Message& m : receives) {
      const bool in_place = m.combine != Message::Combine::add;
      if (m.size() > 0) receives_.emplace_back(std::move(m), in_place, stream);
    }
    WEFT_NCCL(ncclGroupStart());
    for (const PackedMessage& p : sends_)
      if (p.message.peer != rank)
        WEFT_NCCL(ncclSend(p.data, size(p), ncclChar, static_cast<int>(p.message.peer), link_->comm, stream));
    for (const PackedMessage& p : receives_)
      if (p.message.peer != rank)
        WEFT_NCCL(ncclRecv(p.data, size(p), ncclChar, static_cast<int>(p.message.peer), link_->comm, stream));
    WEFT_NCCL(ncclGroupEnd());
    copy_to_self(rank, stream);
    WEFT_CUDA(cudaEventRecord(done_.get(), stream));
  }

  ~NcclExchange() override {
    if (!waited_) clear_last_error(cudaEventSynchronize(done_.get()));
  }

  void wait() override {
    const DeviceGuard on(device_);
    WEFT_CUDA(cudaStreamWaitEvent(caller_, done_.get()));
    waited_ = true;
    for (const PackedMessage& p : receives_) {
      const Block whole = p.block();
      if (!p.is_in_place()) unpack(p.message, {&whole, 1}, caller_);
    }
    // The exchange's stream frees the memory, after the caller's stream is done with it.
    WEFT_CUDA(cudaEventRecord(done_.get(), caller_));
    WEFT_CUDA(cudaStreamWaitEvent(link_->stream.get(), done_.get()));
  }

 private:
  static std::size_t size(const PackedMessage& p) { return at(p.message.size()); }

  void copy_to_self(Index rank, cudaStream_t stream) {
    std::size_t next = 0;
    for (const PackedMessage& to : receives_) {
      if (to.message.peer != rank) continue;
      const Block from = sent_to_self(sends_, rank, to.message, next), whole = to.block();
      copy(segments({&from, 1}, {&whole, 1}), stream);
    }
  }

  std::shared_ptr<NcclConnection> link_;
  int device_;
  cudaStream_t caller_;
  std::vector<PackedMessage> sends_, receives_;
  PooledEvent done_;
  bool waited_ = false;
};

class NcclCommunicator final : public DeviceCommunicator {
 public:
  NcclCommunicator(Communicator& ranks, const Place& place, std::shared_ptr<NcclConnection> connection)
      : DeviceCommunicator(ranks, place), link_(std::move(connection)) {}

  std::string_view name() const override { return "nccl"; }

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    const DeviceGuard on(place().device);
    return std::make_unique<NcclExchange>(link_, rank(), place(), std::move(sends), std::move(receives));
  }

  std::shared_ptr<NcclConnection> link_;
};

}  // namespace

std::shared_ptr<NcclConnection> connect_nccl(const Communicator& ranks, const Place& place, const HostCall& host_call) {
  const DeviceGuard on(place.device);
  auto connection = std::make_shared<NcclConnection>(place.device);
  ncclUniqueId id{};
  if (ranks.rank() == 0) WEFT_NCCL(ncclGetUniqueId(&id));
  // Everybody gets rank 0's id.
  std::vector<Message> to, from;
  const auto block = [](void* data) { return Block{.data = data, .rows = 1, .bytes = sizeof(ncclUniqueId)}; };
  ncclUniqueId got{};
  for (Index peer = 0; ranks.rank() == 0 && peer < ranks.ranks(); ++peer) to.push_back({peer, {block(&id)}});
  from.push_back({0, {block(&got)}});
  host_call(std::move(to), std::move(from))->wait();
  WEFT_NCCL(ncclCommInitRank(&connection->comm, static_cast<int>(ranks.ranks()), got, static_cast<int>(ranks.rank())));
  return connection;
}

bool connects(const std::shared_ptr<NcclConnection>& connection, const Place& place) {
  return connection != nullptr && connection->device == place.device;
}

void check(const NcclConnection&) {}

std::unique_ptr<DeviceCommunicator> make_nccl(Communicator& ranks, const Place& place,
                                              std::shared_ptr<NcclConnection> connection) {
  return std::make_unique<NcclCommunicator>(ranks, place, std::move(connection));
}

}  // namespace weft::cuda
