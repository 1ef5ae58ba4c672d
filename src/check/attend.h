// One kernel on every rank's slices, without an executor: tensors are sharded by the layout, results gathered and
// compared with a dense softmax over all tokens.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "check/cases/case.h"
#include "check/oracle.h"
#include "weft/attention.h"

namespace weft::check {

inline constexpr std::string_view kReference = "reference";

// Why the kernel cannot do the case, forward, in partial steps or backward; none if it can. Error if there is no such
// kernel.
std::optional<std::string> refusal(const Case& c, std::string_view kernel);

// One report for each way keys can reach the ranks. Random tensors from the case's seed; padding is NaN. The reference
// is held to f64, its partial steps and gradients too; other kernels to what their arithmetic explains (judge.h). With
// `some`, so many rows and as many keys are compared (Oracle).
std::vector<AttendReport> check_attention(const Case& c, std::string_view kernel = kReference,
                                          std::optional<Index> some = {});

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
