// Seconds of a rank's kernels and passes over rows, and bytes of its memory.
#pragma once

#include <span>
#include <vector>

#include "cost/outline.h"
#include "cost/tiles.h"
#include "schedule/build.h"
#include "schedule/source.h"
#include "weft/state.h"

namespace weft::cost {

// A rank's tensors as its steps see them.
struct Frame {
  Index ranks = 1, ulysses = 1;
  Index q_rows = 0, k_rows = 0;    // of the rank's own tensors
  Index heads_q = 1, heads_k = 1;  // of the rank's own tensors
  Index step_heads_q = 1, step_heads_k = 1;
  bool swaps = false;
  // Of a swap: its head groups, the heads of the largest, and how the buffers of K and V are used.
  Index head_groups = 1, group_heads_q = 1, group_heads_k = 1;
  Index key_buffers = 1;
  bool shares_keys = false;  // a head group has the keys of the one before it, so that their gradients are added
  Index query_ranks = 1;     // of a mesh: parts of the query buffer, of q_rows each

  Index step_q_rows() const { return q_rows * ulysses; }
};
Frame frame_of(const Schedule& schedule);

struct StepFrame {
  Index key_rows = 0, heads_q = 0, heads_k = 0;
  bool moves = false;
  Index turn = 0;                        // moves before it in its head group: two buffers take turns
  std::optional<Index> relay_rows = {};  // of a move in two hops
  Range queries = {0, 1};                // parts of the query buffer
  bool adds_keys = false;                // to dK and dV of a step before
  bool computed = true;
};

// dQ of the parts of a query buffer: the first step about one of them writes it.
class WrittenParts {
 public:
  // Whether a step, the next one that computes, adds to what is there.
  bool adds(Range parts) {
    if (static_cast<Index>(written_.size()) < parts.end) written_.resize(at(parts.end), false);
    bool any = false;
    for (Index part = parts.begin; part < parts.end; ++part) {
      any = any || written_[at(part)];
      written_[at(part)] = true;
    }
    return any;
  }

 private:
  std::vector<bool> written_;
};

class Costs {
 public:
  Costs(const Machine& machine, const TensorShape& shape, Pass pass)
      : machine_(machine), shape_(shape), pass_(pass), rate_(kernel_rate(machine, pass, shape)) {}

  const KernelRate& rate() const { return rate_; }
  Index dims() const { return shape_.dim_qk + shape_.dim_v; }
  // Of a source, which is one head, or of K and V: what moves.
  bool source() const { return shape_.source > 0; }
  Index moved_dims() const { return source() ? shape_.source : dims(); }
  Index moved_heads(Index heads_k) const { return source() ? min_of(heads_k, 1) : heads_k; }
  double kv_bytes() const { return static_cast<double>(moved_dims() * size_of(shape_.dtype)); }  // a row and head of it
  schedule::QueryBytes query_bytes() const { return schedule::query_bytes(shape_, pass_); }  // of a query row and head
  double gradient_bytes() const { return static_cast<double>(moved_dims() * sum_size()); }

  // `first`: the rank's first step that computes, of those about these queries; `partial`: it has several of the same
  // heads.
  Work work(Index rank, const Frame& frame, const StepFrame& step, const TileWork& tiles, bool partial,
            bool first) const;
  // Passes over rows before the steps of a head group and after them, and at the end of all. `shares`: its keys are
  // those of the head group before.
  double begin_rows(const Frame& frame, Index heads_k, bool first_moves) const;
  double end_rows(const Frame& frame, Index heads_q, Index heads_k, bool partial, bool shares) const;
  double last_rows(const Frame& frame) const;
  double merge_rows(const Frame& frame) const;  // of what one query move brings home
  // expanded: of all steps, key rows times K/V heads. `steps` may leave out those that need no larger buffers.
  RankMemory memory(const Frame& frame, std::span<const StepFrame> steps, bool partial, Index expanded) const;

  // What is swapped, on the way in and on the way back.
  schedule::SwapBytes swap_in() const;
  schedule::SwapBytes swap_out() const;
  schedule::SwapBytes swap_gradients() const { return {0, moved_dims() * sum_size()}; }  // on their way home

 private:
  double pass_over(double bytes) const {
    return machine_.row_seconds + (machine_.row_bandwidth > 0 ? bytes / machine_.row_bandwidth : 0);
  }
  DType sums() const { return sum_type(shape_.dtype); }  // what partial sums and gradients are kept in
  Index sum_size() const { return size_of(sums()); }
  Index state_size() const {
    return static_cast<Index>(sums() == DType::f64 ? sizeof(RowState<double>) : sizeof(RowState<float>));
  }
  Index moved_size(Index rows, Index heads_k, DType dtype) const;  // a workspace of what moves
  double expand_seconds(Index rows, Index heads_k) const;          // and of gradients back, in a backward
  Index query_memory(const Frame& frame, std::span<const StepFrame> steps) const;
  Index size(std::optional<DType> dtype) const { return size_of(dtype.value_or(shape_.dtype)); }

  const Machine& machine_;
  const TensorShape& shape_;
  Pass pass_;
  const KernelRate& rate_;
};

// Adds the swaps of all head groups of a schedule of any rank: swap(bytes by member, back, adds) makes a pattern and
// returns its number.
template <class MakeSwap>
void add_swaps(Outline& to, const Schedule& schedule, const Costs& costs, Pass pass, const MakeSwap& swap) {
  if (!schedule.swap) return;
  const Schedule moves = costs.source() ? schedule::source_moves(schedule) : schedule;
  for (std::size_t n = 0; n < to.head_groups.size(); ++n) {
    HeadGroupOutline& group = to.head_groups[n];
    const auto bytes = [&](const schedule::SwapBytes& each, bool home) {
      const std::vector<Index> whole = schedule::swapped_bytes(moves, static_cast<Index>(n), each, home);
      return std::vector<double>(whole.begin(), whole.end());
    };
    group.swap_in = swap(bytes(costs.swap_in(), false), false, false);
    group.swap_out = swap(bytes(costs.swap_out(), true), true, false);
    if (pass == Pass::backward && schedule::keys_end(*moves.swap, static_cast<Index>(n)))
      group.swap_home = swap(bytes(costs.swap_gradients(), true), true, true);
  }
}

}  // namespace weft::cost
