// Row maps: for each row of a launch its row in the source and in the destination.
#pragma once

#include "plan/cuda/context.h"
#include "plan/cuda/divide.h"
#include "plan/cuda/search.h"
#include "plan/device_runs.h"
#include "plan/offset_faults.h"

namespace weft {

struct RowPair {
  static constexpr int kNothing = -1, kZeros = -2;  // values of `from`

  int from, to;
};

// A map is evaluated by all lanes of a warp together. `Known` is what it reads once, for all rows.

// Maps rows of one or more ranks' buffers, or of the whole stream, to tokens.
struct TokenMap {
  OffsetsView stream;
  RegularRuns::Cut cut;
  bool sequence_order;
  FastDivisor ranks, rows;  // rows of each rank
  int first_rank;           // the buffers are those of ranks first_rank, first_rank + 1, ...
  int members;              // how many of them
  Index multiple;
  bool real_only;  // padding does not count as a token

  struct Known {
    int begin, dealt, probe;
  };
  __device__ Offsets32 offsets() const { return {stream.padded, stream.wide}; }
  __device__ Known known() const {
    const int first = probe(offsets(), 0, static_cast<int>(stream.sequences));
    const Range extent = valid_extent(stream.extent(), stream.tokens);
    return {static_cast<int>(extent.begin), static_cast<int>(extent.size()), first};
  }
  __device__ Found sequence_at(const Known& known, int token) const {
    return last_at_or_before(offsets(), static_cast<int>(stream.sequences), known.probe, token);
  }
  // n tokens / ranks. Anything will do for a number that wrong offsets made negative.
  __device__ int share(int n) const { return static_cast<int>(ranks.divide(static_cast<unsigned>(n))); }
  // Tokens in a piece of the stream.
  __device__ int piece(int dealt) const {
    if (dealt == 0) return 0;
    return cut == RegularRuns::pieces ? share(dealt - 1) + 1 : share(dealt - 1) / 2 + 1;
  }

  // -1 where the row holds no token.
  __device__ int token(const Known& known, int row) const {
    const int begin = known.begin, dealt = known.dealt;
    if (stream.sequences == 0) return -1;
    const int member = sequence_order ? 0 : static_cast<int>(rows.divide(static_cast<unsigned>(row)));
    const int r = row - member * static_cast<int>(rows.divisor);
    // 64 bits, because pieces of the last ranks may begin past the tokens and past 31 bits.
    const Index rank = first_rank + member, opposite = 2 * Index{ranks.divisor} - 1 - rank;
    Index token = -1;
    Found found{-1, 0, 0};
    if (sequence_order) {
      token = row;
    } else if (cut == RegularRuns::pieces) {
      if (r < piece(dealt)) token = begin + rank * piece(dealt) + r;
    } else if (cut == RegularRuns::folded) {
      const Index piece = this->piece(dealt);
      if (r < 2 * piece) token = begin + (r < piece ? rank * piece + r : opposite * piece + r - piece);
    } else if (cut == RegularRuns::strided) {
      token = begin + rank + Index{r} * ranks.divisor;
    } else {
      // Sequences keep their order within a rank, which has 1 / ranks of each sequence's rows.
      const int held = share(dealt);
      found = sequence_at(known, begin + min(r, max(0, held - 1)) * static_cast<int>(ranks.divisor));
      const int piece = share(found.end - found.begin) / 2, at = r - share(found.begin - begin);
      if (r < held && at >= 0 && at < 2 * Index{piece})
        token = found.begin + (at < piece ? rank * piece + at : opposite * piece + at - piece);
    }
    if (token < begin || token >= Index{begin} + dealt) token = -1;
    if (!real_only) return static_cast<int>(token);
    if (found.index < 0) found = sequence_at(known, token < 0 ? begin : static_cast<int>(token));
    const Index used = stream.cu == stream.padded
                           ? Index{found.end} - found.begin
                           : stream.at(stream.cu, found.index + 1) - stream.at(stream.cu, found.index);
    return token - found.begin < used ? static_cast<int>(token) : -1;
  }

  // The inverse, in the rows of the buffers at hand: -1 for tokens that none of them holds.
  __device__ int row(const Known& known, int token) const {
    if (stream.sequences == 0) return -1;
    const int at = token - known.begin, n = static_cast<int>(ranks.divisor);
    int rank = -1, r = -1;
    const auto fold = [&](int within, int piece) {
      if (within < 0 || piece <= 0) return;
      const int i = within / piece;
      rank = i < n ? i : 2 * n - 1 - i;
      r = within - i * piece + (i < n ? 0 : piece);
    };
    if (cut == RegularRuns::pieces) {
      const int piece = max(1, this->piece(known.dealt));
      rank = at / piece;
      r = at - rank * piece;
    } else if (cut == RegularRuns::folded) {
      fold(at, piece(known.dealt));
    } else if (cut == RegularRuns::strided) {
      r = share(at);
      rank = at - r * n;
    } else {
      const Found found = sequence_at(known, token);
      fold(token - found.begin, share(found.end - found.begin) / 2);
      r += share(found.begin - known.begin);
    }
    const int member = rank - first_rank;
    if (at < 0 || at >= known.dealt || rank < 0 || r < 0 || r >= static_cast<int>(rows.divisor)) return -1;
    return member < 0 || member >= members ? -1 : member * static_cast<int>(rows.divisor) + r;
  }

  // Each thread of the launch checks some of the sequences.
  __device__ void check(const Reporter& reporter) const {
    const Index threads = static_cast<Index>(gridDim.x) * blockDim.x;
    const Index thread = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (Index i = thread; i < stream.sequences; i += threads) {
      const OffsetFault fault = find_offset_fault(stream, i, multiple);
      if (fault.code != OffsetFault::none) reporter.report(fault);
    }
    if (thread != 0 || sequence_order) return;
    const RunsSpec spec{cut, false, stream.tokens, ranks.divisor, rows.divisor, {0, 1, 1}};
    const Index needed = spec.rows_needed(valid_extent(stream.extent(), stream.tokens).size());
    if (needed > spec.rows) reporter.report({OffsetFault::few_rows, 0, 0, needed, spec.rows});
  }
};

// Between the ranks' rows and the whole stream, or between two buffers of the same rows.
struct OrderMap {
  enum Kind {
    to_rows,    // for each row of the ranks its token
    to_tokens,  // the same rows, the other way
    to_stream,  // for each token its row in the buffers at hand
    same_rows
  };

  TokenMap tokens;
  Kind kind;
  bool zero;  // destination rows without a token become zeros; only where the launch has a row for each of them

  using Known = TokenMap::Known;
  __device__ Known known() const { return tokens.known(); }
  __device__ RowPair at(const Known& known, int row) const {
    const int none = zero ? RowPair::kZeros : RowPair::kNothing;
    if (kind == to_stream) {
      const int source = tokens.row(known, row);
      return {source < 0 ? none : source, row};
    }
    const int token = tokens.token(known, row);
    if (token < 0) return {none, row};
    return {kind == to_rows ? token : row, kind == to_tokens ? token : row};
  }
  __device__ void check(const Reporter& reporter) const { tokens.check(reporter); }
};

// Ranges of rows; the launch has a row for each row of all ranges together.
struct RangeMap {
  const std::int32_t *cu, *from, *to;
  int ranges;

  struct Known {
    int total, probe;
  };
  __device__ Known known() const { return {cu[ranges], probe({cu, false}, 0, ranges)}; }
  __device__ RowPair at(const Known& known, int row) const {
    const Found found = last_at_or_before({cu, false}, ranges, known.probe, min(row, known.total - 1));
    if (row >= known.total) return {RowPair::kNothing, 0};
    const int i = found.index, within = row - found.begin;
    if (within < 0) return {RowPair::kNothing, 0};
    const Index source = from == nullptr ? row : Index{from[i]} + within;
    const Index place = to == nullptr ? row : Index{to[i]} + within;
    if (source < 0 || source > kMaxTokens || place < 0 || place > kMaxTokens) return {RowPair::kNothing, 0};
    return {static_cast<int>(source), static_cast<int>(place)};
  }
  __device__ void check(const Reporter& reporter) const {
    const Index threads = Index{gridDim.x} * blockDim.x;
    for (Index i = Index{blockIdx.x} * blockDim.x + threadIdx.x; i < ranges; i += threads) {
      if (cu[i] < 0) reporter.report({OffsetFault::negative, 0, i, cu[i], 0});
      if (cu[i + 1] < cu[i]) reporter.report({OffsetFault::falling, 0, i, cu[i + 1], cu[i]});
    }
  }
};

}  // namespace weft
