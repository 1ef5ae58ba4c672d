// Building blocks of context parallelism for frameworks that bring their own attention kernel: rows from one order to
// another, valid rows, and the cu_seqlens of the steps of all-gather and ring attention over dual_chunk layouts. See
// docs/rows.md.
//
// Names read source_to_destination for copies, and a_rows_of_b for lists: row numbers in a, one for each row of b.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/packing.h"
#include "weft/slice.h"

namespace weft {

// Stands for the row of a token that no row holds.
inline constexpr Index kNoRow = -1;

// --- Sequence order (row = token) and rank order (the buffers of all ranks, concatenated); any layout ---

// Copies all rows from one order to the other. Destination rows that have no source are left as they are: rows of
// `ranks` without a token; rows of `sequence` that no rank holds, before the first offset and past the last sequence.
WEFT_API void sequence_to_rank_order(const Layout& layout, const RowTensor& sequence, const RowTensor& ranks);
WEFT_API void rank_to_sequence_order(const Layout& layout, const RowTensor& ranks, const RowTensor& sequence);
// The same permutation as row numbers.
WEFT_API std::vector<Index> sequence_rows_of_rank_order(const Layout& layout);  // [ranks·rows], or kNoToken
WEFT_API std::vector<Index> rank_rows_of_sequence_order(const Layout& layout);  // [tokens], or kNoRow

// --- Valid rows: 1 where the row holds a real token, 0 for padding and rows that hold none ---

// The valid rows of a stream, and of a rank.
WEFT_API std::vector<std::uint8_t> valid_rows(const Stream& stream);              // [tokens]
WEFT_API std::vector<std::uint8_t> valid_rows(const Layout& layout, Index rank);  // [rows]

// Where sequences lie in one rank's rows, which then are a stream of their own.
struct RankOffsets {
  std::vector<Index> cu_seqlens;         // [n + 1] prefix sums of the rank's real tokens of each sequence, from 0
  std::vector<Index> cu_seqlens_padded;  // [n + 1] the rank's first row of each sequence; the last: rows with a token
};
// Error if the rank's rows are not in the order of their tokens, as those of balanced layouts may be.
WEFT_API RankOffsets cu_seqlens_on_rank(const Layout& layout, Index rank);

// --- Sequences cut at multiples of a chunk's size ---

// Chunks of all sequences. Every sequence has at least one: an empty one if it is empty. Padding goes with the last
// chunk of its sequence.
struct Chunks {
  std::vector<Index> cu_seqlens;         // [n + 1] prefix sums of real lengths, from 0
  std::vector<Index> cu_seqlens_padded;  // [n + 1] where chunks begin in the stream; the last: where sequences end
  std::vector<Index> sequence;           // [n] where each chunk comes from
};
// Cuts each sequence at multiples of `chunk` positions.
WEFT_API Chunks sequences_to_chunks(const Stream& stream, Index chunk);

// --- Steps: one call of a varlen kernel each ---

// One call of a varlen kernel: n entries of query rows x key rows. Entry e has seqused_q[e] queries from row
// cu_seqlens_q_padded[e] of the query buffer on, keys alike; its query a sees its key b (both counted from the entry's
// first) iff lo[e] <= b - a <= hi[e].
// - Each sequence has one entry, or with chunked attention one for each chunk that its queries fall into; one without
//   rows if it has no queries here.
// - Every valid query row of the step lies in exactly one entry, also if it sees no key: a kernel that writes zeros and
//   an LSE of -inf for such rows writes all of them. Padding lies in none.
// - Keys past the last one that an entry's queries may see are cut away, so a causal band ends in the bottom right
//   corner: hi = seqused_k - seqused_q. Keys before the first one seen are not: kernels tile from the first key, and a
//   row's bits should not depend on who computes it. An entry without queries has no keys.
struct VarlenStep {
  std::vector<Index> cu_seqlens_q, cu_seqlens_k;                // [n + 1] prefix sums of seqused: rows when packed
  std::vector<Index> cu_seqlens_q_padded, cu_seqlens_k_padded;  // [n + 1] first rows; the last: where sequences end
  std::vector<Index> seqused_q, seqused_k;                      // [n] rows of each entry
  Index max_seqlen_q = 0, max_seqlen_k = 0;                     // the longest entry
  std::vector<Index> lo, hi;                                    // [n] ±kUnlimited: no limit
  std::vector<Index> sequence;                                  // [n] where each entry comes from

  Index entries() const { return static_cast<Index>(sequence.size()); }
};

// Rank `rank` of a dual_chunk layout attends to keys in sequence order, in two steps: 0 for the queries of piece rank,
// 1 for those of piece 2·ranks-1-rank. Query rows are rows of the rank's whole buffer (both pieces of all sequences),
// key rows are tokens of the key stream. Any mask but the caller's own slices; cross-attention too.
WEFT_API VarlenStep all_gather_step(const Problem& problem, const Layout& q, Index rank, Index step);

// What rank `rank` attends at step `step` of a ring: the keys of rank (rank - step) mod ranks. With a causal mask
//   diagonal  its own keys: all queries, all keys, causal in rows (rows of one sequence keep the order of positions);
//   below     keys of an earlier rank: all queries see the first half of the keys, none the second;
//   above     keys of a later rank: the second half of the queries sees all keys, the first half none.
struct RingTile {
  enum Kind { diagonal, below, above } kind = diagonal;
  Index keys_rank = 0;
};
// The tile of one step.
WEFT_API RingTile ring_tile(Index ranks, Index rank, Index step);

// The tile as a step, for causal self-attention over a dual_chunk layout, chunked or not. Query rows are rows of
// rank's buffer, key rows those of keys_rank's; halves are read where they lie. Error for a window: it would need a row
// in two entries.
WEFT_API VarlenStep ring_step(const Problem& problem, const Layout& layout, Index rank, Index step);

// The step as slices for Weft's own kernels. Entries without visible pairs are left out.
WEFT_API std::vector<Slice> slices(const VarlenStep& step);

// --- A step's valid query rows (output, gradients) and the rank's rows ---

// Copy those rows. `step_offsets` [n + 1] says where entries begin in `step_rows`: step.cu_seqlens_q if it is packed,
// and step.cu_seqlens_q_padded if it has the rank's shape. All other rows of the destination are left as they are.
WEFT_API void step_to_rank_rows(const VarlenStep& step, const RowTensor& step_rows, std::span<const Index> step_offsets,
                                const RowTensor& rank_rows);
WEFT_API void rank_to_step_rows(const VarlenStep& step, const RowTensor& rank_rows, const RowTensor& step_rows,
                                std::span<const Index> step_offsets);
WEFT_API std::vector<Index> rank_rows_of_packed_step(const VarlenStep& step);  // [cu_seqlens_q.back()]

}  // namespace weft
