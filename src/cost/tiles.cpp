// Kernel time from a list of slices: tiles are counted as kernels walk them.
#include "cost/tiles.h"

#include <algorithm>

#include "index.h"

namespace weft {

TileWork& TileWork::operator+=(const TileWork& other) {
  pairs += other.pairs;
  covered += other.covered;
  tiles += other.tiles;
  rows += other.rows;
  keys += other.keys;
  longest = std::max(longest, other.longest);
  return *this;
}

namespace cost {

TileCounter::TileCounter(Index heads_q, Index heads_k, const KernelRate& rate)
    : group_(heads_k > 0 ? max_of(1, heads_q / heads_k) : 1),
      tokens_(max_of(1, rate.tile_q / group_)),
      keys_(max_of(1, rate.tile_k)),
      copy_tokens_(rate.copy_rows > 0 ? max_of(1, rate.copy_rows / group_) : 0),
      heads_(static_cast<double>(heads_q)),
      groups_(static_cast<double>(heads_q) / static_cast<double>(group_)) {}

// Keys that rows [a, b) of a slice see, from the first to the last.
Range TileCounter::keys_of(const Slice& s, Index a, Index b) {
  return {max_of(s.k_begin, shift_bound(s.lo, a)), min_of(s.k_end, shift_bound(s.hi, b))};
}

void TileCounter::add_copies(const Slice& s, Index first_row) {
  if (copy_tokens_ == 0) return;
  Index copied = 0;
  for (Index a = s.q_begin; a < s.q_end;) {
    const Index b = min_of(s.q_end, ((a + first_row) / copy_tokens_ + 1) * copy_tokens_ - first_row);
    copied += max_of(0, keys_of(s, a, b).size());
    a = b;
  }
  work_.keys += static_cast<double>(copied) * groups_;
}

void TileCounter::add_rows(Range rows) {
  if (!rows_.empty() && rows.begin >= rows_.back().begin && rows.begin <= rows_.back().end)
    rows_.back().end = max_of(rows_.back().end, rows.end);
  else
    rows_.push_back(rows);
}

// Rows that were added, each once.
Index TileCounter::take_rows() {
  const auto before = [](const Range& a, const Range& b) { return a.begin < b.begin; };
  if (!std::is_sorted(rows_.begin(), rows_.end(), before)) std::sort(rows_.begin(), rows_.end(), before);
  Index count = 0, end = 0;
  for (const Range& r : rows_) {
    count += max_of(0, r.end - max_of(end, r.begin));
    end = max_of(end, r.end);
  }
  rows_.clear();
  return count;
}

void TileCounter::add(const Slice& given, Index first_row) {
  const Slice s = trimmed(given, true);
  if (s.q_begin >= s.q_end) return;
  add_tiles(s, first_row);
  add_rows({s.q_begin + first_row, s.q_end + first_row});
}

// All but the rows.
void TileCounter::add_tiles(const Slice& s, Index first_row) {
  const Index first = (s.q_begin + first_row) / tokens_, last = (s.q_end - 1 + first_row) / tokens_;
  if (at(last) + 1 >= by_tile_.size()) {
    by_tile_.resize(at(last) + 2, 0);
    from_tile_.resize(at(last) + 2, 0);
  }
  touched_ = touched_.size() == 0 ? Range{first, last + 1}
                                  : Range{min_of(touched_.begin, first), max_of(touched_.end, last + 1)};
  const double whole = static_cast<double>(tokens_ * keys_);
  Index key_tiles = 0;
  const bool cut = s.lo > s.k_begin - (s.q_end - 1) || s.hi < s.k_end - 1 - s.q_begin;
  if (!cut) {  // all rows see all keys
    const Index n = ceil_div(s.k_end - s.k_begin, keys_);
    key_tiles = n * (last - first + 1);
    from_tile_[at(first)] += static_cast<double>(n) * whole;
    from_tile_[at(last) + 1] -= static_cast<double>(n) * whole;
  }
  for (Index t = first; t <= last && cut; ++t) {
    const Index a = max_of(s.q_begin, t * tokens_ - first_row), b = min_of(s.q_end, (t + 1) * tokens_ - first_row);
    const auto [from, to] = keys_of(s, a, b);
    if (from >= to) continue;
    const Index n = ceil_div(to - s.k_begin, keys_) - (from - s.k_begin) / keys_;
    key_tiles += n;
    by_tile_[at(t)] += static_cast<double>(n) * whole;
  }
  pairs_ += visible_pairs(s);
  work_.covered += static_cast<double>(key_tiles) * whole * heads_;
  work_.tiles += static_cast<double>(last - first + 1) * groups_;
  add_copies(s, first_row);
}

void TileCounter::add_roughly(const Slice& given) {
  constexpr Index kFew = 4;  // tiles: as quickly counted
  const Slice s = trimmed(given, true);
  const Index rows = s.q_end - s.q_begin;
  if (rows <= 0) return;
  add_rows({s.q_begin, s.q_end});
  if (rows <= kFew * tokens_) {
    add_tiles(Slice{0, rows, s.k_begin, s.k_end, shift_bound(s.lo, s.q_begin), shift_bound(s.hi, s.q_begin)}, 0);
    end_tiles();
    return;
  }
  const Index pairs = visible_pairs(s), keys = s.k_end - s.k_begin;
  // An edge that cuts: a tile goes as far as its farthest row, half a tile more than the mean row. And the last tile of
  // keys is half empty.
  const auto cuts = [&](bool edge) { return edge ? static_cast<double>(tokens_ - 1) / 2 : 0.0; };
  const bool hi = s.hi<s.k_end - 1 - s.q_begin, lo = s.lo> s.k_begin - (s.q_end - 1);
  const double more = cuts(hi) + cuts(lo) + static_cast<double>(keys_ - 1) / (lo ? 1 : 2);
  const double tiles = static_cast<double>(ceil_div(rows, tokens_)) + 0.5;
  const double covered = static_cast<double>(pairs) + static_cast<double>(rows) * more;
  const double widest = static_cast<double>(min_of(keys, lo && hi ? s.hi - s.lo + tokens_ : keys) + keys_ / 2);
  longest_ = std::max(longest_, widest * static_cast<double>(tokens_));
  pairs_ += pairs;
  if (copy_tokens_ > 0) {
    const Index block = min_of(rows, copy_tokens_);
    const double edges = static_cast<double>(block - 1) / 2 * ((hi ? 1 : 0) + (lo ? 1 : 0));
    const double each =
        std::min(static_cast<double>(keys), static_cast<double>(pairs) / static_cast<double>(rows) + edges);
    const double blocks = static_cast<double>(rows) / static_cast<double>(copy_tokens_) + 0.5;
    work_.keys += each * std::max(1.0, blocks) * groups_;
  }
  work_.covered += covered * heads_;
  work_.tiles += tiles * groups_;
}

void TileCounter::end_tiles() {
  double sum = 0;
  for (Index t = touched_.begin; t < touched_.end; ++t) {
    sum += from_tile_[at(t)];
    longest_ = std::max(longest_, by_tile_[at(t)] + sum);
    by_tile_[at(t)] = from_tile_[at(t)] = 0;
  }
  if (touched_.size() > 0) from_tile_[at(touched_.end)] = 0;
  touched_ = {};
}

TileWork TileCounter::take() {
  end_tiles();
  TileWork done = work_;
  done.rows = static_cast<double>(take_rows()) * heads_;
  done.pairs = static_cast<double>(pairs_) * heads_;
  done.longest = longest_ * static_cast<double>(group_);
  work_ = {};
  pairs_ = 0;
  longest_ = 0;
  return done;
}

double flops_a_pair(const TensorShape& shape, Pass pass) {
  const Index width =
      pass == Pass::forward ? 2 * (shape.dim_qk + shape.dim_v) : 2 * (3 * shape.dim_qk + 2 * shape.dim_v);
  return static_cast<double>(width);
}

}  // namespace cost

TileWork tile_work(std::span<const Slice> slices, Index heads_q, Index heads_k, const KernelRate& rate) {
  cost::TileCounter counter(heads_q, heads_k, rate);
  for (const Slice& s : slices) counter.add(s, 0);
  return counter.take();
}

double kernel_seconds(const TileWork& work, const KernelRate& rate, const TensorShape& shape) {
  const double a_pair = cost::flops_a_pair(shape, rate.pass) / rate.flops;
  const double spread = work.covered * a_pair + work.tiles * rate.tile_seconds + work.rows * rate.row_seconds +
                        work.keys * rate.key_seconds;
  const double alone = work.longest * a_pair * static_cast<double>(rate.units);
  return rate.call_seconds + std::max(spread, alone);
}

}  // namespace weft
