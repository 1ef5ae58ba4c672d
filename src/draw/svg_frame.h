// Where tokens lie in a picture's matrix, and what stands along its sides.
#pragma once

#include "draw/ink.h"
#include "weft/layout.h"

namespace weft::draw {

struct Frame {
  Box box;
  Index queries = 1, keys = 1;

  double x(double key) const { return box.x + box.width * key / static_cast<double>(keys); }
  double y(double query) const { return box.y + box.height * query / static_cast<double>(queries); }
};

// One side: owners of the tokens, edges and names of documents, numbers of tokens.
void draw_side(const Layout& layout, const Frame& frame, bool keys, Ink& ink);

}  // namespace weft::draw
