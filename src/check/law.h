// The law: over all ranks, every visible (query, key) pair lies in exactly one slice and no other pair lies in any.
// Checked by brute force against the definition of mask and layouts, which is written per pair and per token.
#pragma once

#include <optional>
#include <string>

#include "check/cases/case.h"

namespace weft::check {

struct LawReport {
  std::optional<std::string> violation;  // which arrangement of keys, which pair or row, and how often it was covered
  bool planned = true;                   // false: the sides differ in stride, only layouts were checked
  bool nontrivial = false;               // several ranks, and a pair whose query and key lie on different ones
  Index pairs = 0;                       // visible pairs of the problem
  Index slices = 0;                      // of all ranks, keys in rank order
};

// Time and memory grow with query tokens x key tokens. Throws weft::Error if the case itself is bad.
LawReport check_law(const Case& c);

}  // namespace weft::check
