// Inputs that are hard on arithmetic, for `weft verify --accuracy`.
#pragma once

#include <string>
#include <vector>

#include "check/tensors.h"
#include "weft/slice.h"

namespace weft::tool {

// One slice in which every query sees every key. Two query heads share one K/V head.
struct HardCase {
  static constexpr Index kHeads = 2, kHeadsK = 1, kDim = 32;

  std::string name;
  Index queries = 48, keys = 80;
  double scale = 0.17677669529663687;  // 1 / sqrt(kDim)
  bool plain = false;                  // no result is small beside its terms: norms have limits too
  // Values of q, k, v and dout before they are rounded to a dtype.
  std::vector<double> q = {}, k = {}, v = {}, dout = {};

  std::vector<Slice> slices() const { return {{.q_begin = 0, .q_end = queries, .k_begin = 0, .k_end = keys}}; }
};

// `quick`: the long rows have 8,192 keys instead of 131,072.
std::vector<HardCase> hard_cases(bool quick);

}  // namespace weft::tool
