// The axes of a picture's matrix.
#pragma once

#include "draw/svg_writer.h"
#include "weft/layout.h"

namespace weft::draw {

struct Frame {
  Box box;
  Index queries = 1, keys = 1;

  double x(double key) const { return box.x + box.width * key / static_cast<double>(keys); }
  double y(double query) const { return box.y + box.height * query / static_cast<double>(queries); }
};

// One side of the matrix: a strip in the colours of the tokens' ranks, edges and names of documents, token numbers.
void draw_axis(const Layout& layout, const Frame& frame, bool keys, SvgWriter& svg);

}  // namespace weft::draw
