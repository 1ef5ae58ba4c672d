#include "draw/svg_writer.h"

#include <array>
#include <cstdio>

#include "draw/formatting.h"
#include "index.h"
#include "text.h"

namespace weft::draw {

std::string decimal(double value) {
  std::array<char, 64> buffer{};
  const int size = std::snprintf(buffer.data(), buffer.size(), "%.2f", value);
  std::string out(buffer.data(), at(size));
  out.erase(out.find_last_not_of('0') + 1);
  if (out.back() == '.') out.pop_back();
  return out == "-0" ? "0" : out;
}

void SvgWriter::box(const Box& b, std::string_view classes, std::string_view title) {
  out_ += weft::text("<rect class=\"", classes, "\" x=\"", decimal(b.x), "\" y=\"", decimal(b.y), "\" width=\"",
                     decimal(b.width), "\" height=\"", decimal(b.height), "\"");
  out_ += title.empty() ? "/>\n" : weft::text("><title>", escaped(title), "</title></rect>\n");
}

void SvgWriter::line(Point from, Point to, std::string_view classes) {
  out_ += weft::text("<line class=\"", classes, "\" x1=\"", decimal(from.x), "\" y1=\"", decimal(from.y), "\" x2=\"",
                     decimal(to.x), "\" y2=\"", decimal(to.y), "\"/>\n");
}

void SvgWriter::path(std::string_view d, std::string_view classes) {
  out_ += weft::text("<path class=\"", classes, "\" d=\"", d, "\"/>\n");
}

void SvgWriter::label(Point from, std::string_view said, std::string_view classes, double degrees) {
  const std::string turn = degrees == 0 ? ""
                                        : weft::text(" transform=\"rotate(", decimal(degrees), " ", decimal(from.x),
                                                     " ", decimal(from.y), ")\"");
  out_ += weft::text("<text class=\"", classes, "\" x=\"", decimal(from.x), "\" y=\"", decimal(from.y), "\"", turn, ">",
                     escaped(said), "</text>\n");
}

}  // namespace weft::draw
