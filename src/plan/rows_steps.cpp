// Steps of all-gather and ring attention over dual_chunk layouts, as varlen kernels take them.
#include <algorithm>
#include <utility>

#include "plan/views.h"
#include "text.h"
#include "weft/error.h"
#include "weft/rows.h"

namespace weft {
namespace {

// Rows of the two buffers; the band counts from the first row of each.
struct Entry {
  Index sequence;
  Range q, k;
  Index lo = -kUnlimited, hi = kUnlimited;
};

class StepWriter {
 public:
  StepWriter() { step_.cu_seqlens_q = step_.cu_seqlens_k = {0}; }

  void add(const Entry& e) {
    const Index queries = e.q.size();
    // The last query sees none past this one.
    const Index seen = queries == 0 ? 0 : max_of(0, min_of(e.k.size(), shift_bound(e.hi, queries)));
    add_side(e.q.begin, queries, step_.cu_seqlens_q, step_.cu_seqlens_q_padded, step_.seqused_q, step_.max_seqlen_q);
    add_side(e.k.begin, seen, step_.cu_seqlens_k, step_.cu_seqlens_k_padded, step_.seqused_k, step_.max_seqlen_k);
    step_.lo.push_back(e.lo);
    step_.hi.push_back(e.hi);
    step_.sequence.push_back(e.sequence);
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

// One rank's rows of one sequence, counted from its first row there: piece `rank`, then piece 2·ranks-1-rank. Valid
// rows come first: the second piece has some only if the first has nothing else.
struct Fold {
  Index ranks, rank, piece;

  Index first() const { return rank * piece; }  // positions where the pieces begin
  Index second() const { return (2 * ranks - 1 - rank) * piece; }
  Index position(Index row) const { return row < piece ? first() + row : second() + row - piece; }
  Index rows_before(Index position) const {
    return std::clamp(position - first(), Index{0}, piece) + std::clamp(position - second(), Index{0}, piece);
  }
};

Fold fold_of(const Layout& layout, Index rank, Index sequence) {
  return {layout.ranks(), rank, layout.stream().padded(sequence) / (2 * layout.ranks())};
}

Index first_row(const Layout& layout, Index sequence) {
  return (layout.stream().offset(sequence) - layout.stream().extent().begin) / layout.ranks();
}

Range shifted(Range r, Index by) { return {r.begin + by, r.end + by}; }

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

// A plain mask on one sequence, in positions: j - i lies in [lo, hi], and both in one chunk (0: no chunks).
struct SequenceBand {
  Index diag, lo, hi, chunk;

  SequenceBand(const MaskView& mask, Index len_q, Index len_k)
      : diag(mask.bottom_right ? len_k - len_q : 0), chunk(mask.chunk) {
    const Index right = mask.causal ? 0 : mask.right;
    lo = mask.left < 0 ? -kUnlimited : diag - mask.left;
    hi = right < 0 ? kUnlimited : diag + right;
  }

  // The keys of query i's chunk, and the first query of another one. Queries whose chunk has no keys, because it lies
  // before the first key or past the last, are one part.
  struct Part {
    Range keys;
    Index q_end;
  };
  Part part_at(Index i, Index len_k) const {
    if (chunk == 0) return {{0, len_k}, kUnlimited};
    const Index begin = floor_div(i + diag, chunk) * chunk;
    if (begin < 0) return {{0, 0}, -diag};
    if (begin >= len_k) return {{len_k, len_k}, kUnlimited};
    return {{begin, min_of(begin + chunk, len_k)}, begin + chunk - diag};
  }
};

// Query positions [from, to) of a sequence, which lie from row `q_row` on; keys are tokens.
void add_gathered(StepWriter& step, const Problem& problem, Index sequence, Range positions, Index q_row) {
  const Packing& packing = problem.packing();
  const Index len_k = packing.k().used(sequence);
  const SequenceBand band(view(problem.mask()), packing.q().used(sequence), len_k);
  Index i = positions.begin;
  do {
    const SequenceBand::Part part = band.part_at(i, len_k);
    const Index end = min_of(part.q_end, positions.end), by = i - part.keys.begin;
    step.add({sequence, shifted({i, end}, q_row - positions.begin), shifted(part.keys, packing.k().offset(sequence)),
              shift_bound(band.lo, by), shift_bound(band.hi, by)});
    i = end;
  } while (i < positions.end);
}

// Query rows and key rows of one sequence, counted from its first row on either rank; causal. A chunk's positions are
// neighbouring rows also where it reaches from a rank's first piece into its second: it holds all between them.
void add_tile(StepWriter& step, const Entry& tile, const Fold& q_fold, const Fold& k_fold, Index chunk, Index base) {
  Index row = tile.q.begin;
  do {
    Entry e = tile;
    if (chunk > 0) {
      const Index begin = q_fold.position(row) / chunk * chunk, end = begin + chunk;
      e.q = {row, min_of(tile.q.end, q_fold.rows_before(end))};
      e.k = {std::clamp(k_fold.rows_before(begin), tile.k.begin, tile.k.end),
             std::clamp(k_fold.rows_before(end), tile.k.begin, tile.k.end)};
    }
    row = e.q.end;
    e.q = shifted(e.q, base);
    e.k = shifted(e.k, base);
    step.add(e);
  } while (row < tile.q.end);
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
  StepWriter out;
  for (Index s = 0; s < problem.packing().sequences(); ++s) {
    const Fold fold = fold_of(q, rank, s);
    const Index begin = step == 0 ? fold.first() : fold.second();
    const Index end = std::clamp(q.stream().used(s), begin, begin + fold.piece);
    add_gathered(out, problem, s, {begin, end}, first_row(q, s) + step * fold.piece);
  }
  return out.finish(q.rows(), problem.packing().k().extent().end);
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
  const RingTile tile = ring_tile(layout.ranks(), rank, step);
  StepWriter out;
  for (Index s = 0; s < layout.stream().sequences(); ++s) {
    const Fold q = fold_of(layout, rank, s), k = fold_of(layout, tile.keys_rank, s);
    const Index used = layout.stream().used(s), piece = q.piece;
    Entry whole{s, {0, q.rows_before(used)}, {0, k.rows_before(used)}};
    if (tile.kind == RingTile::diagonal) whole.hi = 0;
    if (tile.kind == RingTile::below) whole.k.end = min_of(whole.k.end, piece);
    if (tile.kind == RingTile::above) whole.q = {piece, max_of(whole.q.end, piece)};
    add_tile(out, whole, q, k, view(problem.mask()).chunk, first_row(layout, s));
  }
  return out.finish(layout.rows(), layout.rows());
}

}  // namespace weft
