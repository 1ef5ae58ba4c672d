// The whole chain in small: tensors sharded by the layout, each rank's slices attended by a kernel, results brought
// together and compared with a dense softmax over all tokens.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "check/case.h"
#include "check/steps.h"

namespace weft::check {

struct Measure {
  std::string tensor;  // out, lse, max_logit, dq, dk, dv, dsink
  double worst = 0;    // largest |difference| over what is allowed for that element; 1 or more is a failure
  double norm = 0;     // relative norm of the difference
  std::string where;   // of the worst element: "token 5, head 1, 3"
};

struct AttendReport {
  std::string keys;  // how keys reached the ranks: sequence order, rank order, ring
  std::vector<Measure> measures;
  bool ok() const;
};

// Why the kernel cannot do the case, forward, in partial steps or backward; none if it can. Error if there is no such
// kernel.
std::optional<std::string> refusal(const Case& c, std::string_view kernel);

// One report for each way keys can reach the ranks. Random tensors from the case's seed; padding is NaN. The reference
// is held to f64, its partial steps and gradients too; other kernels to what their arithmetic explains (judge.h).
std::vector<AttendReport> check_attention(const Case& c, std::string_view kernel = kReference);

}  // namespace weft::check
