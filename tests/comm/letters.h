// Messages cut at random on both sides, and what must come of them: for any communicator.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "index.h"
#include "weft/communicator.h"

namespace weft::test {

using Random = std::mt19937_64;
using Combine = Message::Combine;

inline Index below(Random& random, Index end) { return static_cast<Index>(random() % static_cast<std::uint64_t>(end)); }
template <class T>
Block block(std::vector<T>& values) {
  return {.data = values.data(), .rows = 1, .bytes = static_cast<Index>(values.size() * sizeof(T))};
}
template <class T>
std::vector<Block> blocks(std::vector<std::vector<T>>& all) {
  std::vector<Block> result;
  for (std::vector<T>& values : all) result.push_back(block(values));
  return result;
}

inline float value(Index seed, Index a, Index b = 0, Index c = 0) {  // depends on all, and sums of it are not exact
  const double x = static_cast<double>(seed + 1) * 0.37 + static_cast<double>(a) * 1.91 +
                   static_cast<double>(b) * 0.73 + static_cast<double>(c) * 3.3;
  return static_cast<float>(std::sin(x) * 3);
}
inline std::vector<float> values(Index count, Index seed, Index a, Index b = 0) {
  std::vector<float> result(at(count));
  for (Index i = 0; i < count; ++i) result[at(i)] = value(seed, a, b, i);
  return result;
}

// Memory with blocks in it, in units of `unit` bytes; the rest is filled with what nobody may change.
struct Pieces {
  static constexpr char kElsewhere = 0x5a;
  std::vector<float> memory;  // for its alignment
  std::vector<Block> blocks;
  std::vector<std::size_t> order;  // where each byte of the message lies

  Pieces(Random& random, Index size, Index unit) {
    std::vector<std::ptrdiff_t> offsets;
    Index used = 0;
    for (Index left = size / unit; left > 0;) {
      Block b;
      b.bytes = 1 + below(random, std::min<Index>(left, 40));
      b.parts = 1 + below(random, std::min<Index>(left / b.bytes, 3));
      b.rows = 1 + below(random, std::min<Index>(left / (b.bytes * b.parts), 4));
      if (below(random, 4) == 0) b.bytes = left, b.parts = b.rows = 1;
      left -= b.size();
      const bool gaps = below(random, 2) == 0;
      b.part_stride = b.bytes + (gaps ? below(random, 4) : 0);
      b.row_stride = b.part_stride * b.parts + (gaps ? below(random, 4) : 0);
      if (below(random, 3) == 0) {  // parts outside, rows inside, as of one head after another
        b.row_stride = b.bytes + below(random, 2);
        b.part_stride = b.row_stride * b.rows + below(random, 2);
      }
      const Index start = used + below(random, 3);
      used = start + b.row_stride * b.rows + b.part_stride * b.parts;
      offsets.push_back(start * unit);
      b.bytes *= unit, b.part_stride *= unit, b.row_stride *= unit;
      blocks.push_back(b);
      if (below(random, 5) == 0) {  // an empty one between
        offsets.push_back(0);
        blocks.push_back({nullptr, 0, 1, 8});
      }
    }
    memory.resize(at(used * unit / 4 + 1));
    std::memset(memory.data(), kElsewhere, memory.size() * 4);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const Block& b = blocks[i];
      for (Index row = 0; row < b.rows; ++row) {
        for (Index part = 0; part < b.parts; ++part) {
          for (Index byte = 0; byte < b.bytes; ++byte) {
            order.push_back(at(offsets[i] + row * b.row_stride + part * b.part_stride + byte));
          }
        }
      }
      if (b.size() > 0) blocks[i].data = bytes() + offsets[i];
    }
  }

  char* bytes() { return reinterpret_cast<char*>(memory.data()); }
  void write(const std::vector<char>& message) {
    for (std::size_t i = 0; i < order.size(); ++i) bytes()[order[i]] = message[i];
  }
  std::vector<char> read() {
    std::vector<char> result;
    for (const std::size_t offset : order) result.push_back(bytes()[offset]);
    return result;
  }
  bool elsewhere_untouched() {
    std::vector<bool> mine(memory.size() * 4, false);
    for (const std::size_t offset : order) mine[offset] = true;
    for (std::size_t i = 0; i < mine.size(); ++i) {
      if (!mine[i] && bytes()[i] != kElsewhere) return false;
    }
    return true;
  }
};

struct Letter {
  Index from = 0, to = 0, size = 0;
  bool add = false;
  std::vector<char> sent, before, after;
};

inline std::vector<char> chars(const std::vector<float>& floats) {
  std::vector<char> result(floats.size() * 4);
  if (!floats.empty()) std::memcpy(result.data(), floats.data(), result.size());
  return result;
}

inline Letter random_letter(Random& random, Index ranks) {
  Letter letter{below(random, ranks),
                below(random, ranks),
                below(random, 3) == 0 ? 0 : below(random, 400),
                below(random, 2) == 0,
                {},
                {},
                {}};
  if (letter.add) {
    std::vector<float> sent(at(letter.size)), before(at(letter.size)), after(at(letter.size));
    for (std::size_t i = 0; i < sent.size(); ++i) {
      sent[i] = value(3, below(random, 1000));
      before[i] = value(4, below(random, 1000));
      after[i] = before[i] + sent[i];
    }
    letter.size *= 4;
    letter.sent = chars(sent), letter.before = chars(before), letter.after = chars(after);
  } else {
    for (Index i = 0; i < letter.size; ++i) letter.sent.push_back(static_cast<char>(below(random, 256)));
    letter.before = std::vector<char>(at(letter.size), 1);
    letter.after = letter.sent;
  }
  return letter;
}

struct Side {  // a rank's part in a call
  std::vector<Pieces> sent, received;
  std::vector<const Letter*> letters;  // of what is received
  Request request;
};

inline void start(Communicator& c, const std::vector<Letter>& letters, Random& random, Side& side, Traffic& expected) {
  std::vector<Message> sends, receives;
  for (const Letter& letter : letters) {
    if (letter.from != c.rank()) continue;
    side.sent.emplace_back(random, letter.size, letter.add ? 4 : 1).write(letter.sent);
    sends.push_back({letter.to, side.sent.back().blocks});
    if (letter.to != c.rank()) ++expected.messages_sent, expected.bytes_sent += letter.size;
  }
  // Peers in any order; messages of one peer in theirs.
  std::vector<Index> peers(at(c.ranks()));
  std::iota(peers.begin(), peers.end(), 0);
  std::shuffle(peers.begin(), peers.end(), random);
  for (const Index peer : peers) {
    for (const Letter& letter : letters) {
      if (letter.to != c.rank() || letter.from != peer) continue;
      side.received.emplace_back(random, letter.size, letter.add ? 4 : 1).write(letter.before);
      receives.push_back({peer, side.received.back().blocks, letter.add ? Combine::add : Combine::replace});
      side.letters.push_back(&letter);
      if (peer != c.rank()) ++expected.messages_received, expected.bytes_received += letter.size;
    }
  }
  side.request = c.exchange(std::move(sends), std::move(receives));
}

// Of several calls: what each rank sends to whom.
inline std::vector<std::vector<Letter>> random_calls(Random& random, Index ranks) {
  std::vector<std::vector<Letter>> calls(at(1 + below(random, 4)));
  for (std::vector<Letter>& letters : calls) {
    for (Index n = below(random, 3 * ranks + 1); n > 0; --n) letters.push_back(random_letter(random, ranks));
  }
  return calls;
}

inline void exchange_letters(Communicator& c, const std::vector<std::vector<Letter>>& calls, std::uint64_t seed) {
  Random own(seed * 100 + static_cast<std::uint64_t>(c.rank()));
  std::vector<Side> sides(calls.size());  // all under way at once, waited for in an order of this rank's own
  Traffic expected;
  for (std::size_t i = 0; i < calls.size(); ++i) start(c, calls[i], own, sides[i], expected);
  std::vector<std::size_t> order(calls.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), own);
  for (const std::size_t i : order) {
    Side& side = sides[i];
    EXPECT_TRUE(side.request.in_flight());
    side.request.wait();
    EXPECT_FALSE(side.request.in_flight());
    side.request.wait();  // once is enough, twice does no harm
    for (std::size_t n = 0; n < side.letters.size(); ++n) {
      EXPECT_EQ(side.received[n].read(), side.letters[n]->after) << "seed " << seed << ", call " << i;
      EXPECT_TRUE(side.received[n].elsewhere_untouched()) << "seed " << seed << ", call " << i;
    }
    for (Pieces& pieces : side.sent) pieces.write(std::vector<char>(pieces.order.size(), 'x'));  // may be changed now
  }
  EXPECT_EQ(c.traffic(), expected) << "seed " << seed;
  c.reset_traffic();
  EXPECT_EQ(c.traffic(), Traffic{});
}

}  // namespace weft::test
