#include "comm/cuda/packed_message.h"
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

class PackedExchange final : public Request::Pending {
 public:
  PackedExchange(Index rank, const Place& place, std::vector<Message> sends, std::vector<Message> receives,
                 const Carry& carry)
      : rank_(rank),
        device_(place.device),
        stream_(static_cast<cudaStream_t>(place.stream)),
        sends_(pack_sends(std::move(sends), stream_)) {
    for (Message& m : receives) {
      const bool in_place = m.combine == Message::Combine::replace || m.peer == rank;
      if (m.size() > 0) receives_.emplace_back(std::move(m), in_place, stream_);
    }
    moving_ = carry(place, parcels(sends_, rank), parcels(receives_, rank));
  }

  void wait() override {
    moving_->wait();
    const DeviceGuard on(device_);
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
  std::vector<PackedMessage> sends_, receives_;
  std::unique_ptr<Request::Pending> moving_;  // destroyed first, because it may use the messages' memory
};

class Packed final : public DeviceCommunicator {
 public:
  Packed(Communicator& ranks, const Place& place, Carry carry)
      : DeviceCommunicator(ranks, place), carry_(std::move(carry)) {}

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    const DeviceGuard on(place().device);
    return std::make_unique<PackedExchange>(rank(), place(), std::move(sends), std::move(receives), carry_);
  }

  Carry carry_;
};

}  // namespace

std::unique_ptr<DeviceCommunicator> make_packed(Communicator& ranks, const Place& place, Carry carry) {
  return std::make_unique<Packed>(ranks, place, std::move(carry));
}

}  // namespace weft::cuda
