#include <algorithm>

#include "index.h"
#include "plan/row_pairs.h"
#include "text.h"
#include "weft/plan.h"
#include "weft/prepare.h"

namespace weft {
namespace {

void check_index(std::string_view what, Index i, Index count) {
  if (i < 0 || i >= count) throw Error(text(what, " ", i, " of ", count), text("name one of 0 .. ", count - 1));
}

// Entry of each row: cu[i] <= row < cu[i + 1] gives i + 1.
std::vector<Index> entries_of_rows(const std::vector<Index>& cu) {
  std::vector<Index> index;
  index.reserve(at(cu.back()));
  for (std::size_t i = 1; i < cu.size(); ++i) index.insert(index.end(), at(cu[i] - cu[i - 1]), static_cast<Index>(i));
  return index;
}

// Keys of a first document that began before the queries; otherwise the queries' own stream.
Stream key_stream(const Stream& q, Index begin) {
  std::vector<Index> offsets(q.offsets().begin(), q.offsets().end());
  std::vector<Index> used(q.used_lengths().begin(), q.used_lengths().end());
  used.front() += offsets.front() - begin;
  offsets.front() = begin;
  return Stream::from_used(offsets, used, q.tokens());
}

void measure(Window& w) {
  for (std::size_t i = 0; i < w.lengths.size(); ++i) {
    const Index keys = w.cu_seqlens_k[i + 1] - w.cu_seqlens_k[i];
    w.max_length_q = max_of(w.max_length_q, w.lengths[i]);
    w.max_length_k = max_of(w.max_length_k, keys);
    w.min_length_q = i == 0 ? w.lengths[i] : min_of(w.min_length_q, w.lengths[i]);
    w.min_length_k = i == 0 ? keys : min_of(w.min_length_k, keys);
  }
}

}  // namespace

std::vector<Index> Window::document_index_q() const { return entries_of_rows(cu_seqlens_q); }
std::vector<Index> Window::document_index_k() const { return entries_of_rows(cu_seqlens_k); }

std::vector<Index> Window::position_index() const {
  std::vector<Index> positions;
  positions.reserve(at(rows()));
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    const Index keys = cu_seqlens_k[i + 1] - cu_seqlens_k[i];
    for (Index row = 0; row < lengths[i]; ++row) positions.push_back(keys - lengths[i] + row);
  }
  return positions;
}

MicroSequences::MicroSequences(const Stream& documents, const MicroSplit& split)
    : ranks_(split.ranks), micros_(split.micros), rows_(documents.extent()) {
  if (ranks_ < 1 || micros_ < 1 || ranks_ > kMaxTokens || micros_ > kMaxTokens)
    throw Error(text(micros_, " micro-sequences on ", ranks_, " ranks"), "give at least one of each");
  const Index tokens = rows_.size(), parts = (split.even_work ? 1 : micros_) * ranks_;
  local_ = ceil_div(tokens, parts);
  padding_ = local_ * parts - tokens;
  if (padding_ > 0 && split.remainder == MicroSplit::Remainder::refuse)
    throw Error(text(tokens, " tokens do not divide into ", micros_, " micro-sequences on ", ranks_, " ranks"),
                text("pad to ", local_ * parts, " (MicroSplit::Remainder::pad)"));
  if (split.even_work && micros_ > max_of(local_, 1))
    throw Error(text(micros_, " micro-sequences of even work from ", tokens, " tokens on ", ranks_, " ranks"),
                text("give at most ", max_of(local_, 1), ", so that each has a token a rank"));
  rows_.end += padding_;
  if (rows_.end > kMaxTokens)
    throw Error(text("rows up to ", rows_.end, " are past the limit of ", kMaxTokens, " (rows are 32-bit on devices)"),
                "split the pack");
  const Stream q = Stream::from_used(documents.offsets(), documents.used_lengths(), rows_.end);
  packing_ = Packing(q);
  if (const std::optional<Index>& first = split.first_document_begin; first && *first != rows_.begin) {
    if (*first < 0 || *first > rows_.begin || q.sequences() == 0 || q.used(0) == 0)
      throw Error(text("first_document_begin ", *first, " with documents from row ", rows_.begin, " on"),
                  text("use 0 to ", rows_.begin, " and a first document that is not empty, or leave it out"));
    packing_ = Packing(q, key_stream(q, *first));
  }
  find_spans(q);
  if (split.even_work) cut_by_work(problem(*split.even_work));
}

// Each cut is the last one, in steps of a token a rank, before which there is no more than its share of the work; every
// micro-sequence has at least one step.
void MicroSequences::cut_by_work(const Problem& problem) {
  const Index steps = local_;
  const RowPairs pairs(problem.global_slices());
  std::vector<double> before;  // [steps + 1] pairs of the rows before each
  for (Index n = 0; n <= steps; ++n)
    before.push_back(static_cast<double>(pairs.of({rows_.begin, rows_.begin + n * ranks_})));
  cuts_ = {rows_.begin};
  Index last = 0;
  local_ = 0;
  for (Index m = 1; m <= micros_; ++m) {
    const double share = before.back() * static_cast<double>(m) / static_cast<double>(micros_);
    const Index wanted = static_cast<Index>(std::upper_bound(before.begin(), before.end(), share) - before.begin()) - 1;
    const Index next = m == micros_ ? steps : max_of(last + 1, min_of(wanted, steps - (micros_ - m)));
    cuts_.push_back(rows_.begin + next * ranks_);
    local_ = max_of(local_, next - last);
    last = next;
  }
}

std::vector<Index> MicroSequences::work(const Problem& problem) const {
  const RowPairs pairs(problem.global_slices());
  std::vector<Index> work;
  for (Index m = 0; m < micros_; ++m)
    for (Index r = 0; r < ranks_; ++r) work.push_back(pairs.of(rows(r, m)));
  return work;
}

Index MicroSequences::micro_of(Index token) const {
  check_index("token", token - rows_.begin, rows_.size());
  if (cuts_.empty()) return (token - rows_.begin) / (local_ * ranks_);
  return static_cast<Index>(std::upper_bound(cuts_.begin(), cuts_.end(), token) - cuts_.begin()) - 1;
}

void MicroSequences::find_spans(const Stream& documents) {
  Index next = rows_.begin;
  const auto nobody_until = [&](Index end) {
    if (next < end) spans_.push_back({next, end, next, kNoDocument});
    next = end;
  };
  for (Index i = 0; i < documents.sequences(); ++i) {
    if (documents.used(i) == 0) continue;
    nobody_until(documents.offset(i));
    next = documents.offset(i) + documents.used(i);
    spans_.push_back({documents.offset(i), next, packing_.k().offset(i), i});
  }
  nobody_until(rows_.end);
}

Range MicroSequences::rows(Index micro) const {
  check_index("micro-sequence", micro, micros_);
  if (!cuts_.empty()) return {cuts_[at(micro)], cuts_[at(micro + 1)]};
  const Index size = local_ * ranks_, begin = rows_.begin + micro * size;
  return {begin, begin + size};
}

Range MicroSequences::rows(Index rank, Index micro) const {
  check_index("rank", rank, ranks_);
  const Range all = rows(micro);
  const Index size = all.size() / ranks_, begin = all.begin + rank * size;
  return {begin, begin + size};
}

Window MicroSequences::window(Index rank, Index micro) const {
  const Range range = rows(rank, micro);
  Window w{.rank = rank, .micro = micro, .begin = range.begin, .end = range.end};
  w.first_document_begin = range.begin;
  w.cu_seqlens_q = {0};
  auto span = std::upper_bound(spans_.begin(), spans_.end(), range.begin,
                               [](Index token, const Span& s) { return token < s.end; });
  if (span != spans_.end() && range.size() > 0) w.first_document_begin = span->keys_begin;
  for (; span != spans_.end() && span->begin < range.end; ++span) {
    w.documents.push_back(span->document);
    w.lengths.push_back(min_of(span->end, range.end) - max_of(span->begin, range.begin));
    w.cu_seqlens_q.push_back(w.cu_seqlens_q.back() + w.lengths.back());
  }
  w.cu_seqlens_k = w.cu_seqlens_q;
  for (std::size_t i = 1; i < w.cu_seqlens_k.size(); ++i) w.cu_seqlens_k[i] += w.begin - w.first_document_begin;
  measure(w);
  return w;
}

Problem MicroSequences::problem(Mask mask) const {
  if (!mask.slices) mask.align = Align::bottom_right;
  return Problem(packing_, std::move(mask));
}

std::vector<Slice> MicroSequences::slices(const Problem& problem, Index rank, Index micro, Range keys) const {
  const Range range = rows(rank, micro);
  const RunList q = RunList::from_runs({{0, range.begin, range.size(), 1}}, range.size());
  Plan plan = make_plan(problem, q, RunList::sequence_order(problem.packing().k().tokens()));
  for (Slice& s : plan.slices) {
    const Range seen = touched_keys(s);
    if (seen.begin < keys.begin || seen.end > keys.end)
      throw Error(text("rank ", rank, ", micro-sequence ", micro, " (tokens ", range.begin, " .. ", range.end,
                       "): the mask shows keys ", seen.begin, " .. ", seen.end, ", and only ", keys.begin, " .. ",
                       keys.end, " are there"),
                  seen.end > keys.end ? "use a causal mask, or micro-sequences that end where documents do"
                                      : "keep more rows of the past");
    s.k_begin = max_of(s.k_begin, keys.begin) - keys.begin;
    s.k_end -= keys.begin;
    s.lo = shift_bound(s.lo, -keys.begin);
    s.hi = shift_bound(s.hi, -keys.begin);
  }
  return std::move(plan.slices);
}

std::vector<std::uint8_t> MicroSequences::dense_mask(const Problem& problem, Index rank, Index micro) const {
  const Window w = window(rank, micro);
  std::vector<std::uint8_t> mask(at(w.rows() * w.keys()), 0);
  for (const Slice& s : slices(problem, rank, micro, {w.first_document_begin, w.end}))
    for (Index q = s.q_begin; q < s.q_end; ++q)
      for (Index k = max_of(s.k_begin, shift_bound(s.lo, q)); k < min_of(s.k_end, shift_bound(s.hi, q + 1)); ++k)
        mask[at(q * w.keys() + k)] = 1;
  return mask;
}

}  // namespace weft
