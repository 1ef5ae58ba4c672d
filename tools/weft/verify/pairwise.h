// A small part of a grid in which any two values of any two axes still meet.
#pragma once

#include "verify/grid.h"

namespace weft::tool {

// Every pair of values of any cell, its schedule included, is kept in some cell; pairs that the capability table does
// not refuse are kept in a cell that it does not refuse. Problems without a cell are dropped.
Grid pairwise(Grid grid);

}  // namespace weft::tool
