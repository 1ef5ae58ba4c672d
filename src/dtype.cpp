#include "weft/dtype.h"

#include "text.h"
#include "weft/error.h"

namespace weft {

std::string_view name(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "f64";
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      break;
  }
  return "f16";
}

DType dtype(std::string_view wanted) {
  for (const DType candidate : kDTypes) {
    if (name(candidate) == wanted) return candidate;
  }
  throw Error(text("no dtype is named '", wanted, "'"), "use one of f64, f32, bf16, f16");
}

}  // namespace weft
