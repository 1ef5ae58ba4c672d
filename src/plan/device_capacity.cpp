// How many slices any offsets can give: what device memory has to hold before the offsets are known.
#include "plan/device_runs.h"
#include "plan/layout_data.h"
#include "plan/views.h"
#include "text.h"
#include "weft/device_plan.h"

namespace weft {
namespace {

struct Question {
  Index sequences, tokens;  // of the queries, those without tokens left out
  MaskView mask;
  RunsSpec q, k;
};

Question question(const DevicePlanArgs& args) {
  const bool self = args.k == DeviceStream{};
  const DeviceStream& k = self ? args.q : args.k;
  check_stream("query", args.q);
  check_stream("key", k);
  check_mask(args.mask);
  if (args.q.sequences != k.sequences)
    throw Error(text("queries have ", args.q.sequences, " sequences and keys have ", k.sequences),
                "give both sides the same number; a sequence may have length 0 on one side");
  const RunsSpec q_spec = runs_spec("query", args.q_runs, args.q.tokens);
  const RunsSpec k_spec = runs_spec("key", args.k_runs, k.tokens);
  if (q_spec.stride() != k_spec.stride())
    throw Error(text("query runs have stride ", q_spec.stride(), " and key runs have stride ", k_spec.stride()),
                "lay both sides out alike; striped queries go with keys in rank order, not in sequence order");
  return {min_of(args.q.sequences, args.q.tokens), args.q.tokens, view(args.mask), q_spec, k_spec};
}

// Contiguous pieces of the whole stream: sequences are cut only where a piece ends.
bool cuts_stream(const RunsSpec& s) {
  return s.sequence_order || s.cut == RegularRuns::pieces || s.cut == RegularRuns::folded;
}

// Keys minus queries lie in a band of this many diagonals.
Index band(const MaskView& m) {
  const Index right = m.causal ? 0 : m.right;
  return m.left < 0 || right < 0 ? kUnlimited : m.left + right + 1;
}

// A row meets one chunk of the other side, through all its runs; a band of w diagonals meets no more than w residues,
// or runs.
Index met_runs(const RunsSpec& other, const MaskView& mask) {
  const bool strided = !other.sequence_order && other.cut == RegularRuns::strided;
  return min_of(other.runs(), strided ? band(mask) : kUnlimited);
}

struct Pieces {
  Index runs;   // (sequence, query run) that share a token
  Index parts;  // (sequence, query run, chunk) that share a token
};

Pieces query_pieces(const Question& a) {
  const Index held = min_of(a.tokens, a.q.buffer_rows()), runs = a.q.runs();
  if (a.sequences == 0 || held == 0) return {0, 0};
  // Two families of disjoint intervals, x and y of them, meet in at most x + y - 1 pairs.
  const Index met = cuts_stream(a.q) ? a.sequences + runs - 1 : a.sequences * runs;
  const Index pairs = min_of(held, met);
  if (a.mask.chunk == 0) return {pairs, pairs};
  // L neighbouring queries look at no more than (L - 2) / C + 2 chunks; a strided run spans its sequence.
  const Index span = a.q.cut == RegularRuns::strided && !a.q.sequence_order ? a.q.members.count * a.tokens : held;
  return {pairs, min_of(held, 2 * pairs + span / a.mask.chunk)};
}

// Whether every query finds its own key, in a run that holds all tokens of its own run.
bool holds_own_keys(const DevicePlanArgs& a) {
  const bool self = a.k == DeviceStream{} || (a.k == a.q && a.q.cu_seqlens != nullptr);
  return self && !a.q_runs.sequence_order && !a.k_runs.sequence_order && a.q_runs.kind == a.k_runs.kind &&
         a.q_runs.ranks == a.k_runs.ranks && a.k_runs.members.count == a.k_runs.ranks;
}

}  // namespace

RunsSpec runs_spec(std::string_view side, const DeviceRuns& runs, Index tokens) {
  if (runs.sequence_order) return {RegularRuns::pieces, true, tokens, 1, tokens, {0, 1, 1}};
  const RunList::Members& m = runs.members;
  RunsSpec spec{detail::cut_of(runs.kind), false, tokens, runs.ranks, runs.rows, m};
  const Index enough = rows_for(runs.kind, tokens, runs.ranks);
  if (spec.rows == 0) spec.rows = enough;
  const Index last = m.first + (m.count - 1) * m.step;
  if (m.count < 1 || m.count > runs.ranks || m.step < 1 || m.step > runs.ranks || m.first < 0 || last >= runs.ranks)
    throw Error(text("the ", side, " runs are ", m.count, " of ", runs.ranks, " ranks from rank ", m.first,
                     " in steps of ", m.step),
                text("use ranks from 0 to ", runs.ranks - 1));
  if (spec.rows < 0 || spec.rows > kMaxTokens / m.count)
    throw Error(text("the ", side, " buffer has ", m.count, " ranks of ", spec.rows, " rows, past the limit of ",
                     kMaxTokens, " rows"),
                text("give ", enough, " rows a rank, which any offsets within ", tokens, " tokens fit"));
  return spec;
}

void check_stream(std::string_view side, const DeviceStream& stream) {
  if (stream.sequences < 0 || stream.sequences >= kMaxTokens || stream.tokens < 0 || stream.tokens > kMaxTokens)
    throw Error(text("a ", side, " stream of ", stream.sequences, " sequences and ", stream.tokens, " tokens"),
                text("give numbers from 0 to ", kMaxTokens, " (rows are 32-bit on devices)"));
}

void check_mask(const Mask& mask) {
  if (mask.slices)
    throw Error(text("the mask has ", mask.slices->size(), " slices of its own, which are not planned on a device"),
                "plan with make_plan and hand the result to DevicePlan::upload");
  const Problem checked{Packing{}, mask};  // the same refusals as on the host
}

Index rows_for(LayoutKind kind, Index tokens, Index ranks) {
  constexpr Index kMaxRanks = Index{1} << 20;  // as for Layout
  if (ranks < 1 || ranks > kMaxRanks)
    throw Error(text(ranks, " ranks"), text("use a number of ranks from 1 to ", kMaxRanks));
  return RunsSpec{detail::cut_of(kind), false, tokens, ranks, 0, {0, 1, 1}}.rows_needed(tokens);
}

Index device_slices_per_row(const DevicePlanArgs& args) {
  const Question a = question(args);
  return met_runs(a.k, a.mask);
}
Index device_slices_per_key(const DevicePlanArgs& args) {
  const Question a = question(args);
  return met_runs(a.q, a.mask);
}

Index device_query_ranges(const DevicePlanArgs& args) {
  const Question a = question(args);
  // The slice of a query run's own keys covers all rows of a piece.
  if (holds_own_keys(args)) return query_pieces(a).parts;
  // The rows of a piece that see keys of a run: all of them, the last ones or the first ones, which any two runs have
  // in common. With a band limited on both sides they may have none.
  return a.k.runs() > 1 && band(a.mask) != kUnlimited ? device_plan_capacity(args) : query_pieces(a).parts;
}

Index device_plan_capacity(const DevicePlanArgs& args) {
  const Question a = question(args);
  const Pieces q = query_pieces(a);
  const Index keys = a.k.runs();
  Index most = q.parts;
  if (!a.k.sequence_order && q.parts > 0) {
    if (a.k.cut == RegularRuns::strided) {
      most = q.parts * min_of(keys, band(a.mask));
    } else if (cuts_stream(a.k)) {
      // A slice more for each place where a key run ends, and each query run that looks there: one chunk a run.
      most = q.parts + a.q.runs() * (keys - 1);
    } else {
      // Chunks of one query run in one sequence look at different keys, so each end of a key run counts once.
      most = q.parts + q.runs * (keys - 1);
    }
    most = min_of(most, q.parts * keys);
    // L neighbouring queries of a band of w diagonals see L + w - 1 keys, and a slice has one at least.
    const Index beyond = band(a.mask) - 1;
    if (a.k.cut != RegularRuns::strided && beyond < kUnlimited - 1)
      most = min_of(most, min_of(a.tokens, a.q.buffer_rows()) + q.parts * beyond);
  }
  if (most > kMaxTokens)
    throw Error(text("a plan may have ", most, " slices, past the limit of ", kMaxTokens),
                "use keys in sequence order, or plan on the host");
  return most;
}

}  // namespace weft
