// The support matrix: schedules x layouts x masks x packings x dtypes x ranks; other features of attention are drawn.
#pragma once

#include <vector>

#include "verify/grid.h"

namespace weft::tool {

struct MatrixAxes {
  bool full = false;  // every combination; otherwise dtypes and ranks take turns
  std::vector<ScheduleOptions> schedules;
  std::vector<LayoutKind> layouts;
  std::vector<Index> ranks;
  std::vector<DType> dtypes;
  unsigned long long seed = 0;
};

Grid matrix_grid(const MatrixAxes& axes);

}  // namespace weft::tool
