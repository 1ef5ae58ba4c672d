// Which keys the queries of each micro-sequence see.
#pragma once

#include <vector>

#include "weft/prepare.h"

namespace weft::prepare {

struct Reach {
  std::vector<Index> first;   // [micros] first key that its queries see; where it begins, if they see none before
  std::vector<Index> end;     // [micros] past the last key that its queries see; where it begins, if they see none
  std::vector<Index> needed;  // [micros] first key that its queries or later ones see
};
Reach reach_of(const MicroSequences& micros, const Problem& problem);

}  // namespace weft::prepare
