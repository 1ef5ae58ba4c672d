// Error, and text() for its messages: the core needs no formatting library.
#pragma once

#include <sstream>
#include <string>

#include "weft/error.h"

namespace weft {

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  out.exceptions(std::ios_base::badbit);  // without memory a stream would leave words out and say nothing
  (out << ... << parts);
  return out.str();
}

}  // namespace weft
