// Rows of K and V between kernels: passes over them, and messages.
#pragma once

#include <vector>

#include "run/workspace.h"
#include "weft/communicator.h"
#include "weft/device.h"
#include "weft/schedule.h"
#include "weft/tensor.h"

namespace weft::run {

void clear(const Place& place, const TensorView& view);  // zeros
void add(const Place& place, const TensorView& to,
         const ConstTensorView& from);  // f32 += f32, or f64 += f64, same shape
void round_to(const Place& place, const TensorView& to, const ConstTensorView& from);  // from f32 or f64, rounded once
// Rounds K and V, or skips the one that is summed in its output already.
void round_to(const Place& place, const Kv& to, const ConstKv& from);

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
