// Lists of ranges.
#pragma once

#include <algorithm>
#include <vector>

#include "weft/slice.h"

namespace weft {

// Sorted by where they begin.
inline std::vector<Range> sorted(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  return ranges;
}

// Sorted, and joined where they overlap or, with `touching`, where one begins at the end of another.
inline std::vector<Range> joined(std::vector<Range> ranges, bool touching = true) {
  std::vector<Range> out;
  for (const Range& r : sorted(std::move(ranges))) {
    if (!out.empty() && r.begin < out.back().end + (touching ? 1 : 0))
      out.back().end = max_of(out.back().end, r.end);
    else
      out.push_back(r);
  }
  return out;
}

}  // namespace weft
