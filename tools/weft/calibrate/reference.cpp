#include "calibrate/reference.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "calibrate/kernel_cases.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

constexpr std::string_view kSmall = "full 1 x 256, heads 4:1", kUsual = "zigzag, rank 5 of 8";

const KernelCase& learned(std::string_view name) {
  static const std::vector<KernelCase> cases = learned_cases(false);
  const auto found = std::find_if(cases.begin(), cases.end(), [&](const KernelCase& c) { return c.name == name; });
  if (found == cases.end()) throw Error("no reference call", "report this");
  return *found;
}

CallOptions options_of(Pass pass, DType dtype, Index dim) {
  return {.kernel = "cpu", .pass = pass, .dtype = dtype, .dim = dim, .dim_v = dim};
}

}  // namespace

double reference_seconds() {
  static thread_local Noise none;
  static thread_local KernelCall call(learned(kSmall), options_of(Pass::forward, DType::f32, 64), none);
  call.call();  // what the last work has driven from the caches comes back
  return call.call();
}

ReferenceCalls::ReferenceCalls(DType dtype, Index dim)
    : forward_(learned(kUsual), options_of(Pass::forward, dtype, dim), none_),
      backward_(learned(kUsual), options_of(Pass::backward, dtype, dim), none_) {}

double ReferenceCalls::usual_seconds(const KernelTimes& times, DType dtype, Index dim) {
  const auto seconds = [&](Pass pass) { return times.seconds(std::string(kUsual), dtype, dim, pass); };
  return seconds(Pass::forward) + seconds(Pass::backward);
}

}  // namespace weft::tool
