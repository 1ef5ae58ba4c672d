// Random problems over dual_chunk layouts, with pieces long enough that chunks and windows end inside them.
#pragma once

#include <set>

#include "check/cases/random_case.h"

namespace weft::test {

inline check::Side random_side(check::Choices& c, Index sequences, Index multiple) {
  check::Side side;
  Index offset = c.one_in(3) ? c.pick(1, 5) : 0;
  side.cu_seqlens_padded = {offset};
  for (Index i = 0; i < sequences; ++i) {
    const Index padded = multiple * c.pick(0, multiple > 8 ? 3 : 6);
    const Index used = c.one_in(3) ? padded : c.pick(0, padded);
    side.cu_seqlens.push_back(side.cu_seqlens.back() + used);
    side.cu_seqlens_padded.push_back(offset += padded);
  }
  if (c.one_in(3)) side.tokens = offset + c.pick(1, 5);
  return side;
}

inline check::Case dual_chunk_case(unsigned long long seed) {
  check::RandomChoices c(seed);
  check::Case to;
  to.layout = LayoutKind::dual_chunk;
  to.ranks = c.pick(1, 8);
  const Index sequences = c.pick(0, 4);
  to.q = random_side(c, sequences, 2 * to.ranks);
  if (c.one_in(3)) to.k = random_side(c, sequences, c.one_in(2) ? 2 * to.ranks : 3);  // keys need no layout
  to.mask.causal = c.one_in(2);
  if (c.one_in(2)) to.mask.align = Align::bottom_right;
  if (c.one_in(3)) to.mask.left = c.pick(0, 12);
  if (c.one_in(3)) to.mask.right = c.pick(0, 9);
  if (c.one_in(2)) to.mask.chunk = c.one_in(4) ? c.pick(1, 2) : c.pick(1, 14);
  return to;
}

inline check::Case ring_case(unsigned long long seed) {
  check::Case c = dual_chunk_case(seed);
  c.k.reset();
  c.mask.causal = true;
  c.mask.left = -1;
  return c;
}

// Tokens of a piece of each sequence.
inline std::set<Index> piece_of(const Stream& s, Index ranks, Index piece) {
  std::set<Index> out;
  for (Index i = 0; i < s.sequences(); ++i) {
    const Index length = s.padded(i) / (2 * ranks);
    for (Index p = 0; p < length; ++p) out.insert(s.offset(i) + piece * length + p);
  }
  return out;
}

}  // namespace weft::test
