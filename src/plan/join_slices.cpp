#include "plan/join_slices.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <tuple>

namespace weft {
namespace {

bool is_empty(const Slice& s) { return s.q_begin >= s.q_end || s.k_begin >= s.k_end; }

// Whether the band of `joined` shows in the rectangle of `part` what the band of `part` shows.
bool shows_as(const Slice& joined, const Slice& part) {
  const Index least = part.k_begin - (part.q_end - 1), most = part.k_end - 1 - part.q_begin;  // of k - q
  return (joined.lo == part.lo || max_of(joined.lo, part.lo) <= least) &&
         (joined.hi == part.hi || min_of(joined.hi, part.hi) >= most);
}

// Gives `joined` a band that shows in the rectangles of both parts what they show; false if neither's bounds do.
bool find_band(Slice& joined, const Slice& a, const Slice& b) {
  for (const Index hi : {a.hi, b.hi}) {
    for (const Index lo : {a.lo, b.lo}) {
      joined.lo = lo;
      joined.hi = hi;
      if (lo <= hi && shows_as(joined, a) && shows_as(joined, b)) return true;
    }
  }
  return false;
}

std::vector<std::size_t> numbers_of(const std::vector<Slice>& slices) {
  std::vector<std::size_t> numbers;
  for (std::size_t n = 0; n < slices.size(); ++n)
    if (!is_empty(slices[n])) numbers.push_back(n);
  return numbers;
}

// Slices that became part of another one are left without rows.
void join_rows(std::vector<Slice>& slices) {
  std::vector<std::size_t> order = numbers_of(slices);
  const auto key = [&](std::size_t n) {
    const Slice& s = slices[n];
    return std::tuple(s.k_begin, s.k_end, s.q_begin, n);
  };
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
  for (std::size_t i = 1; i < order.size(); ++i) {
    Slice &a = slices[order[i - 1]], &b = slices[order[i]];
    Slice both{a.q_begin, b.q_end, a.k_begin, a.k_end};
    if (a.k_begin != b.k_begin || a.k_end != b.k_end || a.q_end != b.q_begin || !find_band(both, a, b)) continue;
    a = both;
    b.q_end = b.q_begin;
    order[i] = order[i - 1];
  }
}

// Joins b to a, whose keys end where b's begin and whose rows include b's. The rows of both become a's slice, and the
// rows below them that see only a's keys become b's.
bool join_keys(Slice& a, Slice& b) {
  if (a.k_end != b.k_begin || b.q_begin < a.q_begin || b.q_end > a.q_end) return false;
  // A tile of rows that ends in b's and goes on below walks a's keys twice. Each tile of b's rows walks half a tile of
  // keys less, because one range of keys ends within a tile instead of two. Tiles of 64 rows and 128 keys: the first
  // costs as many keys as a has, the second saves as many as b has rows.
  if (b.q_end < a.q_end && b.q_end - b.q_begin < a.k_end - a.k_begin) return false;
  Slice seen = a;
  seen.q_end = b.q_end;
  Slice both{a.q_begin, b.q_end, a.k_begin, b.k_end};
  if (!find_band(both, seen, b)) return false;
  // Rows above b's must not see its keys.
  if (a.q_begin < b.q_begin && both.hi >= b.k_begin - (b.q_begin - 1)) return false;
  b = a;
  b.q_begin = both.q_end;
  a = both;
  return true;
}

void join_adjacent_keys(std::vector<Slice>& slices) {
  std::vector<std::size_t> order = numbers_of(slices), by_end = order;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::tuple(slices[a].k_begin, slices[a].q_begin, a) < std::tuple(slices[b].k_begin, slices[b].q_begin, b);
  });
  // Entries by where their keys end, then by their first row. A join moves slices between entries, so that keys still
  // end where the entry says; their rows may be others then, which can hide a join but makes none wrong.
  struct Entry {
    Index k_end, q_begin;
    std::size_t slice;
  };
  std::vector<Entry> entries;
  for (const std::size_t n : by_end) entries.push_back({slices[n].k_end, slices[n].q_begin, n});
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.k_end, a.q_begin, a.slice) < std::tie(b.k_end, b.q_begin, b.slice);
  });
  std::vector<std::size_t> entry_of(slices.size());
  for (std::size_t e = 0; e < entries.size(); ++e) entry_of[entries[e].slice] = e;
  for (const std::size_t n : order) {
    const Slice& b = slices[n];
    // The last entry that ends where b's keys begin, and does not begin below b's rows.
    const auto past = std::partition_point(entries.begin(), entries.end(), [&](const Entry& e) {
      return e.k_end != b.k_begin ? e.k_end < b.k_begin : e.q_begin <= b.q_begin;
    });
    if (past == entries.begin() || std::prev(past)->k_end != b.k_begin) continue;
    const std::size_t first = std::prev(past)->slice;
    if (!join_keys(slices[first], slices[n])) continue;
    std::swap(entries[entry_of[first]].slice, entries[entry_of[n]].slice);
    std::swap(entry_of[first], entry_of[n]);
  }
}

}  // namespace

std::vector<Slice> joined_slices(std::vector<Slice> slices) {
  join_rows(slices);
  join_adjacent_keys(slices);
  std::erase_if(slices, is_empty);
  return slices;
}

}  // namespace weft
