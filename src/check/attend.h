// The whole chain in small: tensors sharded by the layout, each rank's slices attended by the reference kernel, results
// brought together and compared with a dense softmax over all tokens.
#pragma once

#include <string>
#include <vector>

#include "check/case.h"

namespace weft::check {

struct Measure {
  std::string tensor;  // out, lse, max_logit, dq, dk, dv, dsink
  double worst = 0;    // largest |difference| over the bound for that element; 1 or more is a failure
  double norm = 0;     // relative norm of the difference
  std::string where;   // of the worst element: "token 5, head 1, 3"
};

struct AttendReport {
  std::string keys;  // how keys reached the ranks: sequence order, rank order, ring
  std::vector<Measure> measures;
  bool ok() const;
};

// One report for each way keys can reach the ranks. Random tensors from the case's seed; padding is NaN.
std::vector<AttendReport> check_attention(const Case& c);

}  // namespace weft::check
