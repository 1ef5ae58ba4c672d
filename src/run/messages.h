// Rows of K and V as messages.
#pragma once

#include <vector>

#include "run/workspace.h"
#include "weft/communicator.h"
#include "weft/schedule.h"

namespace weft::run {

// One message a peer: its rows of K, then of V.
inline std::vector<Message> messages(const std::vector<PeerRows>& peers, const ConstKv& kv,
                                     Message::Combine combine = Message::Combine::replace) {
  std::vector<Message> all;
  all.reserve(peers.size());
  for (const PeerRows& peer : peers) {
    Message m{.peer = peer.peer, .blocks = {}, .combine = combine};
    for (const ConstTensorView& view : {kv.k, kv.v})
      for (const Range& rows : peer.rows) append_blocks(view, rows, m.blocks);
    all.push_back(std::move(m));
  }
  return all;
}

// Receives that may be added before wait(), because nothing else touches their memory until then (Message::at_once).
inline std::vector<Message> at_once(std::vector<Message> all, bool replace_first) {
  for (Message& m : all) m.at_once = true;
  if (replace_first && !all.empty()) all.front().combine = Message::Combine::replace;
  return all;
}

inline ConstKv constant(const Kv& kv) { return {kv.k, kv.v}; }

}  // namespace weft::run
