// Which row goes where: for each row of a launch its row in the source and in the destination.
#pragma once

#include "plan/cuda/context.h"
#include "plan/cuda/search.h"
#include "plan/device_runs.h"
#include "plan/faults.h"

namespace weft {

struct RowPair {
  static constexpr int kNothing = -1, kZeros = -2;  // as `from`

  int from, to;
};

// A map is asked by all lanes of a warp together. `Known` is what it reads once, for all rows.

// Rows of one or more ranks' buffers, or of the whole stream, as tokens.
struct TokenMap {
  OffsetsView stream;
  RegularRuns::Cut cut;
  bool sequence_order;
  int ranks, first_rank, rows;  // rows of each rank; ranks first_rank, first_rank + 1, ...
  Index multiple;
  bool real_only;  // padding counts as no token

  struct Known {
    int begin, dealt;
  };
  __device__ Known known() const {
    const Range extent = sane(stream.extent(), stream.tokens);
    return {static_cast<int>(extent.begin), static_cast<int>(extent.size())};
  }

  // kNoToken where the row holds none.
  __device__ int token(const Known& extent, int row) const {
    const int begin = extent.begin, dealt = extent.dealt;
    const int n = static_cast<int>(stream.sequences);
    if (n == 0) return -1;
    const Offsets32 offsets{stream.padded, stream.wide};
    const int member = sequence_order ? 0 : row / rows, r = sequence_order ? row : row - member * rows;
    const int rank = first_rank + member;
    Index token = -1;  // 64 bits: pieces of the last ranks may begin past the tokens, and past 31 bits
    int sequence = -1;
    const Index r64 = r, rank64 = rank, opposite = 2 * Index{ranks} - 1 - rank;
    if (sequence_order) {
      token = row;
    } else if (cut == RegularRuns::pieces) {
      const int piece = static_cast<int>((Index{dealt} + ranks - 1) / ranks);
      if (r < piece) token = begin + rank64 * piece + r;
    } else if (cut == RegularRuns::folded) {
      const int piece = static_cast<int>((Index{dealt} + 2 * ranks - 1) / (2 * ranks));
      if (r < 2 * Index{piece}) token = begin + (r < piece ? rank64 * piece + r : opposite * piece + r - piece);
    } else if (cut == RegularRuns::strided) {
      token = begin + rank + r64 * ranks;
    } else {
      // Sequences keep their order within a rank, and each has a rank's share of its rows.
      const int held = dealt / ranks;
      const Found found = last_at_or_before(offsets, n, begin + (r < held ? r : max(0, held - 1)) * ranks);
      sequence = found.index;
      const int from = found.begin;
      const int piece = (found.end - from) / (2 * ranks), at = r - (from - begin) / ranks;
      if (r < held && at >= 0 && at < 2 * piece)
        token = from + (at < piece ? rank64 * piece + at : opposite * piece + at - piece);
    }
    if (token < begin || token >= Index{begin} + dealt) token = -1;
    if (!real_only) return static_cast<int>(token);
    if (sequence < 0) sequence = last_at_or_before(offsets, n, token < 0 ? begin : static_cast<int>(token)).index;
    const Index used = stream.at(stream.cu, sequence + 1) - stream.at(stream.cu, sequence);
    return token - offsets[sequence] < used ? static_cast<int>(token) : -1;
  }

  // Each thread of the launch looks at some of the sequences.
  __device__ void check(const Reporter& reporter) const {
    const Index threads = static_cast<Index>(gridDim.x) * blockDim.x;
    const Index thread = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (Index i = thread; i < stream.sequences; i += threads) {
      const Fault fault = find_fault(stream, i, multiple);
      if (fault.code != Fault::none) reporter.report(fault);
    }
    if (thread != 0 || sequence_order) return;
    const RunsSpec spec{cut, false, stream.tokens, ranks, rows, {0, 1, 1}};
    const Index needed = spec.rows_needed(sane(stream.extent(), stream.tokens).size());
    if (needed > rows) reporter.report({Fault::few_rows, 0, 0, needed, rows});
  }
};

// Between the ranks' rows and the whole stream, or between two buffers of the same rows.
struct OrderMap {
  enum Kind { to_rows, to_tokens, same_rows };

  TokenMap tokens;
  Kind kind;
  bool zero;  // destination rows without a token become zeros; not for to_tokens

  using Known = TokenMap::Known;
  __device__ Known known() const { return tokens.known(); }
  __device__ RowPair at(const Known& extent, int row) const {
    const int token = tokens.token(extent, row);
    if (token < 0) return {zero ? RowPair::kZeros : RowPair::kNothing, row};
    return {kind == to_rows ? token : row, kind == to_tokens ? token : row};
  }
  __device__ void check(const Reporter& reporter) const { tokens.check(reporter); }
};

// Ranges of rows; the launch has a row for each row of all ranges together.
struct RangeMap {
  const std::int32_t *cu, *from, *to;
  int ranges;

  using Known = int;
  __device__ Known known() const { return cu[ranges]; }
  __device__ RowPair at(Known total, int row) const {
    const int i = last_at_or_before({cu, false}, ranges, min(row, total - 1)).index;
    if (row >= total || i < 0) return {RowPair::kNothing, 0};
    const int within = row - cu[i];
    if (within < 0) return {RowPair::kNothing, 0};
    const Index source = from == nullptr ? row : Index{from[i]} + within;
    const Index place = to == nullptr ? row : Index{to[i]} + within;
    if (source < 0 || source > kMaxTokens || place < 0 || place > kMaxTokens) return {RowPair::kNothing, 0};
    return {static_cast<int>(source), static_cast<int>(place)};
  }
  __device__ void check(const Reporter& reporter) const {
    const int threads = static_cast<int>(gridDim.x * blockDim.x);
    for (int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); i < ranges; i += threads) {
      if (cu[i] < 0) reporter.report({Fault::negative, 0, i, cu[i], 0});
      if (cu[i + 1] < cu[i]) reporter.report({Fault::falling, 0, i, cu[i + 1], cu[i]});
    }
  }
};

}  // namespace weft
