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
      return "f16";
    case DType::f8_e4m3:
      return "f8_e4m3";
    case DType::f8_e5m2:
      break;
  }
  return "f8_e5m2";
}

DType dtype(std::string_view wanted) {
  for (const DType candidate :
       {DType::f64, DType::f32, DType::bf16, DType::f16, DType::f8_e4m3, DType::f8_e5m2}) {
    if (name(candidate) == wanted) return candidate;
  }
  throw Error(text("no dtype is named '", wanted, "'"), "use one of f64, f32, bf16, f16");
}

}  // namespace weft
