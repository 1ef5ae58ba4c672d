#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <optional>

#include "comm/cuda/packed_message.h"
#include "comm/cuda/transports.h"
#include "comm/sign.h"
#include "cuda/handle_pool.h"
#include "cuda/runtime.h"
#include "index.h"
#include "text.h"

namespace weft::cuda {
namespace {

constexpr Index kAligned = 256;  // messages begin where copies can be wide

// Staging memory on the host or on the device.
class Stage {
 public:
  Stage(Index bytes, Staging where, cudaStream_t stream) {
    if (where == Staging::host)
      host_ = std::make_unique<PooledPinned>(at(max_of(bytes, 1)));
    else
      device_ = StreamArray<char>(at(bytes), stream);
  }
  char* get() const { return host_ != nullptr ? host_->get() : device_.get(); }

 private:
  std::unique_ptr<PooledPinned> host_;
  StreamArray<char> device_;
};

// Host memory that the GPU may still read.
class InFlight {
 public:
  ~InFlight() {
    for (const Entry& e : all_) clear_last_error(cudaEventSynchronize(e.done->get()));
  }
  void add(Stage stage, std::unique_ptr<PooledEvent> done) {
    while (!all_.empty() && is_done(*all_.front().done)) all_.pop_front();
    all_.push_back({std::move(stage), std::move(done)});
  }

 private:
  struct Entry {
    Stage stage;
    std::unique_ptr<PooledEvent> done;
  };
  static bool is_done(const PooledEvent& done) {
    const cudaError_t result = cudaEventQuery(done.get());
    clear_last_error(result);  // not ready is not an error
    return result == cudaSuccess;
  }
  std::deque<Entry> all_;
};

Block whole(char* data, Index bytes) { return {data, 1, 1, bytes, bytes, bytes}; }

class StagedExchange final : public Request::Pending {
 public:
  StagedExchange(Index rank, const Place& place, Staging staging, std::vector<Message> sends,
                 std::vector<Message> receives, std::shared_ptr<InFlight> in_flight, const HostCall& host_call)
      : rank_(rank),
        device_(place.device),
        caller_(static_cast<cudaStream_t>(place.stream)),
        in_flight_(std::move(in_flight)),
        sends_(std::move(sends)),
        receives_(std::move(receives)),
        out_(room(sends_), staging, caller_),
        in_(std::in_place, room(receives_), staging, caller_) {
    std::vector<Message> to, from;
    synchronize_on_failure(caller_, [&] { pack(to); });
    char* next = in_->get();
    for (const Message& m : receives_) {
      if (!moves(m)) continue;
      from.push_back({m.peer, {whole(next, m.size())}});
      next += padded(m);
    }
    moving_ = host_call(std::move(to), std::move(from));
  }

  void wait() override {
    moving_->wait();
    const DeviceGuard on(device_);
    auto done = std::make_unique<PooledEvent>();
    synchronize_on_failure(caller_, [&] { unpack(*done); });
    in_flight_->add(std::move(*in_), std::move(done));
  }

 private:
  // Packs each message into one piece; synchronizes.
  void pack(std::vector<Message>& to) const {
    char* next = out_.get();
    for (const Message& m : sends_) {
      if (!moves(m)) continue;
      const Block block = whole(next, m.size());
      copy(segments(m.blocks, {&block, 1}), caller_);
      to.push_back({m.peer, {block}});
      next += padded(m);
    }
    const PooledEvent packed;
    WEFT_CUDA(cudaEventRecord(packed.get(), caller_));
    WEFT_CUDA(cudaEventSynchronize(packed.get()));
  }
  void unpack(const PooledEvent& done) const {
    char* next = in_->get();
    std::size_t next_own = 0;
    for (const Message& m : receives_) {
      if (m.size() == 0) continue;
      const Block came = whole(next, m.size());
      if (m.peer != rank_) next += padded(m);
      cuda::unpack(m, m.peer == rank_ ? own(m, next_own) : std::span<const Block>(&came, 1), caller_);
    }
    WEFT_CUDA(cudaEventRecord(done.get(), caller_));
  }
  bool moves(const Message& m) const { return m.peer != rank_ && m.size() > 0; }
  static Index padded(const Message& m) { return ceil_div(m.size(), kAligned) * kAligned; }
  Index room(const std::vector<Message>& list) const {
    Index bytes = 0;
    for (const Message& m : list)
      if (moves(m)) bytes += padded(m);
    return bytes;
  }

  // The next message that this rank sends to itself.
  std::span<const Block> own(const Message& to, std::size_t& next) const {
    while (next < sends_.size() && (sends_[next].peer != rank_ || sends_[next].size() == 0)) ++next;
    if (next == sends_.size() || sends_[next].size() != to.size())
      throw Error(text("rank ", rank_, " receives ", to.size(), " bytes from itself that it does not send"),
                  "let both sides name the same messages");
    return sends_[next++].blocks;
  }

  Index rank_;
  int device_;
  cudaStream_t caller_;
  std::shared_ptr<InFlight> in_flight_;
  std::vector<Message> sends_, receives_;
  Stage out_;
  std::optional<Stage> in_;
  std::unique_ptr<Request::Pending> moving_;  // destroyed first, after which nobody touches the rest
};

class Staged final : public DeviceCommunicator {
 public:
  Staged(Communicator& ranks, const Place& place, Staging staging, HostCall host_call)
      : DeviceCommunicator(ranks, place), staging_(staging), host_call_(std::move(host_call)) {}

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    const DeviceGuard on(place().device);
    return std::make_unique<StagedExchange>(rank(), place(), staging_, std::move(sends), std::move(receives),
                                            in_flight_, host_call_);
  }
  // The host's memory carries fingerprints as it does without GPUs.
  std::unique_ptr<Request::Pending> start_signed(std::vector<Message> sends, std::vector<Message> receives,
                                                 const detail::SignedPeers& peers) override {
    const DeviceGuard on(place().device);
    const HostCall with_signs = [&](std::vector<Message> to, std::vector<Message> from) {
      return detail::signed_call(*this, peers, std::move(to), std::move(from), host_call_);
    };
    return std::make_unique<StagedExchange>(rank(), place(), staging_, std::move(sends), std::move(receives),
                                            in_flight_, with_signs);
  }
  bool carries_signs() const override { return true; }

  Staging staging_;
  HostCall host_call_;
  std::shared_ptr<InFlight> in_flight_ = std::make_shared<InFlight>();
};

}  // namespace

std::unique_ptr<DeviceCommunicator> make_staged(Communicator& ranks, const Place& place, Staging staging,
                                                HostCall host_call) {
  return std::make_unique<Staged>(ranks, place, staging, std::move(host_call));
}

Meeting meet(const Communicator& ranks, const Place& place, bool connected, const HostCall& host_call) {
  struct Card {
    std::array<char, sizeof(cudaUUID_t)> gpu = {};
    std::size_t host = 0;
    bool connected = false;
  };
  cudaDeviceProp properties{};
  WEFT_CUDA(cudaGetDeviceProperties(&properties, place.device));
  Card mine{.connected = connected};
  std::memcpy(mine.gpu.data(), &properties.uuid, mine.gpu.size());
  // NCCL takes ranks with different values of this variable for ranks of different hosts, which may share a GPU.
  if (const char* host = std::getenv("NCCL_HOSTID")) mine.host = std::hash<std::string_view>()(host);
  const auto block = [](Card& card) { return Block{.data = &card, .rows = 1, .bytes = sizeof(Card)}; };
  std::vector<Card> all(at(ranks.ranks()));
  std::vector<Message> to, from;
  for (Index peer = 0; peer < ranks.ranks(); ++peer) {
    to.push_back({peer, {block(mine)}});
    from.push_back({peer, {block(all[at(peer)])}});
  }
  host_call(std::move(to), std::move(from))->wait();
  const auto key = [](const Card& c) { return std::pair(c.gpu, c.host); };
  std::sort(all.begin(), all.end(), [&](const Card& a, const Card& b) { return key(a) < key(b); });
  const auto same = [&](const Card& a, const Card& b) { return key(a) == key(b); };
  return {.share_a_gpu = std::adjacent_find(all.begin(), all.end(), same) != all.end(),
          .connected = std::all_of(all.begin(), all.end(), [](const Card& c) { return c.connected; })};
}

}  // namespace weft::cuda
