// The two grids of weft verify.
#pragma once

#include <vector>

#include "verify/grid.h"

namespace weft::tool {

struct GridAxes {
  std::vector<ScheduleOptions> schedules;
  std::vector<Index> ranks;
  std::vector<DType> dtypes;
  unsigned long long seed = 0;
};

// The support matrix: schedules x layouts x masks x packings x dtypes x ranks; other features of attention are drawn.
// Unless `full`, dtypes and ranks take turns.
Grid matrix_grid(const GridAxes& axes, const std::vector<LayoutKind>& layouts, bool full);

// The grid that Transformer Engine tests its context parallelism with
// (tests/pytorch/attention/test_attention_with_cp.py there): batches of 2 x 4096 tokens, dual_chunk, padding between
// documents or none, in its heads, widths and masks. Tokens, windows and chunks are `scale` times smaller, heads up to
// 4 and widths up to 8 times.
Grid te_grid(const GridAxes& axes, Index scale);

}  // namespace weft::tool
