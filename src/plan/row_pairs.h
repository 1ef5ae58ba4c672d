// Visible pairs of any range of query tokens, however many slices it lies in.
#pragma once

#include <span>
#include <vector>

#include "weft/slice.h"

namespace weft {

// How many keys the query tokens see, summed up. Along the tokens a slice's number of keys rises by one a token, stays,
// or falls, so that all slices together make a few pieces each: made once in time near-linear in the slices, asked in a
// logarithm. Nested slices, as trees have them, would make a sum over the slices of every range quadratic.
class RowPairs {
 public:
  explicit RowPairs(std::span<const Slice> slices);

  Index of(Range tokens) const { return before(tokens.end) - before(tokens.begin); }

 private:
  // Tokens begin, begin + 1, ... up to the next piece see keys, keys + slope, ... keys.
  struct Piece {
    Index begin, keys, slope, before;  // before: pairs of all tokens before it
    Index pairs(Index tokens) const { return tokens * keys + slope * (tokens * (tokens - 1) / 2); }
  };

  Index before(Index token) const;

  std::vector<Piece> pieces_;
};

}  // namespace weft
