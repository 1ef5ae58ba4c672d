#include "draw/svg_writer.h"

#include <array>
#include <cstdio>

#include "draw/formatting.h"
#include "index.h"
#include "text.h"

namespace weft::draw {
namespace {

int depth_of(const std::string& classes) {
  if (classes == "empty" || classes == "soft" || classes == "wait") return 0;
  return classes == "padding" || classes == "edge" || classes == "frame" ? 2 : 1;
}

std::string group(const std::string& classes, const std::string& inside) {
  return weft::text("<g class=\"", classes, "\">", inside, "</g>\n");
}

}  // namespace

std::string decimal(double value, int digits) {
  std::array<char, 64> buffer{};
  const int size = std::snprintf(buffer.data(), buffer.size(), "%.*f", digits, value);
  std::string out(buffer.data(), at(size));
  out.erase(out.find_last_not_of('0') + 1);
  if (out.back() == '.') out.pop_back();
  return out == "-0" ? "0" : out;
}

std::string path_of(const Box& b) {
  const std::string width = decimal(b.width);
  return weft::text("M", decimal(b.x), " ", decimal(b.y), "h", width, "v", decimal(b.height), "h-", width, "z");
}

void SvgWriter::box(const Box& b, const std::string& classes, std::string_view title) {
  if (title.empty())
    path(path_of(b), classes);
  else
    titled_[classes] += weft::text("<path d=\"", path_of(b), "\"><title>", escaped(title), "</title></path>");
}

void SvgWriter::line(Point from, Point to) {
  path(weft::text("M", decimal(from.x), " ", decimal(from.y), "L", decimal(to.x), " ", decimal(to.y)), "edge");
}

void SvgWriter::path(std::string_view d, const std::string& classes) { paths_[{depth_of(classes), classes}] += d; }

void SvgWriter::label(Point from, std::string_view said, const std::string& classes, double degrees) {
  const std::string x = decimal(from.x), y = decimal(from.y);
  const std::string turn =
      degrees == 0 ? "" : weft::text(" transform=\"rotate(", decimal(degrees), " ", x, " ", y, ")\"");
  labels_[classes] += weft::text("<text x=\"", x, "\" y=\"", y, "\"", turn, ">", escaped(said), "</text>");
}

std::string SvgWriter::text() const {
  std::string out;
  for (const auto& [where, d] : paths_) out += weft::text("<path class=\"", where.second, "\" d=\"", d, "\"/>\n");
  for (const auto* groups : {&titled_, &labels_})
    for (const auto& [classes, inside] : *groups) out += group(classes, inside);
  return out;
}

}  // namespace weft::draw
