// How many of one rank's rows lie before a token: host and device.
#pragma once

#include "plan/device_runs.h"
#include "rows/steps.h"

namespace weft {

// One rank's rows of a stream that is dealt out in the regular ways.
struct RankRows {
  RunsSpec spec;
  Index rank;
  Range dealt;  // the tokens of all sequences

  // Rows before `token`, which lies in the sequence [begin, end) or at its end.
  WEFT_HD Index before(Index token, Range sequence) const {
    const Index at = token - dealt.begin, piece = spec.piece(dealt.size()), opposite = 2 * spec.ranks - 1 - rank;
    if (spec.cut == RegularRuns::pieces) return clamp_to(at - rank * piece, 0, piece);
    if (spec.cut == RegularRuns::folded)
      return clamp_to(at - rank * piece, 0, piece) + clamp_to(at - opposite * piece, 0, piece);
    if (spec.cut == RegularRuns::strided) return at <= rank ? 0 : ceil_div(at - rank, spec.ranks);
    const SequenceFold fold{spec.ranks, rank, sequence.size() / (2 * spec.ranks)};
    return (sequence.begin - dealt.begin) / spec.ranks + fold.rows_before(token - sequence.begin);
  }
};

}  // namespace weft
