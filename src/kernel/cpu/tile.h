// What the kernels of every target share around their matrix products: scratch memory, stacked rows, tiles of keys, and
// the load and store of a row's state.
#pragma once

#include <cmath>
#include <limits>
#include <span>

#include "kernel/cpu/elementwise.h"
#include "kernel/cpu/rows.h"
#include "kernel/cpu/target.h"
#include "weft/state.h"

namespace weft::cpu {

// Allocates from a thread's scratch; without scratch it only counts.
struct Dealer {
  float* scratch;
  Index floats = 0;  // allocated so far

  // A multiple of 64 bytes each, so that everything is aligned if the scratch is.
  template <class T = float>
  WEFT_INLINE T* take(Index count) {
    float* at = scratch ? scratch + floats : nullptr;
    floats += round_up(count * static_cast<Index>(sizeof(T)), 64) / static_cast<Index>(sizeof(float));
    return reinterpret_cast<T*>(at);
  }
};

// The heads of a group stacked token by token: row r is head r % group of token r / group.
struct Stack {
  std::span<const Index> heads;
  Range tokens;

  WEFT_INLINE Index group() const { return static_cast<Index>(heads.size()); }
  WEFT_INLINE Index rows() const { return tokens.size() * group(); }
  WEFT_INLINE Index head(Index row) const { return heads[static_cast<std::size_t>(row % group())]; }
  // Rows past the last have its token.
  WEFT_INLINE Index token(Index row) const { return tokens.begin + min_of(row, rows() - 1) / group(); }
  WEFT_INLINE Range tokens_of(const Slice& s) const {
    return {max_of(s.q_begin, tokens.begin), min_of(s.q_end, tokens.end)};
  }
  // Which pieces of `size` rows the slice touches.
  WEFT_INLINE Range pieces_of(const Slice& s, Index size) const {
    const Range in = tokens_of(s);
    return {(in.begin - tokens.begin) * group() / size, ceil_div((in.end - tokens.begin) * group(), size)};
  }
};

// The entry points of a target (target.h) for a kernel class, which has a constructor (call, stacked rows, scratch),
// run and `memory_`.
template <class Kernel>
struct ForwardEntry {
  // 512 stacked rows: Q and O panels fill half of a 1 MiB L2 at dim 128, and K/V are copied once for all of them.
  static Index tile_rows(const ForwardCall& call, Index group) {
    return max_of(1, stacked_rows(512, call.args.q.dim, call.args.v.dim) / group);
  }
  static Index scratch(const ForwardCall& call, Index rows) { return Kernel(call, rows, nullptr).memory_.floats; }
  static void tile(const ForwardCall& call, const ForwardTile& tile) {
    const Stack stack{tile.heads.heads, tile.rows.rows};
    Kernel(call, stack.rows(), tile.scratch).run(tile, stack);
  }
};
template <class Kernel>
struct BackwardEntry {
  // 256 stacked rows: Q, dO, their panels and dQ stay in L2 while the keys pass by.
  static Index block_rows(const BackwardCall& call, Index group) {
    return max_of(1, stacked_rows(256, call.args.q.dim, call.args.v.dim) / group);
  }
  static Index scratch(const BackwardCall& call, Index rows) { return Kernel(call, rows, nullptr).memory_.floats; }
  static void part(const BackwardCall& call, const BackwardPart& part) {
    Index rows = 0;
    for (const Range& block : part.blocks) rows = max_of(rows, block.size());
    Kernel work(call, rows * static_cast<Index>(part.heads.heads.size()), part.scratch);
    for (const Range& block : part.blocks) work.run(part, block);
  }
};

// Writes the tokens of stacked rows [0, count), and which of the rows lie in a slice of the tile.
WEFT_INLINE void place_rows(const ForwardCall& call, const RowTile& tile, const Stack& stack, Index count,
                            Index* tokens, char* live) {
  for (Index r = 0; r < count; ++r) {
    tokens[r] = stack.token(r);
    live[r] = 0;
  }
  for (const Index n : tile.slices) {
    const Slice& s = call.slices[static_cast<std::size_t>(n)];
    for (Index r = 0; r < stack.rows(); ++r) live[r] |= tokens[r] >= s.q_begin && tokens[r] < s.q_end;
  }
}

// visit(base, keys, next) for each tile of `size` keys that the stack sees of `s`: `keys` of those after key row
// `base`; `next` are the rows of the tile after it. Tiles count from k_begin on every rank and thread, so a row is
// always summed in the same groups.
template <class Visit>
WEFT_INLINE void for_each_key_tile(const Slice& s, const Stack& stack, Index size, const Visit& visit) {
  const Range rows = stack.tokens_of(s);
  const Range seen{max_of(s.k_begin, shift_bound(s.lo, rows.begin)), min_of(s.k_end, shift_bound(s.hi, rows.end))};
  for (Index base = s.k_begin + (seen.begin - s.k_begin) / size * size; base < seen.end; base += size)
    visit(base, Range{max_of(0, seen.begin - base), min_of(size, seen.end - base)},
          Range{base + size, min_of(seen.end, base + 2 * size)});
}

// Args: KernelForwardArgs or KernelBackwardArgs.
template <class Args>
WEFT_INLINE void prefetch_keys(const Args& args, Range rows, Index head) {
  prefetch_rows(args.k, rows.begin, rows.end, head);
  prefetch_rows(args.v, rows.begin, rows.end, head);
}

// K and V of `keys` after key row `base`, with zeros around them up to multiples of kKeys; returns what was written.
template <class S, class Args>
WEFT_INLINE Range load_keys(const Args& args, Index base, Range keys, Index head, float* k, Index units_k, float* v,
                            Index units_v) {
  const Range all{keys.begin / S::kKeys * S::kKeys, round_up(keys.end, S::kKeys)};
  for (Index j = all.begin; j < all.end; ++j) {
    if (j >= keys.begin && j < keys.end) {
      load_units<S>(args.k, base + j, head, k + j * units_k, units_k);
      load_units<S>(args.v, base + j, head, v + j * units_v, units_v);
    } else {
      clear_units(k + j * units_k, units_k);
      clear_units(v + j * units_v, units_v);
    }
  }
  return all;
}

// Writes the results of a row of the forward; times(weight) gives its sums times a factor. A partial row that is not
// `live`, in no slice of the call, is left unchanged.
template <class S, class Times>
WEFT_INLINE void end_row(const KernelForwardArgs& args, Index token, Index head, bool live,
                         const RowState<float>& state, float* max_logit, const Times& times) {
  if (!is_empty(state)) max_logit[head] = max_or_nan(max_logit[head], state.max);
  if (args.partial.given()) {
    if (!live) return;
    args.partial.states[token * args.partial.sums.heads + head] = state;
    store_f32<S>(args.partial.sums, token, head, times(1.0f));
    return;
  }
  const FinishedRow<float> done = finish(state, sink_logit_f32(args.attention.sink, head));
  if (is_empty(state))
    clear_row(args.out, token, head);
  else
    store_f32<S>(args.out, token, head, times(done.weight));
  if (args.lse.given()) store_number(args.lse, token, head, done.lse);
}

struct RowStatistics {
  float lse = std::numeric_limits<float>::infinity();  // in units of log 2; without keys: P is 0
  float delta = 0;                                     // dout·out
};

// Statistics of a row of the backward; adds the row's part of the gradient of the sink. `room`: 2·wide floats, where
// wide is a multiple of the lanes.
template <class S>
WEFT_INLINE RowStatistics row_statistics(const KernelBackwardArgs& args, Index token, Index head, float* room,
                                         Index wide, float* dsink) {
  const float none = -std::numeric_limits<float>::infinity();
  const float lse = load_number(args.lse, token, head), sink = sink_logit_f32(args.attention.sink, head);
  float *out = room, *dout = room + wide, delta = 0;
  load_f32<S>(args.out, token, head, out, wide);
  load_f32<S>(args.dout, token, head, dout, wide);
  // A sum in each lane: one chain of additions would take longer than a matrix unit does for the row.
  typename S::V sum = S::zero();
  for (Index i = 0; i < wide; i += S::kLanes) sum = S::fma(S::load(dout + i), S::load(out + i), sum);
  float lanes[S::kLanes];
  S::store(lanes, sum);
  for (const float lane : lanes) delta += lane;
  if (sink != none) dsink[head] -= std::exp(sink - lse) * delta;
  if (lse == none) return {};
  return {lse * kLog2E, delta};
}

}  // namespace weft::cpu
