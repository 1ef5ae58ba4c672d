#include "comm/cuda/packed.h"

#include <string>
#include <vector>

#include "comm/blocks.h"
#include "comm/cuda/segments.h"
#include "cuda/device_guard.h"
#include "cuda/stream_array.h"
#include "index.h"
#include "text.h"
#include "weft/error.h"

namespace weft::cuda {
namespace {

// A message in one piece: where it lies, or in memory of its own.
struct Piece {
  Message message;
  StreamArray<char> own;
  void* data = nullptr;

  Piece(Message given, bool in_place, cudaStream_t stream) : message(std::move(given)) {
    if (in_place && message.blocks.size() == 1) {
      const Block one = merged(message.blocks.front());
      if (one.rows == 1 && one.parts == 1) data = one.data;
    }
    if (data != nullptr) return;
    own = StreamArray<char>(at(message.size()), stream);
    data = own.get();
  }
  Block block() const { return {data, 1, 1, message.size(), message.size(), message.size()}; }
  Parcel parcel() const { return {message.peer, data, message.size()}; }
};

std::vector<Parcel> parcels(const std::vector<Piece>& pieces, Index rank) {
  std::vector<Parcel> all;
  for (const Piece& p : pieces)
    if (p.message.peer != rank) all.push_back(p.parcel());
  return all;
}

class PackedExchange final : public Request::Pending {
 public:
  PackedExchange(Index rank, const Place& place, std::vector<Message> sends, std::vector<Message> receives,
                 const Carry& carry)
      : rank_(rank), device_(place.device), stream_(static_cast<cudaStream_t>(place.stream)) {
    for (Message& m : sends) {
      if (m.size() == 0) continue;
      sends_.emplace_back(std::move(m), true, stream_);
      const Piece& piece = sends_.back();
      const Block whole = piece.block();
      if (piece.own.get() != nullptr) copy(segments(piece.message.blocks, {&whole, 1}), stream_);
    }
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
    for (const Piece& p : receives_) {
      const bool self = p.message.peer == rank_;
      if (!self && p.own.get() == nullptr) continue;  // it came to where it belongs
      const Block from = self ? own(p.message, next_own) : p.block();
      const std::vector<Segment> all = segments({&from, 1}, p.message.blocks);
      p.message.combine == Message::Combine::add ? add_f32(all, stream_) : copy(all, stream_);
    }
  }

 private:
  // The next message that this rank sends to itself.
  Block own(const Message& to, std::size_t& next) const {
    while (next < sends_.size() && sends_[next].message.peer != rank_) ++next;
    if (next == sends_.size() || sends_[next].message.size() != to.size())
      throw Error(text("rank ", rank_, " receives ", to.size(), " bytes from itself that it does not send"),
                  "let both sides name the same messages");
    return sends_[next++].block();
  }

  Index rank_;
  int device_;
  cudaStream_t stream_;
  std::vector<Piece> sends_, receives_;
  std::unique_ptr<Request::Pending> moving_;  // goes first: it may use the others' memory
};

class Packed final : public DeviceCommunicator {
 public:
  Packed(Communicator& ranks, const Place& place, Carry carry)
      : DeviceCommunicator(ranks.rank(), ranks.ranks(), ranks),
        name_(ranks.name()),
        place_(place),
        carry_(std::move(carry)) {}

  std::string_view name() const override { return name_; }
  void use(void* stream) override { place_.stream = stream; }

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    const DeviceGuard on(place_.device);
    return std::make_unique<PackedExchange>(rank(), place_, std::move(sends), std::move(receives), carry_);
  }
  std::unique_ptr<Communicator> make_split(Index, Index) override {
    throw Error("a communicator on a GPU cannot be split", "split the one that it was made of, and call on() then");
  }

  std::string name_;
  Place place_;  // with the caller's stream
  Carry carry_;
};

}  // namespace

std::unique_ptr<DeviceCommunicator> make_packed(Communicator& ranks, const Place& place, Carry carry) {
  return std::make_unique<Packed>(ranks, place, std::move(carry));
}

}  // namespace weft::cuda
