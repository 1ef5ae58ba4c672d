// Messages as single pieces of memory, for transports that move nothing else (process groups of torch).
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "comm/blocks.h"
#include "comm/sign.h"
#include "index.h"
#include "weft/communicator.h"

namespace weft {

// Messages to or from one rank that go as one, in their order.
using Letter = std::vector<Message>;

// The fingerprint of a pass goes with the next message to the same rank: one more message takes as long as a short
// pass. Both sides do the same, because they see the same sizes.
inline std::vector<Letter> letters_of(std::vector<Message> messages, Index rank) {
  std::vector<Letter> letters;
  std::map<Index, Message> signs;  // by peer
  for (std::size_t i = 0; i < messages.size(); ++i) {
    Message& m = messages[i];
    const auto to_same = [&](const Message& other) { return other.peer == m.peer && other.size() > 0; };
    if (m.peer != rank && m.size() == Index{sizeof(detail::CallSign)} && !signs.contains(m.peer) &&
        std::any_of(messages.begin() + static_cast<std::ptrdiff_t>(i) + 1, messages.end(), to_same)) {
      const Index peer = m.peer;
      signs.emplace(peer, std::move(m));
      continue;
    }
    Letter letter;
    if (const auto sign = signs.find(m.peer); sign != signs.end() && m.size() > 0) {
      letter.push_back(std::move(sign->second));
      signs.erase(sign);
    }
    letter.push_back(std::move(m));
    letters.push_back(std::move(letter));
  }
  return letters;
}

// The bytes of messages as one contiguous piece: the caller's memory if that is contiguous, else a copy.
struct Packed {
  Letter letter;
  std::vector<char> own;
  void* data = nullptr;
  Index size = 0;

  Index peer() const { return letter.front().peer; }
  Block part(Index begin, Index bytes) const { return {static_cast<char*>(data) + begin, 1, 1, bytes, bytes, bytes}; }
};

inline Packed packed(Letter letter, bool in_place) {
  Packed out{std::move(letter), {}, nullptr, 0};
  for (const Message& m : out.letter) out.size += m.size();
  if (in_place && out.letter.size() == 1 && out.letter.front().blocks.size() == 1) {
    const Block one = merged(out.letter.front().blocks.front());
    if (one.rows == 1 && one.parts == 1) out.data = one.data;
  }
  if (out.data == nullptr && out.size > 0) {
    out.own.resize(at(out.size));
    out.data = out.own.data();
  }
  return out;
}

// Copies what is sent into the piece.
inline void pack(const Packed& to) {
  Index begin = 0;
  for (const Message& m : to.letter) {
    const Block part = to.part(begin, m.size());
    move_blocks(m.blocks, {&part, 1}, Message::Combine::replace);
    begin += m.size();
  }
}

// Copies or adds what came to where it belongs.
inline void unpack(const Packed& from, const Letter& to) {
  if (from.size == 0 || (from.data != nullptr && from.own.empty() && &from.letter == &to)) return;
  Index begin = 0;
  for (const Message& m : to) {
    const Block part = from.part(begin, m.size());
    move_blocks({&part, 1}, m.blocks, m.combine);
    begin += m.size();
  }
}

}  // namespace weft
