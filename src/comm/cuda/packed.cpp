#include "comm/cuda/packed_blocks.h"
#include "comm/cuda/packed_message.h"
#include "comm/cuda/stream_signs.h"
#include "comm/cuda/transports.h"
#include "cuda/runtime.h"

namespace weft::cuda {
namespace {

std::vector<Parcel> parcels(const std::vector<PackedMessage>& messages, Index rank) {
  std::vector<Parcel> all;
  for (const PackedMessage& p : messages)
    if (p.message.peer != rank) all.push_back({p.message.peer, p.data, p.message.size()});
  return all;
}

// Those of a call that the stream will wait for.
class ArrivingSigns final : public detail::SignsInFlight::Arriving {
 public:
  // Takes the signs last: if this throws, the caller still has them and can abandon them.
  ArrivingSigns(StreamSigns&& signs, cudaStream_t stream) {
    WEFT_CUDA(cudaEventRecord(done_.get(), stream));
    signs_ = std::move(signs);
  }
  bool came() override {
    // In another mode the question would end a capture that any thread makes.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    clear_last_error(cudaThreadExchangeStreamCaptureMode(&mode));
    const cudaError_t result = cudaEventQuery(done_.get());
    clear_last_error(result);  // not ready is not an error
    clear_last_error(cudaThreadExchangeStreamCaptureMode(&mode));
    return result == cudaSuccess;
  }
  std::optional<std::string> disagreement() const override { return signs_.disagreement(); }
  void abandon() noexcept override { signs_.abandon(); }

 private:
  StreamSigns signs_;
  PooledEvent done_;
};

// The fingerprints of one call.
class CarriedSigns {
 public:
  CarriedSigns(StreamSigns signs, std::shared_ptr<detail::SignsInFlight> in_flight, int device, cudaStream_t stream)
      : signs_(std::move(signs)), in_flight_(std::move(in_flight)), device_(device), stream_(stream) {}
  ~CarriedSigns() {  // also of a call that nobody waited for
    try {
      if (carried_) queued();
    } catch (...) {
    }
    // Of a call that failed, NCCL may still write to their memory. One that was refused before is not told apart.
    signs_.abandon();
  }
  CarriedSigns(const CarriedSigns&) = delete;
  CarriedSigns& operator=(const CarriedSigns&) = delete;

  const StreamSigns& get() const { return signs_; }
  // Whether the caller's stream waits for their call, or will once the call is let go. If not, nobody knows when NCCL
  // has written them.
  void carried(bool yes) { carried_ = yes; }
  // The stream will wait for them.
  void queued() {
    if (in_flight_ == nullptr || signs_.empty()) return;
    const DeviceGuard on(device_);  // an event is recorded in streams of its own device alone
    in_flight_->add(std::make_unique<ArrivingSigns>(std::move(signs_), stream_));
  }

 private:
  StreamSigns signs_;
  std::shared_ptr<detail::SignsInFlight> in_flight_;
  int device_;
  cudaStream_t stream_;
  bool carried_ = false;
};

// Waits for the call that carries the signs.
void wait_for(Request::Pending& moving, CarriedSigns& signs) {
  signs.carried(false);
  moving.wait();
  signs.carried(true);
}

class PackedExchange final : public Request::Pending {
 public:
  PackedExchange(Index rank, const Place& place, std::vector<Message> sends, std::vector<Message> receives,
                 StreamSigns signs, std::shared_ptr<detail::SignsInFlight> in_flight, const Carry& carry)
      : rank_(rank),
        device_(place.device),
        stream_(static_cast<cudaStream_t>(place.stream)),
        signs_(std::move(signs), std::move(in_flight), device_, stream_),
        sends_(room_for_sends(std::move(sends), stream_)) {
    pack(sends_, stream_);
    for (Message& m : receives) {
      const bool in_place = m.combine == Message::Combine::replace || m.peer == rank;
      if (m.size() > 0) receives_.emplace_back(std::move(m), in_place, stream_);
    }
    std::vector<Parcel> to, from;
    for (const Index peer : signs_.get().peers().to) to.push_back({peer, signs_.get().sent(), StreamSigns::kBytes});
    for (std::size_t i = 0; i < signs_.get().peers().from.size(); ++i)
      from.push_back({signs_.get().peers().from[i], signs_.get().received(i), StreamSigns::kBytes});
    for (const Parcel& p : parcels(sends_, rank)) to.push_back(p);
    for (const Parcel& p : parcels(receives_, rank)) from.push_back(p);
    moving_ = carry(place, to, from);
    signs_.carried(true);
  }

  void wait() override {
    wait_for(*moving_, signs_);
    const DeviceGuard on(device_);
    signs_.queued();
    std::size_t next_own = 0;
    for (const PackedMessage& p : receives_) {
      const bool self = p.message.peer == rank_;
      if (!self && p.is_in_place()) continue;
      const Block from = self ? sent_to_self(sends_, rank_, p.message, next_own) : p.block();
      unpack(p.message, {&from, 1}, stream_);
    }
  }

 private:
  Index rank_;
  int device_;
  cudaStream_t stream_;
  CarriedSigns signs_;
  std::vector<PackedMessage> sends_, receives_;
  std::unique_ptr<Request::Pending> moving_;  // destroyed first, because it may use the messages' memory
};

// A collective of the transport between two contiguous buffers.
class PackedCollective final : public Request::Pending {
 public:
  // `start` is given both buffers, and the fingerprints that go with it.
  template <class Start>
  PackedCollective(const Place& place, std::span<const Block> from, std::span<const Block> to, StreamSigns signs,
                   std::shared_ptr<detail::SignsInFlight> in_flight, const Start& start)
      : device_(place.device),
        stream_(static_cast<cudaStream_t>(place.stream)),
        signs_(std::move(signs), std::move(in_flight), device_, stream_),
        from_(from, stream_),
        to_(to, stream_) {
    from_.pack(stream_);
    moving_ = start(from_.data(), to_.data(), signs_.get());
    signs_.carried(true);
  }

  void wait() override {
    wait_for(*moving_, signs_);
    const DeviceGuard on(device_);
    signs_.queued();
    to_.unpack(stream_);
  }

 private:
  int device_;
  cudaStream_t stream_;
  CarriedSigns signs_;
  PackedBlocks from_, to_;
  std::unique_ptr<Request::Pending> moving_;  // destroyed first, because it may use the buffers
};

std::vector<Index> sizes_of(std::span<const Block> blocks) {
  std::vector<Index> sizes;
  for (const Block& b : blocks) sizes.push_back(b.size());
  return sizes;
}

Index total_size(std::span<const Block> blocks) {
  Index bytes = 0;
  for (const Block& b : blocks) bytes += b.size();
  return bytes;
}

class Packed final : public DeviceCommunicator {
 public:
  Packed(Communicator& ranks, const Place& place, std::shared_ptr<detail::SignsInFlight> signs, Carry carry,
         CarryCollectives collectives)
      : DeviceCommunicator(ranks, place),
        in_flight_(std::move(signs)),
        carry_(std::move(carry)),
        own_(std::move(collectives)) {}

  bool has_collectives() const override {
    return own_.all_gather != nullptr || own_.reduce_scatter != nullptr || own_.all_to_all != nullptr;
  }

 private:
  using Buffers = std::span<const Block>;

  template <class Start>
  std::unique_ptr<Request::Pending> collective(Buffers from, Buffers to, const detail::SignedPeers& signs,
                                               const Start& start) {
    const DeviceGuard on(place().device);
    check_signs();
    return std::make_unique<PackedCollective>(place(), from, to, stream_signs(signs), in_flight_, start);
  }
  std::unique_ptr<Request::Pending> start_all_gather(const Block& mine, Buffers all) override {
    return start_all_gather_lists({&mine, 1}, all);
  }
  std::unique_ptr<Request::Pending> start_reduce_scatter(Buffers parts, const Block& mine) override {
    return start_reduce_scatter_lists(parts, {&mine, 1});
  }
  std::unique_ptr<Request::Pending> start_all_gather_lists(Buffers mine, Buffers all) override {
    if (own_.all_gather == nullptr) return nullptr;
    return collective(mine, all, carries_signs() ? sign_collective() : detail::SignedPeers{},
                      [&](const char* from, char* to, const StreamSigns& signs) {
                        const GatheredSigns with = signs.empty() ? GatheredSigns{} : signs.gathered();
                        return own_.all_gather(place(), from, to, total_size(mine), with);
                      });
  }
  std::unique_ptr<Request::Pending> start_reduce_scatter_lists(Buffers parts, Buffers mine) override {
    if (own_.reduce_scatter == nullptr) return nullptr;
    return collective(parts, mine, {}, [&](const char* from, char* to, const StreamSigns&) {
      return own_.reduce_scatter(place(), reinterpret_cast<const float*>(from), reinterpret_cast<float*>(to),
                                 total_size(mine) / Index{sizeof(float)});
    });
  }
  std::unique_ptr<Request::Pending> start_all_to_all(Buffers to, Buffers from) override {
    if (own_.all_to_all == nullptr) return nullptr;
    return collective(to, from, {}, [&](const char* sent, char* received, const StreamSigns&) {
      return own_.all_to_all(place(), sent, sizes_of(to), received, sizes_of(from));
    });
  }
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    return start_signed(std::move(sends), std::move(receives), {});
  }
  std::unique_ptr<Request::Pending> start_signed(std::vector<Message> sends, std::vector<Message> receives,
                                                 const detail::SignedPeers& peers) override {
    const DeviceGuard on(place().device);
    check_signs();
    return std::make_unique<PackedExchange>(rank(), place(), std::move(sends), std::move(receives), stream_signs(peers),
                                            in_flight_, carry_);
  }
  bool carries_signs() const override { return in_flight_ != nullptr; }
  bool captured() const { return is_captured(static_cast<cudaStream_t>(place().stream)); }
  // None in the capture of a graph, which would send and receive them again in each replay, and which a question about
  // an event would end.
  StreamSigns stream_signs(const detail::SignedPeers& peers) const {
    return !carries_signs() || captured() ? StreamSigns() : StreamSigns(rank(), peers);
  }
  void check_signs() const {
    if (carries_signs() && !captured()) in_flight_->check();
  }

  std::shared_ptr<detail::SignsInFlight> in_flight_;
  Carry carry_;
  CarryCollectives own_;
};

}  // namespace

std::unique_ptr<DeviceCommunicator> make_packed(Communicator& ranks, const Place& place,
                                                std::shared_ptr<detail::SignsInFlight> signs, Carry carry,
                                                CarryCollectives collectives) {
  return std::make_unique<Packed>(ranks, place, std::move(signs), std::move(carry), std::move(collectives));
}

}  // namespace weft::cuda
