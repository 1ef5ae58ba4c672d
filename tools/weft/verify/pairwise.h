// A small part of a grid in which any two values of any two axes still meet.
#pragma once

#include "verify/grid.h"

namespace weft::tool {

// Every pair of values that a cell of the grid has, schedules included, some kept cell has too; and if the capability
// table does not refuse the one, it does not refuse the other. Problems without a cell are gone.
Grid pairwise(Grid grid);

}  // namespace weft::tool
