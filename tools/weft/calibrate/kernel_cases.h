// The problems that kernels are timed on: some that a kernel's costs are fitted to, others that check the fit, and the
// named cases of `weft bench` on a GPU.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "check/cases/trees.h"
#include "check/step_calls.h"
#include "weft/layout.h"
#include "weft/slice.h"

namespace weft::tool {

// What one rank attends.
struct CaseSpec {
  std::vector<Index> lengths;
  Index heads_q = 32, heads_k = 8;
  bool causal = true;
  Index window = -1;  // keys to the left of the diagonal; -1: unlimited
  LayoutKind layout = LayoutKind::contiguous;
  Index rank = 0, ranks = 1;
  bool rank_order = false;                       // keys in rank order (many small slices), not in sequence order
  std::optional<ScheduleOptions> schedule = {};  // one call a step of it, without its moves; none: one call
  std::optional<check::TreeShape> tree = {};     // instead of the documents' mask: the document is a tree of branches
};

Mask mask_of(const CaseSpec& spec);

struct KernelCase {
  std::string name;
  std::vector<Slice> slices;
  Index q_rows = 0, k_rows = 0, heads_q = 1, heads_k = 1;
  Index dim = 0;                               // 0: any
  std::optional<check::StepCalls> steps = {};  // with CaseSpec::schedule
  CaseSpec spec = {};
};
KernelCase make_case(std::string name, const CaseSpec& spec);

std::vector<KernelCase> learned_cases(bool gpu);  // costs are fitted to these
std::vector<KernelCase> anchor_cases();           // fits are checked by these, each at one head width

// A case of `weft bench --kernel cuda.*`.
struct GpuCase {
  std::string name;
  std::string anchor;  // its name among anchor_cases(); empty: it is none of them
  CaseSpec spec;
  Index dim = 128, dim_v = 0;  // dim_v 0: dim
  double softcap = 0;
  bool v_is_k = false;  // V is the first columns of K

  Index width_v() const { return dim_v > 0 ? dim_v : dim; }
};
const std::vector<GpuCase>& gpu_cases();

}  // namespace weft::tool
