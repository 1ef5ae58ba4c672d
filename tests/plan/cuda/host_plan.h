// The host's plan for buffers of a device: with as many rows a rank as those have.
#pragma once

#include <variant>
#include <vector>

#include "index.h"
#include "plan/cut.h"
#include "plan/layout_data.h"
#include "weft/plan.h"

namespace weft {

// make_plan with key buffers of `k_rows` rows a rank.
inline std::vector<Slice> host_plan(const Problem& p, const RunList& q, const RunList& k, Index k_rows) {
  RegularRuns k_runs = std::get<RegularRuns>(k.source().runs);
  if (!k.in_sequence_order()) k_runs.rows = k_rows;
  const SequencePlanner planner{view(p.packing().q()),
                                view(p.packing().k()),
                                view(p.mask()),
                                std::get<RegularRuns>(q.source().runs),
                                k_runs,
                                q.stride(),
                                k.in_sequence_order()};
  std::vector<Slice> out;
  for (Index i = 0; i < p.packing().sequences(); ++i) {
    out.resize(out.size() + at(planner.count(i)));
    planner.emit(i, out.data() + out.size() - at(planner.count(i)));
  }
  return out;
}

}  // namespace weft
