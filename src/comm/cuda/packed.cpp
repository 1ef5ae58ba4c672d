#include "comm/cuda/packed_blocks.h"
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
        sends_(room_for_sends(std::move(sends), stream_)) {
    pack(sends_, stream_);
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

// A collective of the transport between two contiguous buffers.
class PackedCollective final : public Request::Pending {
 public:
  // `start` is given both buffers.
  template <class Start>
  PackedCollective(const Place& place, std::span<const Block> from, std::span<const Block> to, const Start& start)
      : device_(place.device),
        stream_(static_cast<cudaStream_t>(place.stream)),
        from_(from, stream_),
        to_(to, stream_) {
    from_.pack(stream_);
    moving_ = start(from_.data(), to_.data());
  }

  void wait() override {
    moving_->wait();
    const DeviceGuard on(device_);
    to_.unpack(stream_);
  }

 private:
  int device_;
  cudaStream_t stream_;
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
  Packed(Communicator& ranks, const Place& place, Carry carry, CarryCollectives collectives)
      : DeviceCommunicator(ranks, place), carry_(std::move(carry)), own_(std::move(collectives)) {}

  bool has_collectives() const override {
    return own_.all_gather != nullptr || own_.reduce_scatter != nullptr || own_.all_to_all != nullptr;
  }

 private:
  using Buffers = std::span<const Block>;

  template <class Start>
  std::unique_ptr<Request::Pending> collective(Buffers from, Buffers to, const Start& start) {
    const DeviceGuard on(place().device);
    return std::make_unique<PackedCollective>(place(), from, to, start);
  }
  std::unique_ptr<Request::Pending> start_all_gather(const Block& mine, Buffers all) override {
    return start_all_gather_lists({&mine, 1}, all);
  }
  std::unique_ptr<Request::Pending> start_reduce_scatter(Buffers parts, const Block& mine) override {
    return start_reduce_scatter_lists(parts, {&mine, 1});
  }
  std::unique_ptr<Request::Pending> start_all_gather_lists(Buffers mine, Buffers all) override {
    if (own_.all_gather == nullptr) return nullptr;
    return collective(mine, all,
                      [&](const char* from, char* to) { return own_.all_gather(place(), from, to, total_size(mine)); });
  }
  std::unique_ptr<Request::Pending> start_reduce_scatter_lists(Buffers parts, Buffers mine) override {
    if (own_.reduce_scatter == nullptr) return nullptr;
    return collective(parts, mine, [&](const char* from, char* to) {
      return own_.reduce_scatter(place(), reinterpret_cast<const float*>(from), reinterpret_cast<float*>(to),
                                 total_size(mine) / Index{sizeof(float)});
    });
  }
  std::unique_ptr<Request::Pending> start_all_to_all(Buffers to, Buffers from) override {
    if (own_.all_to_all == nullptr) return nullptr;
    return collective(to, from, [&](const char* sent, char* received) {
      return own_.all_to_all(place(), sent, sizes_of(to), received, sizes_of(from));
    });
  }
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    const DeviceGuard on(place().device);
    return std::make_unique<PackedExchange>(rank(), place(), std::move(sends), std::move(receives), carry_);
  }

  Carry carry_;
  CarryCollectives own_;
};

}  // namespace

std::unique_ptr<DeviceCommunicator> make_packed(Communicator& ranks, const Place& place, Carry carry,
                                                CarryCollectives collectives) {
  return std::make_unique<Packed>(ranks, place, std::move(carry), std::move(collectives));
}

}  // namespace weft::cuda
