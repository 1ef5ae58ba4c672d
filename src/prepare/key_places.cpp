#include "prepare/key_places.h"

#include <algorithm>

#include "index.h"
#include "text.h"
#include "weft/error.h"

namespace weft {
namespace {

using Ranges = std::vector<Range>;

// Rising ranges that do not touch, of the same tokens.
void join(Ranges& ranges) {
  std::erase_if(ranges, [](const Range& r) { return r.size() == 0; });
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  std::size_t kept = 0;
  for (const Range& r : ranges) {
    if (kept > 0 && r.begin <= ranges[kept - 1].end) {
      ranges[kept - 1].end = max_of(ranges[kept - 1].end, r.end);
    } else {
      ranges[kept++] = r;
    }
  }
  ranges.resize(kept);
}

// The tokens of `from` that are not in `taken`; both as join leaves them.
Ranges without(const Ranges& from, const Ranges& taken) {
  Ranges rest;
  auto next = taken.begin();
  for (Range r : from) {
    while (next != taken.end() && next->end <= r.begin) ++next;
    for (auto t = next; t != taken.end() && t->begin < r.end; ++t) {
      if (t->begin > r.begin) rest.push_back({r.begin, t->begin});
      r.begin = max_of(r.begin, min_of(t->end, r.end));
    }
    if (r.size() > 0) rest.push_back(r);
  }
  return rest;
}

// [micros] the keys that the queries of each see.
std::vector<Ranges> seen_keys(const MicroSequences& micros, const Problem& problem) {
  std::vector<Ranges> seen(at(micros.micros()));
  for (const Slice& s : problem.global_slices()) {
    if (s.q_begin >= s.q_end) continue;
    for (Index m = micros.micro_of(s.q_begin); m < micros.micros() && micros.rows(m).begin < s.q_end; ++m)
      seen[at(m)].push_back(touched_keys(within_rows(s, micros.rows(m))));
  }
  for (Ranges& keys : seen) join(keys);
  return seen;
}

// [micros] the first key that its queries or later ones see; where it begins, if they see none before.
std::vector<Index> first_needed(const MicroSequences& micros, const Problem& problem) {
  const std::vector<Ranges> seen = seen_keys(micros, problem);
  std::vector<Index> needed;
  for (Index m = 0; m < micros.micros(); ++m) {
    const Index begin = micros.rows(m).begin;
    needed.push_back(seen[at(m)].empty() ? begin : min_of(begin, seen[at(m)].front().begin));
  }
  for (std::size_t m = needed.size(); m-- > 1;) needed[m - 1] = min_of(needed[m - 1], needed[m]);
  return needed;
}

// Rows of a buffer that no key is in.
class FreeRows {
 public:
  // The lowest ones, up to so many.
  Range take(Index most) {
    Range& lowest = free_.back();
    const Range taken{lowest.begin, lowest.begin + min_of(most, lowest.size())};
    lowest.begin = taken.end;
    if (lowest.size() == 0) free_.pop_back();
    used_ = max_of(used_, taken.end);
    return taken;
  }
  void give_back(const Ranges& rows) {
    free_.insert(free_.end(), rows.begin(), rows.end());
    join(free_);
    std::reverse(free_.begin(), free_.end());
  }
  Index used() const { return used_; }  // past the last one ever taken

 private:
  Ranges free_{{0, kUnlimited}};  // the lowest one last
  Index used_ = 0;
};

}  // namespace

void require_earlier_keys(const MicroSequences& micros, const Problem& problem) {
  for (const Slice& s : problem.global_slices()) {
    if (s.q_begin >= s.q_end) continue;
    for (Index m = micros.micro_of(s.q_begin); m < micros.micros() && micros.rows(m).begin < s.q_end; ++m) {
      const Range rows = micros.rows(m), seen = touched_keys(within_rows(s, rows));
      if (seen.size() == 0 || seen.end <= rows.end) continue;
      throw Error(text("queries of micro-sequence ", m, " (tokens ", rows.begin, " .. ", rows.end, ") see keys up to ",
                       seen.end, ", which come later"),
                  "use a causal mask, or micro-sequences that end where documents do");
    }
  }
}

Index KeyPlaces::least_rows(const MicroSequences& micros, const Problem& problem, KeyRows how) {
  if (!how.drop) return max_of(1, micros.rows().end);
  const std::vector<Index> needed = first_needed(micros, problem);
  Index rows = 1;  // a buffer has at least one
  for (Index m = 0; m < micros.micros(); ++m) {
    const Index last = how.ahead ? min_of(m + 1, micros.micros() - 1) : m;
    rows = max_of(rows, micros.rows(last).end - needed[at(m)]);
  }
  return min_of(rows, max_of(1, reused(micros, problem, how.ahead).rows_));
}

std::optional<KeyPlaces> KeyPlaces::in_rows(const MicroSequences& micros, const Problem& problem, Index rows,
                                            bool drop) {
  if (!drop) {
    if (micros.rows().end > rows) return {};
    KeyPlaces places;
    places.rows_ = rows;
    places.round_and_round(micros.rows().end);
    places.last_.resize(at(micros.micros()));
    places.last_.back() = {{0, micros.rows().end}};
    return places;
  }
  KeyPlaces ring = around(micros, problem, rows);
  const auto fits = [&](Index before) {
    for (Index m = 0; m < micros.micros(); ++m)
      if (!ring.has_room(m, max_of(0, m - before))) return false;
    return true;
  };
  // Where both will do, keys go round the buffer: that cuts fewer slices.
  if (fits(1)) return ring;
  if (KeyPlaces ahead = reused(micros, problem, true); ahead.rows_ <= rows) return ahead;
  if (fits(0)) return ring;
  if (KeyPlaces least = reused(micros, problem, false); least.rows_ <= rows) return least;
  return {};
}

void KeyPlaces::round_and_round(Index tokens) {
  for (Index t = 0; t < tokens; t += rows_) runs_.push_back({t, min_of(t + rows_, tokens), 0});
}

// Token t in row t mod rows; keys are held from the first one on that a later query sees.
KeyPlaces KeyPlaces::around(const MicroSequences& micros, const Problem& problem, Index rows) {
  KeyPlaces places;
  places.rows_ = rows;
  places.round_and_round(micros.rows().end);
  std::vector<Index> needed = first_needed(micros, problem);
  needed.push_back(micros.rows().end);
  for (Index m = 0; m < micros.micros(); ++m) {
    places.last_.push_back({{needed[at(m)], needed[at(m + 1)]}});
    join(places.last_.back());
    places.ends_.push_back(micros.rows(m).end);
  }
  return places;
}

// Every token in the lowest row that is free when its keys come.
KeyPlaces KeyPlaces::reused(const MicroSequences& micros, const Problem& problem, bool ahead) {
  KeyPlaces places;
  places.around_ = false;
  places.ahead_ = ahead;
  std::vector<Ranges> keys = seen_keys(micros, problem);
  Ranges later;  // seen by queries of later micro-sequences
  for (Index m = micros.micros(); m-- > 0;) {
    keys[at(m)].push_back(micros.rows(m));
    join(keys[at(m)]);
    Ranges last = without(keys[at(m)], later);
    later.insert(later.end(), last.begin(), last.end());
    join(later);
    keys[at(m)] = std::move(last);
  }
  places.last_ = std::move(keys);

  FreeRows free;
  const auto take = [&](Range tokens) {
    while (tokens.size() > 0) {
      const Range rows = free.take(tokens.size());
      places.runs_.push_back({tokens.begin, tokens.begin + rows.size(), rows.begin});
      tokens.begin += rows.size();
    }
  };
  // What was there before the sequence.
  for (Range r : later) {
    r.end = min_of(r.end, micros.rows().begin);
    take(r);
  }
  for (Index m = 0; m < micros.micros(); ++m) {
    const Index done = m - (ahead ? 2 : 1);
    if (done >= 0) {
      Ranges rows;
      for (const Range& tokens : places.last_[at(done)]) {
        const Ranges some = places.rows_of(tokens);
        rows.insert(rows.end(), some.begin(), some.end());
      }
      free.give_back(rows);
    }
    take(micros.rows(m));
  }
  places.rows_ = free.used();
  return places;
}

std::vector<KeyPlaces::Run>::const_iterator KeyPlaces::run_of(Index token) const {
  return std::upper_bound(runs_.begin(), runs_.end(), token, [](Index t, const Run& run) { return t < run.end; });
}

std::vector<Range> KeyPlaces::rows_of(Range tokens) const {
  std::vector<Range> rows;
  for (auto run = run_of(tokens.begin); run != runs_.end() && run->begin < tokens.end; ++run) {
    const Index begin = max_of(tokens.begin, run->begin), end = min_of(tokens.end, run->end);
    const Range part{run->row + begin - run->begin, run->row + end - run->begin};
    if (!rows.empty() && rows.back().end == part.begin) {
      rows.back().end = part.end;
    } else {
      rows.push_back(part);
    }
  }
  return rows;
}

void KeyPlaces::place(const Slice& slice, std::vector<Slice>& out) const {
  for (auto run = run_of(slice.k_begin); run != runs_.end() && run->begin < slice.k_end; ++run) {
    const Index by = run->row - run->begin;
    const Slice part =
        trimmed({slice.q_begin, slice.q_end, max_of(slice.k_begin, run->begin) + by, min_of(slice.k_end, run->end) + by,
                 shift_bound(slice.lo, by), shift_bound(slice.hi, by)},
                false);
    if (part.q_begin < part.q_end) out.push_back(part);
  }
}

std::span<const Range> KeyPlaces::last_seen(Index micro) const { return last_[at(micro)]; }

bool KeyPlaces::has_room(Index micro, Index attended) const {
  if (!around_) return micro <= attended + (ahead_ ? 1 : 0);
  if (ends_.empty()) return true;  // nothing is dropped
  Index first = ends_.back();      // that later queries see
  for (Index m = attended; m < static_cast<Index>(last_.size()); ++m)
    if (!last_[at(m)].empty()) {
      first = last_[at(m)].front().begin;
      break;
    }
  return ends_[at(micro)] - first <= rows_;
}

}  // namespace weft
