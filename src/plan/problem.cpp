#include <algorithm>
#include <bit>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan/join_slices.h"
#include "plan/views.h"
#include "text.h"
#include "weft/mask.h"

namespace weft {
namespace {

std::string show(const Slice& s) {
  const auto bound = [](Index b) { return is_unlimited(b) ? std::string(b < 0 ? "-inf" : "inf") : std::to_string(b); };
  return text("{q ", s.q_begin, ":", s.q_end, ", k ", s.k_begin, ":", s.k_end, ", lo ", bound(s.lo), ", hi ",
              bound(s.hi), "}");
}

void check_range(std::size_t n, const Slice& s, std::string_view side, Range r, Index tokens) {
  if (r.begin < 0 || r.begin > r.end || r.end > tokens)
    throw Error(
        text("slice ", n, " ", show(s), ": ", side, " range ", r.begin, ":", r.end, " is not inside 0:", tokens),
        text("give 0 <= begin <= end <= ", tokens));
}

// Ranges of real tokens; neighbours without padding between them are joined.
std::vector<Range> real_ranges(const Stream& stream) {
  std::vector<Range> real;
  for (Index i = 0; i < stream.sequences(); ++i) {
    const Range r{stream.offset(i), stream.offset(i) + stream.used(i)};
    if (r.size() == 0) continue;
    if (!real.empty() && real.back().end == r.begin)
      real.back().end = r.end;
    else
      real.push_back(r);
  }
  return real;
}

void check_real(std::size_t n, const Slice& s, std::string_view side, Range r, std::span<const Range> real) {
  if (r.size() == 0) return;
  const auto at = std::upper_bound(real.begin(), real.end(), r.begin,
                                   [](Index token, const Range& range) { return token < range.end; });
  const bool starts_inside = at != real.end() && at->begin <= r.begin;
  if (starts_inside && r.end <= at->end) return;
  throw Error(text("slice ", n, " ", show(s), ": ", side, " token ", starts_inside ? at->end : r.begin, " is padding"),
              "split the slice so that it covers real tokens only");
}

// A pair that both slices see, if any.
bool common_pair(const Slice& a, const Slice& b, Index& q, Index& k) {
  const Slice both{max_of(a.q_begin, b.q_begin), min_of(a.q_end, b.q_end), max_of(a.k_begin, b.k_begin),
                   min_of(a.k_end, b.k_end),     max_of(a.lo, b.lo),       min_of(a.hi, b.hi)};
  const Slice t = trimmed(both, true);
  if (t.q_begin >= t.q_end) return false;
  q = t.q_begin;
  k = t.k_begin;
  return true;
}

// The key ranges of some slices, to find those that overlap another range: a tree of maxima over all slices by where
// their keys begin. Finding takes a logarithm for each slice that is found, and one more.
class KeyRanges {
 public:
  explicit KeyRanges(std::span<const Slice> slices) : slices_(slices), by_begin_(slices.size()), place_(slices.size()) {
    std::iota(by_begin_.begin(), by_begin_.end(), std::size_t{0});
    std::sort(by_begin_.begin(), by_begin_.end(),
              [&](auto a, auto b) { return std::pair(slices[a].k_begin, a) < std::pair(slices[b].k_begin, b); });
    for (std::size_t p = 0; p < by_begin_.size(); ++p) place_[by_begin_[p]] = p;
    ends_.assign(2 * std::bit_ceil(std::max<std::size_t>(1, slices.size())), kNone);
  }

  void add(std::size_t slice) { set(slice, slices_[slice].k_end); }
  void remove(std::size_t slice) { set(slice, kNone); }

  // Calls visit(slice) for each added slice whose keys overlap those of `other`.
  template <class F>
  void for_each_overlapping(const Slice& other, const F& visit) const {
    find(1, 0, ends_.size() / 2, other, visit);
  }

 private:
  static constexpr Index kNone = -1;

  void set(std::size_t slice, Index end) {
    std::size_t node = ends_.size() / 2 + place_[slice];
    ends_[node] = end;
    for (node /= 2; node > 0; node /= 2) ends_[node] = max_of(ends_[2 * node], ends_[2 * node + 1]);
  }

  // Of the `count` places from `first` on.
  template <class F>
  void find(std::size_t node, std::size_t first, std::size_t count, const Slice& other, const F& visit) const {
    if (ends_[node] <= other.k_begin || slices_[by_begin_[first]].k_begin >= other.k_end) return;
    if (count == 1) return visit(by_begin_[first]);
    find(2 * node, first, count / 2, other, visit);
    find(2 * node + 1, first + count / 2, count / 2, other, visit);
  }

  std::span<const Slice> slices_;
  std::vector<std::size_t> by_begin_, place_;
  std::vector<Index> ends_;  // of the places' slices from the middle on, of two below a node before it
};

// Sweep over queries: a slice is held against those whose rows it meets and whose keys overlap its own.
void check_disjoint(std::span<const Slice> slices) {
  std::vector<std::size_t> by_q_begin;
  for (std::size_t n = 0; n < slices.size(); ++n)
    if (slices[n].q_begin < slices[n].q_end && slices[n].k_begin < slices[n].k_end) by_q_begin.push_back(n);
  std::vector<std::size_t> by_q_end = by_q_begin;
  std::sort(by_q_begin.begin(), by_q_begin.end(),
            [&](auto a, auto b) { return std::pair(slices[a].q_begin, a) < std::pair(slices[b].q_begin, b); });
  std::sort(by_q_end.begin(), by_q_end.end(), [&](auto a, auto b) { return slices[a].q_end < slices[b].q_end; });
  KeyRanges active(slices);
  auto leaving = by_q_end.begin();
  for (const std::size_t n : by_q_begin) {
    const Slice& s = slices[n];
    for (; slices[*leaving].q_end <= s.q_begin; ++leaving) active.remove(*leaving);
    active.for_each_overlapping(s, [&](std::size_t other) {
      Index q = 0, k = 0;
      if (!common_pair(slices[other], s, q, k)) return;
      const auto [a, b] = std::minmax(other, n);
      throw Error(text("slices ", a, " ", show(slices[a]), " and ", b, " ", show(slices[b]),
                       " overlap: both hold query ", q, ", key ", k),
                  "cut one of them, so that every visible pair lies in one slice");
    });
    active.add(n);
  }
}

// A user's own slices: refused if one leaves its stream, covers padding, or shares a pair with another. Returned with
// bounds beyond the longest stream set to unlimited, or to just out of reach.
std::vector<Slice> checked_slices(std::vector<Slice> slices, const Packing& packing) {
  const std::vector<Range> q_real = real_ranges(packing.q()), k_real = real_ranges(packing.k());
  for (std::size_t n = 0; n < slices.size(); ++n) {
    Slice& s = slices[n];
    check_range(n, s, "query", {s.q_begin, s.q_end}, packing.q().tokens());
    check_range(n, s, "key", {s.k_begin, s.k_end}, packing.k().tokens());
    if (s.lo > s.hi)
      throw Error(text("slice ", n, " ", show(s), ": lo is above hi"), "give lo <= hi, or drop the slice");
    check_real(n, s, "query", {s.q_begin, s.q_end}, q_real);
    check_real(n, s, "key", {s.k_begin, s.k_end}, k_real);
    s.lo = s.lo < -kMaxTokens ? -kUnlimited : min_of(s.lo, kMaxTokens + 1);
    s.hi = s.hi > kMaxTokens ? kUnlimited : max_of(s.hi, -kMaxTokens - 1);
  }
  check_disjoint(slices);
  return slices;
}

void check_window(std::string_view side, Index value) {
  if (value < -1)
    throw Error(text("window ", side, " = ", value, " is below -1"), "use -1 for unlimited, or 0 or more");
}

void check_plain(const Mask& mask) {
  check_window("left", mask.left);
  check_window("right", mask.right);
  if (mask.chunk && *mask.chunk < 1)
    throw Error(text("chunk size ", *mask.chunk, " is below 1"),
                "give 1 or more, or none for attention without chunks");
}

}  // namespace

Problem::Problem(Packing packing, Mask mask) {
  check_plain(mask);
  std::vector<Slice> own;
  if (mask.slices) {
    if (mask.causal || mask.left != -1 || mask.right != -1 || mask.chunk)
      throw Error("a mask has its own slices and also causal, window or chunk",
                  "write the band of each slice into its lo and hi, and leave the rest at its default");
    mask.slices = checked_slices(std::move(*mask.slices), packing);
    own = joined_slices(*mask.slices);
  }
  data_ = std::make_shared<const Data>(Data{std::move(packing), std::move(mask), std::move(own)});
}

std::vector<Slice> Problem::global_slices() const {
  if (mask().slices) return {own_slices().begin(), own_slices().end()};
  std::vector<Slice> slices;
  const StreamView q = view(packing().q()), k = view(packing().k());
  for (Index i = 0; i < packing().sequences(); ++i)
    SequenceMask(view(mask()), q.real(i), k.real(i)).for_each(q.real(i), [&](const Slice& s) {
      const Slice t = trimmed(s, false);
      if (t.q_begin < t.q_end) slices.push_back(t);
    });
  return slices;
}

Index Problem::visible_pairs() const {
  Index pairs = 0;
  for (const Slice& s : global_slices()) pairs += weft::visible_pairs(s);
  return pairs;
}

}  // namespace weft
