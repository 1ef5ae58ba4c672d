// Writes the elements of an SVG picture.
#pragma once

#include <string>
#include <string_view>

namespace weft::draw {

std::string decimal(double value);  // two digits behind the point at most

struct Point {
  double x = 0, y = 0;
};
struct Box {
  double x = 0, y = 0, width = 0, height = 0;
};

class SvgWriter {
 public:
  void box(const Box& box, std::string_view classes, std::string_view title = {});
  void line(Point from, Point to, std::string_view classes);
  void path(std::string_view d, std::string_view classes);
  // Anchored at the start unless a class says otherwise (mid, end).
  void label(Point from, std::string_view text, std::string_view classes, double degrees = 0);
  const std::string& text() const { return out_; }

 private:
  std::string out_;
};

}  // namespace weft::draw
