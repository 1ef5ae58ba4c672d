// Problems by which a kernel's costs are learned, and others by which they are checked.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "check/step_calls.h"
#include "weft/slice.h"

namespace weft::tool {

struct KernelCase {
  std::string name;
  std::vector<Slice> slices;
  Index q_rows = 0, k_rows = 0, heads_q = 1, heads_k = 1;
  Index dim = 0;                               // 0: any
  std::optional<check::StepCalls> steps = {};  // calls by which it is done; none: one, of all slices
};

KernelCase documents_case(std::string name, const std::vector<Index>& lengths, Index heads_q, Index heads_k,
                          bool causal, Index window);
// Rank `rank` of `ranks`, layout dual_chunk, keys in sequence order.
KernelCase rank_case(std::string name, const std::vector<Index>& lengths, Index heads_q, Index heads_k, Index rank,
                     Index ranks);
std::vector<KernelCase> learned_cases(bool gpu);  // small and large, dense and sparse: rates are fitted to these
std::vector<KernelCase> anchor_cases();           // others, of the size of a GPU's work, each of a width
std::vector<KernelCase> ring_cases();             // three of these ranks, by the calls of a ring

}  // namespace weft::tool
