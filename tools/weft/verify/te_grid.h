// The grid that Transformer Engine tests its context parallelism with
// (tests/pytorch/attention/test_attention_with_cp.py there): batches of 2 x 4096 tokens, dual_chunk, padding between
// documents or none, in its heads, widths and masks.
#pragma once

#include <vector>

#include "verify/grid.h"

namespace weft::tool {

struct TeGridAxes {
  Index scale = 1;  // tokens, windows and chunks are so many times smaller; heads up to 4 and widths up to 8 times
  std::vector<ScheduleOptions> schedules;
  std::vector<Index> ranks;
  std::vector<DType> dtypes;
  unsigned long long seed = 0;
};

Grid te_grid(const TeGridAxes& axes);

}  // namespace weft::tool
