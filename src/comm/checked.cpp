#include "comm/checked.h"

#include <array>
#include <cstdint>
#include <cstring>

#include "comm/blocks.h"
#include "index.h"
#include "text.h"

namespace weft {
namespace {

// What is sent behind each message.
struct Seal {
  std::uint64_t call = 0, route = 0, size = 0, sum = 0;

  friend bool operator==(const Seal&, const Seal&) = default;
};

// A checksum of bytes in order, which does not depend on how they are cut into pieces.
class Checksum {
 public:
  void add(const unsigned char* data, Index bytes) {
    while (bytes > 0 && (fill_ > 0 || bytes < Index{sizeof(word_)})) {  // up to the next whole word
      reinterpret_cast<unsigned char*>(&word_)[fill_++] = *data++;
      --bytes;
      if (fill_ == sizeof(word_)) {
        mix(word_);
        fill_ = 0;
      }
    }
    for (; bytes >= Index{sizeof(word_)}; data += sizeof(word_), bytes -= Index{sizeof(word_)}) {
      std::uint64_t word = 0;
      std::memcpy(&word, data, sizeof(word));
      mix(word);
    }
    if (bytes > 0) add(data, bytes);
  }
  std::uint64_t value() {
    if (fill_ > 0) {
      std::memset(reinterpret_cast<unsigned char*>(&word_) + fill_, 0, sizeof(word_) - fill_);
      mix(word_);
      fill_ = 0;
    }
    return sum_;
  }

 private:
  void mix(std::uint64_t word) {
    sum_ = (sum_ ^ word) * 0x9e3779b97f4a7c15u;
    sum_ ^= sum_ >> 29;
  }

  std::uint64_t sum_ = 0x2545f4914f6cdd1du, word_ = 0;
  std::size_t fill_ = 0;
};

}  // namespace

std::uint64_t checksum(std::span<const Block> blocks) {
  Checksum sum;
  for (const Block& given : blocks) {
    const Block b = merged(given);
    for (Index row = 0; row < b.rows; ++row)
      for (Index part = 0; part < b.parts; ++part)
        sum.add(static_cast<const unsigned char*>(b.data) + row * b.row_stride + part * b.part_stride, b.bytes);
  }
  return sum.value();
}

namespace {

class CheckedExchange final : public Request::Pending {
 public:
  CheckedExchange(Communicator& inner, std::uint64_t call, std::vector<Message> sends, std::vector<Message> receives)
      : call_(call),
        rank_(inner.rank()),
        receives_(std::move(receives)),
        sent_(sends.size()),
        received_(receives_.size()),
        scratch_(receives_.size()) {
    for (std::size_t i = 0; i < sends.size(); ++i) {
      Message& m = sends[i];
      sent_[i] = {call_, route(rank_, m.peer), static_cast<std::uint64_t>(m.size()), checksum(m.blocks)};
      m.blocks.push_back({.data = &sent_[i], .rows = 1, .bytes = sizeof(Seal)});
    }
    std::vector<Message> sealed = receives_;
    for (std::size_t i = 0; i < sealed.size(); ++i) {
      if (adds(sealed[i].combine)) {  // is added only after its checksum was compared
        scratch_[i].resize(at(sealed[i].size()) / sizeof(float));
        sealed[i].blocks = {{.data = scratch_[i].data(), .rows = 1, .bytes = sealed[i].size()}};
        sealed[i].combine = Message::Combine::replace;
      }
      sealed[i].blocks.push_back({.data = &received_[i], .rows = 1, .bytes = sizeof(Seal)});
    }
    in_flight_ = inner.exchange(std::move(sends), std::move(sealed));
  }

  void wait() override {
    in_flight_.wait();
    for (std::size_t i = 0; i < receives_.size(); ++i) {
      Message& m = receives_[i];
      const bool added = adds(m.combine);
      const Block from{.data = scratch_[i].data(), .rows = 1, .bytes = m.size()};
      const Seal want{call_, route(m.peer, rank_), static_cast<std::uint64_t>(m.size()),
                      added ? checksum(std::array{from}) : checksum(m.blocks)};
      if (!(received_[i] == want)) refuse(m, received_[i], want);
      if (added) move_blocks(std::array{from}, m.blocks, m.combine);
    }
  }

 private:
  static std::uint64_t route(Index from, Index to) {
    return static_cast<std::uint64_t>(from) << 32 | static_cast<std::uint64_t>(to);
  }

  [[noreturn]] void refuse(const Message& m, const Seal& got, const Seal& want) const {
    const char* what = "other bytes than were sent";
    if (got.call != want.call)
      what = "the message of another call";
    else if (got.route != want.route)
      what = "a message meant for another rank";
    else if (got.size != want.size)
      what = "a message of another size";
    throw Error(text("call ", call_, ": rank ", rank_, " received ", what, " from rank ", m.peer),
                "the transport between them is at fault; nothing of this pass can be trusted");
  }

  std::uint64_t call_;
  Index rank_;
  std::vector<Message> receives_;
  std::vector<Seal> sent_, received_;
  std::vector<std::vector<float>> scratch_;
  Request in_flight_;  // last, so that it is destroyed before the memory that it uses
};

class Checked final : public Communicator {
 public:
  explicit Checked(Communicator& inner) : Communicator(inner.rank(), inner.ranks()), inner_(inner) {}
  Checked(std::unique_ptr<Communicator> inner, int)
      : Communicator(inner->rank(), inner->ranks()), owned_(std::move(inner)), inner_(*owned_) {}

  std::string_view name() const override { return inner_.name(); }
  double time_limit() const override { return inner_.time_limit(); }

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    return std::make_unique<CheckedExchange>(inner_, ++inner_.calls().exchanges, std::move(sends), std::move(receives));
  }
  std::unique_ptr<Communicator> make_split(Index color, Index key) override {
    return std::make_unique<Checked>(inner_.split(color, key), 0);
  }

  std::unique_ptr<Communicator> owned_;
  Communicator& inner_;
};

}  // namespace

std::unique_ptr<Communicator> make_checked(Communicator& inner) { return std::make_unique<Checked>(inner); }

}  // namespace weft
