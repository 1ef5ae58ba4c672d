#include "weft/layout.h"

#include <algorithm>
#include <array>

#include "hash.h"
#include "index.h"
#include "plan/layout_data.h"
#include "text.h"
#include "weft/placed.h"

namespace weft {
namespace {

constexpr std::array<std::string_view, 7> kNames = {"contiguous", "dual_chunk", "zigzag",  "striped",
                                                    "balanced",   "placed",     "explicit"};

// Far more ranks than any cluster has; keeps rank arithmetic and tables small.
constexpr Index kMaxRanks = Index{1} << 20;

void check_rank(Index rank, Index ranks) {
  if (rank < 0 || rank >= ranks)
    throw Error(text("rank ", rank, " of ", ranks), text("use a rank from 0 to ", ranks - 1));
}

}  // namespace

void detail::check_ranks(Index ranks) {
  if (ranks < 1 || ranks > kMaxRanks)
    throw Error(text(ranks, " ranks"), text("use a number of ranks from 1 to ", kMaxRanks));
}

std::string_view name(LayoutKind kind) { return kNames[static_cast<std::size_t>(kind)]; }

LayoutKind layout_kind(std::string_view wanted) {
  const auto found = std::find(kNames.begin(), kNames.end(), wanted);
  if (found == kNames.end())
    throw Error(text("there is no layout '", wanted, "'"),
                "use contiguous, dual_chunk, zigzag, striped, balanced, placed or explicit");
  return static_cast<LayoutKind>(found - kNames.begin());
}

RegularRuns::Cut detail::cut_of(LayoutKind kind) {
  switch (kind) {
    case LayoutKind::contiguous:
      return RegularRuns::pieces;
    case LayoutKind::zigzag:
      return RegularRuns::folded;
    case LayoutKind::dual_chunk:
      return RegularRuns::folded_per_sequence;
    case LayoutKind::striped:
      return RegularRuns::strided;
    default:
      throw Error(text("layout ", name(kind), " is not planned on a device: its runs are a table"),
                  "plan with make_plan and hand the result to DevicePlan::upload");
  }
}

Layout Layout::contiguous(const Stream& stream, Index ranks) {
  detail::check_ranks(ranks);
  const Index rows = ceil_div(stream.extent().size(), ranks);
  return Layout(detail::shared({LayoutKind::contiguous, stream, ranks, rows, rows}));
}

Layout Layout::zigzag(const Stream& stream, Index ranks) {
  detail::check_ranks(ranks);
  const Index piece = ceil_div(stream.extent().size(), 2 * ranks);
  return Layout(detail::shared({LayoutKind::zigzag, stream, ranks, 2 * piece, piece}));
}

Layout Layout::striped(const Stream& stream, Index ranks) {
  detail::check_ranks(ranks);
  const Index rows = ceil_div(stream.extent().size(), ranks);
  return Layout(detail::shared({LayoutKind::striped, stream, ranks, rows, 0, ranks}));
}

Layout Layout::dual_chunk(const Stream& stream, Index ranks) {
  detail::check_ranks(ranks);
  const Index multiple = 2 * ranks;
  for (Index i = 0; i < stream.sequences(); ++i) {
    if (stream.padded(i) % multiple != 0)
      throw Error(
          text("sequence ", i, ": padded length ", stream.padded(i), " is not a multiple of 2*ranks = ", multiple),
          text("pad to ", ceil_div(stream.padded(i), multiple) * multiple,
               " (Packing::padded_to), or use layout zigzag, which takes any length"));
  }
  return Layout(detail::shared({LayoutKind::dual_chunk, stream, ranks, stream.extent().size() / ranks}));
}

Layout Layout::explicit_runs(const Stream& stream, std::vector<std::vector<Run>> runs) {
  const Index ranks = static_cast<Index>(runs.size());
  detail::check_ranks(ranks);
  std::vector<Run> all;
  std::vector<bool> held(at(stream.tokens()));
  Index rows = 0;
  for (Index rank = 0; rank < ranks; ++rank) {
    const std::vector<Run>& own = runs[at(rank)];
    detail::check_rows(own, kMaxTokens, text("rank ", rank));
    for (const Run& r : own) {
      rows = max_of(rows, r.row + r.count);
      for (Index i = 0; i < r.count; ++i) {
        const Index token = r.token + i * r.stride;
        if (token >= stream.tokens())
          throw Error(text("rank ", rank, ": a run holds token ", token, " of a stream of ", stream.tokens()),
                      "keep tokens inside the stream");
        if (held[at(token)])
          throw Error(text("rank ", rank, ": token ", token, " is held twice"),
                      "give each token to one run of one rank");
        held[at(token)] = true;
      }
    }
    all.insert(all.end(), own.begin(), own.end());
  }
  for (Index i = 0; i < stream.sequences(); ++i) {
    for (Index t = stream.offset(i); t < stream.offset(i) + stream.used(i); ++t) {
      if (!held[at(t)])
        throw Error(text("token ", t, " (sequence ", i, ") is held by no rank"), "give every real token to one run");
    }
  }
  if (rows > 0 && ranks > kMaxTokens / rows)
    throw Error(text(ranks, " ranks of ", rows, " rows are past the limit of ", kMaxTokens, " rows"),
                "use runs without gaps between rows");
  const Index stride = detail::common_stride(all);
  return Layout(detail::shared({LayoutKind::explicit_runs, stream, ranks, rows, 0, stride, std::move(runs)}));
}

LayoutKind Layout::kind() const { return data_->kind; }
Index Layout::ranks() const { return data_->ranks; }
Index Layout::rows() const { return data_->rows; }
const Stream& Layout::stream() const { return data_->stream; }

std::uint64_t Layout::fingerprint() const {
  if (const std::uint64_t known = data_->fingerprint.value.load(); known != 0) return known;
  const Range dealt = stream().extent();
  Hash hash;
  hash.add(static_cast<Index>(kind())).add(ranks()).add(rows()).add(dealt.begin).add(dealt.end);
  if (kind() == LayoutKind::dual_chunk) hash.add(stream().offsets());
  // A regular layout follows from these; of the others each run says more.
  for (Index rank = 0; rank < ranks() && !data_->regular(); ++rank)
    for (const Run& run : runs(rank).runs()) hash.add(rank).add(run.row).add(run.token).add(run.count).add(run.stride);
  const std::uint64_t number = hash.value() == 0 ? 1 : hash.value();
  data_->fingerprint.value.store(number);
  return number;
}

RunList Layout::runs(Index rank) const {
  check_rank(rank, ranks());
  return rank_order({rank, 1, 1});
}

RunList Layout::rank_order() const { return rank_order({0, ranks(), 1}); }

RunList Layout::rank_order(RunList::Members members) const {
  if (members.count < 1 || members.count > ranks() || members.step < 1 || members.step > ranks())
    throw Error(text(members.count, " of ", ranks(), " ranks in steps of ", members.step),
                text("use a count and a step from 1 to ", ranks()));
  check_rank(members.first, ranks());
  check_rank(members.first + (members.count - 1) * members.step, ranks());
  const detail::LayoutData& p = *data_;
  const Index total = members.count * p.rows;
  if (p.regular()) {
    const Range dealt = p.stream.extent();
    const RegularRuns regular{detail::cut_of(p.kind),    p.ranks, dealt.begin, dealt.end, p.rows, p.piece,
                              p.stream.offsets().data(), members};
    return RunList(std::make_shared<detail::RunSource>(detail::RunSource{regular, data_, p.stream.sequences()}), total,
                   p.stride, false);
  }
  std::vector<Run> runs;
  for (Index m = 0; m < members.count; ++m) {
    for (Run r : p.runs[at(members.first + m * members.step)]) {
      r.row += m * p.rows;
      runs.push_back(r);
    }
  }
  return RunList(
      std::make_shared<detail::RunSource>(detail::RunSource{detail::RunTable(std::move(runs), p.stride), data_}), total,
      p.stride, false);
}

Layouts make_layouts(LayoutKind kind, const Problem& problem, Index ranks) {
  const auto one = [&](const Stream& s) {
    switch (kind) {
      case LayoutKind::dual_chunk:
        return Layout::dual_chunk(s, ranks);
      case LayoutKind::zigzag:
        return Layout::zigzag(s, ranks);
      case LayoutKind::striped:
        return Layout::striped(s, ranks);
      case LayoutKind::explicit_runs:
        throw Error("an explicit layout is given by its runs, not by name", "call Layout::explicit_runs");
      default:
        return Layout::contiguous(s, ranks);
    }
  };
  if (kind == LayoutKind::placed) return place(problem, ranks).layouts;
  const Packing& packing = problem.packing();
  Layout q = kind == LayoutKind::balanced ? Layout::balanced(problem, ranks) : one(packing.q());
  Layout k = packing.self() ? q : one(packing.k());
  return {std::move(q), std::move(k)};
}

}  // namespace weft
