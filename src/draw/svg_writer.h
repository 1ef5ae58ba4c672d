// Writes the shapes of an SVG picture: those of one class are one path, labels of one class one group, so that files
// are small. What lies over what is a matter of the classes: backgrounds, then shapes, then edges, then labels.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace weft::draw {

std::string decimal(double value, int digits = 1);  // so many digits behind the point at most

struct Point {
  double x = 0, y = 0;
};
struct Box {
  double x = 0, y = 0, width = 0, height = 0;
};
std::string path_of(const Box& box);

class SvgWriter {
 public:
  void box(const Box& box, const std::string& classes, std::string_view title = {});
  void line(Point from, Point to);
  void path(std::string_view d, const std::string& classes);
  // Anchored at the start unless a class says otherwise (mid, end).
  void label(Point from, std::string_view text, const std::string& classes, double degrees = 0);
  std::string text() const;

 private:
  std::map<std::pair<int, std::string>, std::string> paths_;  // by what they lie over, and class
  std::map<std::string, std::string> titled_, labels_;        // by class
};

}  // namespace weft::draw
