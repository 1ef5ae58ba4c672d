// A small reader of JSON for machine files: the library needs no JSON library, and a file that is too large, too deep
// or wrong is refused with the line.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weft::cost {

struct Json {
  enum class Kind { null, boolean, number, string, array, object };
  Kind kind = Kind::null;
  bool flag = false;
  double number = 0;
  std::string string = {};
  std::vector<Json> items = {};
  std::vector<std::pair<std::string, Json>> members = {};
  int line = 1;
};

// Error that names `file` and the line.
Json parse_json(std::string_view json, std::string_view file);
// With quotes, and everything escaped that has to be.
std::string quoted(std::string_view string);

}  // namespace weft::cost
