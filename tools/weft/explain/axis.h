// One stream of tokens as an axis of the picture.
#pragma once

#include <string>
#include <vector>

#include "index.h"
#include "weft/layout.h"

namespace weft::tool {

inline constexpr Index kNobody = -1;

struct Axis {
  explicit Axis(const Layout& layout);

  Index tokens = 0;
  std::vector<Index> owner;  // [tokens] rank, or kNobody
  std::vector<bool> real;    // [tokens]
  std::vector<bool> begins;  // [tokens + 1] a document begins, or documents end, here
  int cell = 2;              // columns a token

  // One line over the axis: paint(token, filling) gives a token's column with what fills up its cell.
  template <class Paint>
  std::string line(Paint&& paint, const std::string& fill, const std::string& edge) const {
    std::string out;
    for (Index t = 0; t < tokens; ++t) {
      const bool at_edge = t + 1 < tokens && begins[at(t + 1)];
      out += paint(t, cell == 2 && !at_edge && t + 1 < tokens ? fill : std::string());
      if (at_edge) out += edge;
    }
    return out;
  }

  std::string ruler() const;  // the numbers of the tokens where documents begin
  std::string rule() const;   // a horizontal line, crossed where documents begin
};

}  // namespace weft::tool
