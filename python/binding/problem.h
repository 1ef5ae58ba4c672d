// Packings, masks and layouts as Python sees them.
#pragma once

#include <optional>

#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/plan.h"

namespace weft::python {

// Layouts of queries and keys, with what they were made for.
struct PlacedLayouts {
  Packing packing;
  Layouts layouts;
  std::optional<Mask> mask = {};  // which `balanced` and `placed` go by
  bool own_options = false;       // not what its name alone stands for
};

// The mask that `balanced`, `placed` and `auto` go by unless one is given: causal, or full where keys are other
// sequences than queries, since those are mostly seen by every query of theirs.
Mask usual_mask(const Packing& packing);

// All of the problem, rows being tokens.
Plan whole_plan(const Problem& problem);

// A hash of rows and tokens.
class RowHash {
 public:
  void add(Index x) {
    value_ = (value_ ^ static_cast<std::uint64_t>(x)) * 0x9e3779b97f4a7c15u;
    value_ ^= value_ >> 32;
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0x5ca1ab1eu;
};

}  // namespace weft::python
