// Steps of all-gather and ring attention over dual_chunk layouts, as varlen kernels take them: checked, written out.
#include <utility>

#include "plan/views.h"
#include "rows/steps.h"
#include "text.h"
#include "weft/rows.h"

namespace weft {
namespace {

class StepWriter {
 public:
  StepWriter() { step_.cu_seqlens_q = step_.cu_seqlens_k = {0}; }

  void add(Index sequence, const StepEntry& e) {
    add_side(e.q.begin, e.q.size(), step_.cu_seqlens_q, step_.cu_seqlens_q_padded, step_.seqused_q, step_.max_seqlen_q);
    add_side(e.k.begin, e.keys(), step_.cu_seqlens_k, step_.cu_seqlens_k_padded, step_.seqused_k, step_.max_seqlen_k);
    step_.lo.push_back(e.lo);
    step_.hi.push_back(e.hi);
    step_.sequence.push_back(sequence);
  }

  VarlenStep finish(Index q_end, Index k_end) {
    step_.cu_seqlens_q_padded.push_back(q_end);
    step_.cu_seqlens_k_padded.push_back(k_end);
    return std::move(step_);
  }

 private:
  static void add_side(Index begin, Index count, std::vector<Index>& cu, std::vector<Index>& padded,
                       std::vector<Index>& used, Index& longest) {
    cu.push_back(cu.back() + count);
    padded.push_back(begin);
    used.push_back(count);
    longest = max_of(longest, count);
  }

  VarlenStep step_;
};

template <class Steps>
VarlenStep write_steps(const Steps& steps, Index sequences, Index q_end, Index k_end) {
  StepWriter out;
  for (Index i = 0; i < sequences; ++i) steps.for_each(i, [&](const StepEntry& e) { out.add(i, e); });
  return out.finish(q_end, k_end);
}

FoldedStream folded(const Layout& layout) {
  return {view(layout.stream()), layout.stream().extent().begin, layout.ranks()};
}

void check_ranks(Index ranks, Index rank) {
  if (ranks < 1) throw Error(text(ranks, " ranks"), "use 1 rank or more");
  if (rank < 0 || rank >= ranks)
    throw Error(text("rank ", rank, " of ", ranks), text("use a rank from 0 to ", ranks - 1));
}

void check_question(const Problem& problem, const Layout& q, Index rank) {
  if (q.kind() != LayoutKind::dual_chunk)
    throw Error(text("layout ", name(q.kind()), " does not cut each sequence into two pieces a rank"),
                "make it by Layout::dual_chunk, or plan with make_plan, which takes every layout");
  const Stream &own = q.stream(), &asked = problem.packing().q();
  if (!(own == asked))
    throw Error(text("the layout was made for another stream (", own.sequences(), " sequences, ", own.tokens(),
                     " tokens) than the problem's (", asked.sequences(), " sequences, ", asked.tokens(), " tokens)"),
                "make the layout from the problem's own packing");
  if (problem.mask().slices)
    throw Error(text("the mask has ", problem.mask().slices->size(), " slices of its own, not a band a sequence"),
                "plan with make_plan, which takes any slices");
  check_ranks(q.ranks(), rank);
}

void check_ring_question(const Problem& problem) {
  const Mask& mask = problem.mask();
  if (!problem.packing().self())
    throw Error(text("ring steps are for self-attention, and the keys are another stream (",
                     problem.packing().k().tokens(), " tokens; queries have ", problem.packing().q().tokens(), ")"),
                "plan with make_plan, which takes any two layouts");
  if (!mask.causal)
    throw Error("ring steps are for causal masks, and causal = false",
                "set causal, or plan with make_plan, which takes any mask");
  if (mask.left != -1)
    throw Error(text("ring steps have no window, and left = ", mask.left, ": a row would need several entries"),
                "use all_gather_step, or plan with make_plan");
}

}  // namespace

VarlenStep all_gather_step(const Problem& problem, const Layout& q, Index rank, Index step) {
  check_question(problem, q, rank);
  if (step < 0 || step > 1)
    throw Error(text("all-gather step ", step), "use 0 for the queries of piece rank, 1 for piece 2*ranks-1-rank");
  const Stream& k = problem.packing().k();
  const GatherSteps steps{folded(q), view(k), view(problem.mask()), rank, step};
  return write_steps(steps, problem.packing().sequences(), q.rows(), k.extent().end);
}

RingTile ring_tile(Index ranks, Index rank, Index step) {
  check_ranks(ranks, rank);
  if (step < 0 || step >= ranks)
    throw Error(text("step ", step, " of a ring of ", ranks, " ranks"), text("use a step from 0 to ", ranks - 1));
  const Index keys = rank >= step ? rank - step : rank - step + ranks;
  return {keys == rank ? RingTile::diagonal : keys < rank ? RingTile::below : RingTile::above, keys};
}

VarlenStep ring_step(const Problem& problem, const Layout& layout, Index rank, Index step) {
  check_question(problem, layout, rank);
  check_ring_question(problem);
  const RingSteps steps{folded(layout), view(problem.mask()).chunk, rank, ring_tile(layout.ranks(), rank, step)};
  return write_steps(steps, layout.stream().sequences(), layout.rows(), layout.rows());
}

}  // namespace weft
