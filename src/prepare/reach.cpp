#include "prepare/reach.h"

#include "index.h"

namespace weft::prepare {

Reach reach_of(const MicroSequences& micros, const Problem& problem) {
  Reach reach;
  for (Index m = 0; m < micros.micros(); ++m) reach.first.push_back(micros.rows(m).begin);
  reach.end = reach.first;
  const Index size = micros.local() * micros.ranks(), begin = micros.rows().begin;
  for (const Slice& s : problem.global_slices()) {
    for (Index m = (s.q_begin - begin) / size; m < micros.micros() && micros.rows(m).begin < s.q_end; ++m) {
      Slice part = s;
      part.q_begin = max_of(s.q_begin, micros.rows(m).begin);
      part.q_end = min_of(s.q_end, micros.rows(m).end);
      const Range seen = touched_keys(part);
      if (seen.size() == 0) continue;
      reach.first[at(m)] = min_of(reach.first[at(m)], seen.begin);
      reach.end[at(m)] = max_of(reach.end[at(m)], seen.end);
    }
  }
  reach.needed = reach.first;
  for (std::size_t m = reach.needed.size(); m-- > 1;)
    reach.needed[m - 1] = min_of(reach.needed[m - 1], reach.needed[m]);
  return reach;
}

}  // namespace weft::prepare
