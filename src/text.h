// Error messages are put together here, so that the core needs no formatting library.
#pragma once

#include <sstream>
#include <string>

namespace weft {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  out.exceptions(std::ios_base::badbit);  // without memory a stream would leave words out and say nothing
  (out << ... << parts);
  return out.str();
}

}  // namespace weft
