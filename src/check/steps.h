// One rank's forward and backward over keys that come in steps, by any kernel.
#pragma once

#include <span>
#include <string_view>

#include "weft/attention.h"

namespace weft::check {

inline constexpr std::string_view kReference = "reference";

struct KeyStep {
  ConstTensorView k, v;
  std::span<const Slice> slices;
};

// Reads q and attention of `args` and writes its outputs: at once if there is one step, else through partial states.
// The reference keeps partial states in f64 and, if asked, writes `exact_out` too.
void attend_steps(std::string_view kernel, const ForwardArgs& args, std::span<const KeyStep> steps,
                  const TensorView& exact_out);

// By name; the reference as the f64 function.
void attend_backward_by(std::string_view kernel, const BackwardArgs& args);

}  // namespace weft::check
