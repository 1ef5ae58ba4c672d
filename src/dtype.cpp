#include "weft/dtype.h"

#include "text.h"

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

void detail::refuse_dtype(DType dtype) {
  throw Error(text("dtype ", name(dtype), " needs a scale for every block, which no kernel here keeps"), "use bf16");
}

DType dtype(std::string_view wanted) {
  for (const DType candidate : kDTypes) {
    if (name(candidate) == wanted) return candidate;
  }
  for (const DType refused : {DType::f8_e4m3, DType::f8_e5m2}) {
    if (name(refused) == wanted) detail::refuse_dtype(refused);
  }
  throw Error(text("no dtype is named '", wanted, "'"), "use one of f64, f32, bf16, f16");
}

}  // namespace weft
