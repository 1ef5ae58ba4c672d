#include "plan/user_slices.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "text.h"
#include "weft/error.h"

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

// Sweep over queries. Active slices are kept by k_begin; the longest key range so far says how far back to look.
void check_disjoint(std::span<const Slice> slices) {
  std::vector<std::size_t> order(slices.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](auto a, auto b) { return std::pair(slices[a].q_begin, a) < std::pair(slices[b].q_begin, b); });
  std::multimap<Index, std::size_t> active;                                    // k_begin -> slice
  std::multimap<Index, std::multimap<Index, std::size_t>::iterator> by_q_end;  // when they leave
  Index longest = 0;
  for (const std::size_t n : order) {
    const Slice& s = slices[n];
    if (s.q_begin >= s.q_end || s.k_begin >= s.k_end) continue;
    while (!by_q_end.empty() && by_q_end.begin()->first <= s.q_begin) {
      active.erase(by_q_end.begin()->second);
      by_q_end.erase(by_q_end.begin());
    }
    for (auto it = active.upper_bound(s.k_begin - longest); it != active.end() && it->first < s.k_end; ++it) {
      Index q = 0, k = 0;
      if (!common_pair(slices[it->second], s, q, k)) continue;
      const auto [a, b] = std::minmax(it->second, n);
      throw Error(text("slices ", a, " ", show(slices[a]), " and ", b, " ", show(slices[b]),
                       " overlap: both hold query ", q, ", key ", k),
                  "cut one of them, so that every visible pair lies in one slice");
    }
    longest = max_of(longest, s.k_end - s.k_begin);
    by_q_end.emplace(s.q_end, active.emplace(s.k_begin, n));
  }
}

}  // namespace

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

}  // namespace weft
