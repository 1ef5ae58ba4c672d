// What a comparison of computed tensors with the dense answer says.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace weft::check {

struct Measure {
  std::string tensor;  // out, lse, max_logit, dq, dk, dv, dsink
  double worst = 0;    // largest |difference| over what is allowed for that element; 1 or more is a failure
  double norm = 0;     // relative norm of the difference
  std::string where;   // of the worst element: "token 5, head 1, 3"
};

struct AttendReport {
  std::string keys;  // how keys reached the ranks: sequence order, rank order, ring, or a schedule
  std::vector<Measure> measures;
  std::optional<std::string> fault = {};  // what is wrong beside the numbers
  std::string flags = {};                 // beside the case's: what gives this way again

  bool ok() const {
    return !fault && std::all_of(measures.begin(), measures.end(), [](const Measure& m) { return m.worst < 1; });
  }
};

}  // namespace weft::check
