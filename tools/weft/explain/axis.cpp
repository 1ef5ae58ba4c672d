#include "explain/axis.h"

#include <algorithm>

#include "index.h"

namespace weft::tool {

Axis::Axis(const Layout& layout)
    : tokens(layout.stream().tokens()),
      owner(at(tokens), kNobody),
      real(at(tokens), false),
      begins(at(tokens) + 1, false) {
  constexpr Index kWide = 40;  // more tokens than this and a line no longer fits 100 columns
  if (tokens > kWide) cell = 1;
  const Stream& stream = layout.stream();
  for (Index i = 0; i < stream.sequences(); ++i) std::fill_n(real.begin() + stream.offset(i), stream.used(i), true);
  for (const Index offset : stream.offsets()) begins[at(offset)] = true;
  for (Index rank = 0; rank < layout.ranks(); ++rank) {
    for (const Index token : layout.tokens(rank)) {
      if (token != kNoToken) owner[at(token)] = rank;
    }
  }
}

std::string Axis::ruler() const {
  std::string out;
  std::size_t column = 0;
  for (Index t = 0; t < tokens; ++t) {
    const bool edge = t > 0 && begins[at(t)];
    if (cell == 1 && edge) ++column;
    if ((t == 0 || edge) && (out.empty() || out.size() < column)) {
      out.resize(column, ' ');
      out += std::to_string(t);
    }
    column += at(cell);
  }
  return out;
}

std::string Axis::rule() const {
  return line([](Index, const std::string& fill) { return "─" + fill; }, "─", "┼");
}

}  // namespace weft::tool
