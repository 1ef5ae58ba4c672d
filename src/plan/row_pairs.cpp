#include "plan/row_pairs.h"

#include <algorithm>

namespace weft {
namespace {

// From token `at` on there are so many more keys, and so many more with each further token.
struct Change {
  Index at, keys, slope;
};

void add_changes(const Slice& given, std::vector<Change>& to) {
  const Slice s = trimmed(given, true);
  if (s.q_begin >= s.q_end) return;
  // Every row that is left sees a key: the band's last one or the slice's, less those before the first.
  const auto keys = [&](Index q) {
    return min_of(s.k_end, shift_bound(s.hi, q) + 1) - max_of(s.k_begin, shift_bound(s.lo, q));
  };
  // The last key moves on with the token until it is the slice's last, the first one from the slice's first on.
  const Index stops = min_of(s.q_end, s.k_end - 1 - s.hi), starts = max_of(s.q_begin, s.k_begin - s.lo);
  to.push_back({s.q_begin, keys(s.q_begin), 0});
  if (s.q_begin < stops) {
    to.push_back({s.q_begin, 0, 1});
    to.push_back({stops, 0, -1});
  }
  if (starts < s.q_end) {
    to.push_back({starts, 0, -1});
    to.push_back({s.q_end, 0, 1});
  }
  to.push_back({s.q_end, -keys(s.q_end), 0});
}

}  // namespace

RowPairs::RowPairs(std::span<const Slice> slices) {
  std::vector<Change> changes;
  changes.reserve(4 * slices.size());
  for (const Slice& s : slices) add_changes(s, changes);
  std::sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) { return a.at < b.at; });
  Piece now{0, 0, 0, 0};
  for (std::size_t i = 0; i < changes.size();) {
    const Index at = changes[i].at, tokens = at - now.begin;
    now = {at, now.keys + tokens * now.slope, now.slope, now.before + now.pairs(tokens)};
    for (; i < changes.size() && changes[i].at == at; ++i) {
      now.keys += changes[i].keys;
      now.slope += changes[i].slope;
    }
    pieces_.push_back(now);
  }
}

Index RowPairs::before(Index token) const {
  const auto next =
      std::upper_bound(pieces_.begin(), pieces_.end(), token, [](Index t, const Piece& p) { return t < p.begin; });
  if (next == pieces_.begin()) return 0;
  const Piece& piece = *(next - 1);
  return piece.before + piece.pairs(token - piece.begin);
}

}  // namespace weft
