// A communicator that holds its caller to the contract of weft/communicator.h and moves nothing before it must. What is
// sent is copied when a call begins, what is received is NaN until its wait(), and a buffer that somebody touches while
// a call has it fails the test, whatever the timing of the ranks.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "comm/blocks.h"
#include "index.h"
#include "weft/communicator.h"

namespace weft::test {

using Bytes = std::vector<unsigned char>;

inline Block whole(Bytes& bytes) {
  const Index size = static_cast<Index>(bytes.size());
  return {bytes.data(), 1, 1, size, size, size};
}

// The pieces of memory that messages name, in order of address.
class Memory {
 public:
  void add(const Message& m) {
    for (Pieces p(m.blocks); !p.done(); p.take(p.left())) pieces_.emplace_back(p.data(), p.data() + p.left());
    std::sort(pieces_.begin(), pieces_.end());
  }
  bool overlaps(const Memory& other) const {
    for (std::size_t a = 0, b = 0; a < pieces_.size() && b < other.pieces_.size();) {
      if (pieces_[a].second <= other.pieces_[b].first)
        ++a;
      else if (other.pieces_[b].second <= pieces_[a].first)
        ++b;
      else
        return true;
    }
    return false;
  }

 private:
  std::vector<std::pair<const char*, const char*>> pieces_;
};

inline Bytes bytes_of(const Message& m) {
  Bytes bytes(at(m.size()));
  const Block to = whole(bytes);
  move_blocks(m.blocks, {&to, 1}, Message::Combine::replace);
  return bytes;
}
inline void fill(const Message& m, unsigned char value) {
  for (Pieces p(m.blocks); !p.done(); p.take(p.left())) std::memset(p.data(), value, at(p.left()));
}

class Strict final : public Communicator {
 public:
  explicit Strict(Communicator& inner) : Communicator(inner.rank(), inner.ranks()), inner_(inner) {}
  std::string_view name() const override { return inner_.name(); }

 private:
  struct Call final : Request::Pending {
    Call(Strict& of, std::vector<Message> sends, std::vector<Message> receives);
    ~Call() override { std::erase(strict.in_flight_, this); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    void wait() override;
    void look_at(const Call& other) const;

    Strict& strict;
    std::vector<Message> sends, receives;
    std::vector<Bytes> sent, arrived;
    std::vector<Bytes> before;  // of receives that nobody may touch: what lay there, and in place of it now
    // What is sent; what is received and nobody may touch; what is only added to, in wait().
    Memory out, in, sums;
    Request request;
  };

  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    return std::make_unique<Call>(*this, std::move(sends), std::move(receives));
  }
  std::unique_ptr<Communicator> make_split(Index, Index) override { return nullptr; }

  Communicator& inner_;
  std::vector<Call*> in_flight_;
};

inline Strict::Call::Call(Strict& of, std::vector<Message> given, std::vector<Message> wanted)
    : strict(of), sends(std::move(given)), receives(std::move(wanted)), before(receives.size()) {
  Memory from_others;
  for (const Message& m : sends) out.add(m);
  for (const Message& m : receives) {
    (adds(m.combine) && !m.at_once ? sums : in).add(m);
    if (m.peer != strict.rank()) from_others.add(m);
  }
  EXPECT_FALSE(out.overlaps(from_others)) << "rank " << strict.rank() << " sends what it receives in the same call";
  for (const Call* other : strict.in_flight_) look_at(*other);
  strict.in_flight_.push_back(this);

  std::vector<Message> to, from;
  for (const Message& m : sends) sent.push_back(bytes_of(m));
  for (const Message& m : receives) arrived.emplace_back(at(m.size()));
  for (std::size_t i = 0; i < sends.size(); ++i) to.push_back({sends[i].peer, {whole(sent[i])}});
  for (std::size_t i = 0; i < receives.size(); ++i) from.push_back({receives[i].peer, {whole(arrived[i])}});
  for (const Message& m : receives)
    if (!adds(m.combine)) fill(m, 0xff);
  for (std::size_t i = 0; i < receives.size(); ++i)
    if (!adds(receives[i].combine) || receives[i].at_once) before[i] = bytes_of(receives[i]);
  request = strict.inner_.exchange(std::move(to), std::move(from));
}

inline void Strict::Call::look_at(const Call& other) const {
  EXPECT_FALSE(in.overlaps(other.in) || in.overlaps(other.sums) || sums.overlaps(other.in))
      << "rank " << strict.rank() << " receives what another call in flight receives";
  EXPECT_FALSE(in.overlaps(other.out) || sums.overlaps(other.out))
      << "rank " << strict.rank() << " receives where a call in flight sends from";
  EXPECT_FALSE(out.overlaps(other.in) || out.overlaps(other.sums))
      << "rank " << strict.rank() << " sends what a call in flight receives";
}

inline void Strict::Call::wait() {
  request.wait();
  for (std::size_t i = 0; i < receives.size(); ++i) {
    EXPECT_TRUE(before[i].empty() || before[i] == bytes_of(receives[i]))
        << "rank " << strict.rank() << ": what a call in flight receives was touched before its wait";
  }
  for (std::size_t i = 0; i < sends.size(); ++i) {
    EXPECT_TRUE(out.overlaps(in) || sent[i] == bytes_of(sends[i]))
        << "rank " << strict.rank() << ": what a call in flight sends was changed before its wait";
  }
  for (std::size_t i = 0; i < receives.size(); ++i) {
    const Block from = whole(arrived[i]);
    move_blocks({&from, 1}, receives[i].blocks, receives[i].combine);
  }
}

}  // namespace weft::test
