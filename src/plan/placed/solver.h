// Which ranks each sequence goes to: knows rows and seconds, nothing of masks and tokens.
#pragma once

#include <span>
#include <vector>

#include "weft/placed.h"

namespace weft::detail {

// A sequence to be placed.
struct SequenceWork {
  Index rows = 0;      // query tokens, padding included
  Index keys = 0;      // key tokens, which lie where the queries do
  Index reach = 0;     // keys that a run of queries sees beside its own, at most
  double seconds = 0;  // of all its queries
};

// Some of a sequence's query tokens, counted from its first.
struct Piece {
  Index rank = 0, begin = 0, count = 0;
};

struct Solution {
  std::vector<std::vector<Piece>> pieces;  // by sequence, in the order of tokens
  std::vector<PlacedSequence::Why> why;
  double seconds = 0;
};

// `options.capacity` is set, and all ranks together hold all rows.
Solution solve_placed(std::span<const SequenceWork> sequences, Index ranks, const PlacedOptions& options);

}  // namespace weft::detail
