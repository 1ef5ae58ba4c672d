// Products of sizes that a caller gave: past what memory can be, they are refused instead of wrapping around.
#pragma once

#include <initializer_list>
#include <string_view>

#include "text.h"
#include "weft/config.h"

namespace weft {

inline constexpr Index kMaxBytes = Index{1} << 60;

// The product of sizes of at least 0; Error in the name of `what` if it is past kMaxBytes.
inline Index checked_product(std::string_view what, std::initializer_list<Index> sizes) {
  Index product = 1;
  for (const Index size : sizes)
    if (size == 0) return 0;
  for (const Index size : sizes) {
    if (size >= 0 && size <= kMaxBytes / product) {
      product *= size;
      continue;
    }
    std::string all;
    for (const Index each : sizes) all += text(all.empty() ? "" : " x ", each);
    throw Error(text(what, ": ", all, " bytes are past what memory can be"), "give smaller sizes");
  }
  return product;
}

}  // namespace weft
