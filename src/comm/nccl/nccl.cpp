// A call packs what is not contiguous, sends and receives everything as one NCCL group in a stream of its own, and
// unpacks. Events order all of it; the CPU waits for nothing.
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "comm/cuda/packed_blocks.h"
#include "comm/cuda/packed_message.h"
#include "comm/cuda/transports.h"
#include "comm/nccl/connection.h"
#include "cuda/handle_pool.h"
#include "cuda/runtime.h"
#include "index.h"
#include "text.h"

namespace weft::cuda {
namespace {

// A call in the connection's stream; wait() makes the caller's stream wait for it. Its memory is taken and freed in the
// order of the caller's stream, so that the connection's has no work after the call, which a capture would not allow.
class NcclCall : public Request::Pending {
 public:
  NcclCall(std::shared_ptr<NcclConnection> link, const Place& place)
      : link_(std::move(link)), device_(place.device), caller_(static_cast<cudaStream_t>(place.stream)) {}

  void wait() final {
    link_->watch().check();
    const DeviceGuard on(device_);
    WEFT_CUDA(cudaStreamWaitEvent(caller_, call_->done.get()));
    waited_ = true;
    unpack(caller_);
    link_->queued(*call_);
  }

 protected:
  cudaStream_t caller() const { return caller_; }
  cudaStream_t stream() const { return link_->stream(); }
  // After the memory has been taken.
  void begin(std::span<const Message> sends, std::span<const Message> receives) {
    call_ = link_->begin(caller_, sends, receives);
  }
  template <class Issue>
  void issue(const Issue& what) {
    link_->group(*call_, what);
  }
  void end() {
    link_->end(call_);
    issued_ = true;
  }
  virtual void unpack(cudaStream_t caller) = 0;

  // The last member of a call, so that it is destroyed before the call's memory is freed: nobody uses that any more.
  class Finished {
   public:
    explicit Finished(NcclCall& call) : call_(call) {}
    ~Finished() { call_.finish(); }
    Finished(const Finished&) = delete;
    Finished& operator=(const Finished&) = delete;

   private:
    NcclCall& call_;
  };

 private:
  void finish() {
    if (call_ == nullptr || waited_) return;
    if (!issued_) clear_last_error(cudaEventRecord(call_->done.get(), stream()));
    clear_last_error(cudaStreamWaitEvent(caller_, call_->done.get()));
    clear_last_error(cudaEventSynchronize(call_->done.get()));
  }

  std::shared_ptr<NcclConnection> link_;
  int device_;
  cudaStream_t caller_;
  std::shared_ptr<StreamCall> call_;
  bool issued_ = false, waited_ = false;
};

class NcclExchange final : public NcclCall {
 public:
  NcclExchange(std::shared_ptr<NcclConnection> link, Index rank, const Place& place, std::vector<Message> sends,
               std::vector<Message> receives)
      : NcclCall(std::move(link), place), sends_(room_for_sends(sends, caller())) {
    for (const Message& m : receives) {
      const bool in_place = m.combine != Message::Combine::add;
      if (m.size() > 0) receives_.emplace_back(m, in_place, caller());
    }
    begin(sends, receives);
    pack(sends_, stream());
    bool moves = false;
    for (const auto* list : {&sends_, &receives_})
      for (const PackedMessage& p : *list) moves = moves || p.message.peer != rank;
    if (moves) issue([&](ncclComm_t comm, cudaStream_t on) { send_and_receive(rank, comm, on); });
    copy_to_self(rank, stream());
    end();
  }

 private:
  static std::size_t size(const PackedMessage& p) { return at(p.message.size()); }

  void send_and_receive(Index rank, ncclComm_t comm, cudaStream_t on) const {
    for (const PackedMessage& p : sends_)
      if (p.message.peer != rank)
        WEFT_NCCL(ncclSend(p.data, size(p), ncclChar, static_cast<int>(p.message.peer), comm, on));
    for (const PackedMessage& p : receives_)
      if (p.message.peer != rank)
        WEFT_NCCL(ncclRecv(p.data, size(p), ncclChar, static_cast<int>(p.message.peer), comm, on));
  }

  void copy_to_self(Index rank, cudaStream_t on) {
    std::size_t next = 0;
    for (const PackedMessage& to : receives_) {
      if (to.message.peer != rank) continue;
      const Block from = sent_to_self(sends_, rank, to.message, next), whole = to.block();
      copy(segments({&from, 1}, {&whole, 1}), on);
    }
  }

  void unpack(cudaStream_t caller) override {
    for (const PackedMessage& p : receives_) {
      const Block whole = p.block();
      if (!p.is_in_place()) cuda::unpack(p.message, {&whole, 1}, caller);
    }
  }

  std::vector<PackedMessage> sends_, receives_;
  Finished finished_{*this};
};

// A collective between two contiguous buffers.
class NcclCollective final : public NcclCall {
 public:
  template <class Issue>
  NcclCollective(std::shared_ptr<NcclConnection> link, const Place& place, std::span<const Block> from,
                 std::span<const Block> to, std::span<const Message> sends, std::span<const Message> receives,
                 const Issue& what)
      : NcclCall(std::move(link), place), from_(from, caller()), to_(to, caller()) {
    begin(sends, receives);
    from_.pack(stream());
    issue([&](ncclComm_t comm, cudaStream_t on) { what(from_.data(), to_.data(), comm, on); });
    end();
  }

 private:
  void unpack(cudaStream_t caller) override { to_.unpack(caller); }

  PackedBlocks from_, to_;
  Finished finished_{*this};
};

// The messages that equal blocks stand for.
std::vector<Message> messages_of(const Block& block, Index ranks) {
  std::vector<Message> all;
  for (Index peer = 0; peer < ranks; ++peer) all.push_back({peer, {block}});
  return all;
}

class NcclCommunicator final : public DeviceCommunicator {
 public:
  NcclCommunicator(Communicator& ranks, const Place& place, std::shared_ptr<NcclConnection> connection)
      : DeviceCommunicator(ranks, place), link_(std::move(connection)) {}

  std::string_view name() const override { return "nccl"; }
  bool has_collectives() const override { return true; }

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    const DeviceGuard on(place().device);
    return std::make_unique<NcclExchange>(link_, rank(), place(), std::move(sends), std::move(receives));
  }
  std::unique_ptr<Request::Pending> start_all_gather(const Block& mine, std::span<const Block> all) override {
    const DeviceGuard on(place().device);
    const std::vector<Message> messages = messages_of(mine, ranks());
    return std::make_unique<NcclCollective>(
        link_, place(), std::span(&mine, 1), all, messages, messages,
        [&](const char* from, char* to, ncclComm_t comm, cudaStream_t stream) {
          WEFT_NCCL(ncclAllGather(from, to, at(mine.size()), ncclChar, comm, stream));
        });
  }
  std::unique_ptr<Request::Pending> start_reduce_scatter(std::span<const Block> parts, const Block& mine) override {
    const DeviceGuard on(place().device);
    const std::vector<Message> messages = messages_of(mine, ranks());
    return std::make_unique<NcclCollective>(
        link_, place(), parts, std::span(&mine, 1), messages, messages,
        [&](const char* from, char* to, ncclComm_t comm, cudaStream_t stream) {
          WEFT_NCCL(ncclReduceScatter(from, to, at(mine.size()) / sizeof(float), ncclFloat, ncclSum, comm, stream));
        });
  }
  // all_to_all: a group of sends and receives, which is what ncclAlltoAll is too and takes blocks of any sizes.

  std::shared_ptr<NcclConnection> link_;
};

}  // namespace

std::shared_ptr<NcclConnection> connect_nccl(const Communicator& ranks, const Place& place, const HostCall& host_call,
                                             const std::shared_ptr<detail::Board>& board,
                                             const std::shared_ptr<detail::FlightRecorder>& recorder) {
  const DeviceGuard on(place.device);
  ncclUniqueId id{};
  if (ranks.rank() == 0) WEFT_NCCL(ncclGetUniqueId(&id));
  // Everybody gets rank 0's id.
  std::vector<Message> to, from;
  const auto block = [](void* data) { return Block{.data = data, .rows = 1, .bytes = sizeof(ncclUniqueId)}; };
  ncclUniqueId got{};
  for (Index peer = 0; ranks.rank() == 0 && peer < ranks.ranks(); ++peer) to.push_back({peer, {block(&id)}});
  from.push_back({0, {block(&got)}});
  host_call(std::move(to), std::move(from))->wait();
  detail::Watch::Connection who{
      .rank = ranks.rank(), .time_limit = ranks.time_limit(), .recorder = recorder, .board = nullptr};
  if (board != nullptr)
    who.board = board->connection(std::hash<std::string_view>()({got.internal, sizeof got.internal}) | 1,
                                  recorder->last().number + 1);
  return std::make_shared<NcclConnection>(place.device, got, ranks.ranks(), std::move(who));
}

bool connects(const std::shared_ptr<NcclConnection>& connection, const Place& place) {
  return connection != nullptr && connection->device() == place.device && connection->watch().works();
}

void check(const NcclConnection& connection) { connection.watch().check(); }

std::unique_ptr<DeviceCommunicator> make_nccl(Communicator& ranks, const Place& place,
                                              std::shared_ptr<NcclConnection> connection) {
  return std::make_unique<NcclCommunicator>(ranks, place, std::move(connection));
}

}  // namespace weft::cuda
