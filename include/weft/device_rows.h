// The functions of weft/rows.h on a device: cu_seqlens, rows and results are in its memory; each is one launch that
// does not wait for the host and can be captured. They mean what the functions of the same names do there, and
// Layout::shard; see docs/rows.md, "On a device".
//
// Tensors are in device memory. A rank has as many rows as the tensor given: rows_for, or Layout::rows(). Invalid
// offsets are reported as DeviceContext describes.
#pragma once

#include <cstdint>

#include "weft/device_plan.h"
#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/rows.h"
#include "weft/tensor.h"

namespace weft {

// What happens to rows of the destination that nothing is copied to: they are left as they are, or set to zero bytes.
enum class OtherRows { leave, zero };

// --- Orders; layouts contiguous, dual_chunk, zigzag and striped ---

// Copies rows from sequence order to rank order, or back.
WEFT_API void sequence_to_rank_order(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout,
                                     const RowTensor& sequence, const RowTensor& ranks,
                                     OtherRows others = OtherRows::leave);
WEFT_API void rank_to_sequence_order(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout,
                                     const RowTensor& ranks, const RowTensor& sequence,
                                     OtherRows others = OtherRows::leave);
// One rank's rows. shard sets rows that hold no token to zero bytes; unshard leaves other ranks' tokens as they are,
// unless told otherwise.
WEFT_API void shard(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout, Index rank,
                    const RowTensor& whole, const RowTensor& local);
WEFT_API void unshard(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout, Index rank,
                      const RowTensor& local, const RowTensor& whole, OtherRows others = OtherRows::leave);

// Writes the token of each of a rank's rows, as Layout::tokens: -1 where a row holds none.
WEFT_API void partition_indices(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout,
                                Index rank, Index rows, std::int32_t* tokens);  // [rows]
// Where the stream's sequences begin in a rank's rows, and prefix sums of the real ones. Zeros if offsets are invalid.
struct DeviceRankOffsets {
  std::int32_t* cu_seqlens = nullptr;         // [sequences + 1]
  std::int32_t* cu_seqlens_padded = nullptr;  // [sequences + 1]
};
// Writes them, in one launch.
WEFT_API void cu_seqlens_on_rank(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout,
                                 Index rank, const DeviceRankOffsets& out);

// --- Valid rows: those that hold a real token ---

// Copies valid rows. Both tensors are in sequence order [tokens], or both hold the rows of one rank.
WEFT_API void copy_valid_rows(DeviceContext& context, const DeviceStream& stream, const RowTensor& from,
                              const RowTensor& to, OtherRows others = OtherRows::leave);
WEFT_API void copy_valid_rows(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout,
                              Index rank, const RowTensor& from, const RowTensor& to,
                              OtherRows others = OtherRows::leave);
// Writes 1 for valid rows and 0 for others.
WEFT_API void valid_rows(DeviceContext& context, const DeviceStream& stream, std::uint8_t* valid);  // [tokens]
WEFT_API void valid_rows(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout, Index rank,
                         Index rows, std::uint8_t* valid);  // [rows]

// --- Ranges of rows: gather (to: packed), scatter (from: packed), or from place to place ---

// Ranges of rows to copy: range r copies rows [from[r], from[r] + n) to rows [to[r], to[r] + n), n = cu[r+1] - cu[r].
// Without `from` or `to` that side is packed and begins at row cu[r]. Ranges must not share a row of the destination.
struct DeviceRanges {
  const std::int32_t* cu = nullptr;    // [ranges + 1], from 0
  const std::int32_t* from = nullptr;  // [ranges]
  const std::int32_t* to = nullptr;    // [ranges]
  Index ranges = 0;
  Index rows = 0;  // the most rows of all ranges together: cu[ranges] may be less
};
// Copies ranges of rows.
WEFT_API void copy_row_ranges(DeviceContext& context, const DeviceRanges& ranges, const RowTensor& from,
                              const RowTensor& to);
// The same for f32 rows, adding to the destination.
WEFT_API void add_row_ranges(DeviceContext& context, const DeviceRanges& ranges, const RowTensor& from,
                             const RowTensor& to);

// --- Rounding ---

// Rounds f32 rows once, to bf16, f16 or f32 of the same shape: to = from, or to += from. NaN stays NaN, with other
// bits.
WEFT_API void round_rows(DeviceContext& context, const ConstTensorView& from, const TensorView& to,
                         bool accumulate = false);

// --- Chunks and steps: 32-bit arrays of the caller, in device memory ---

// Chunks of sequences. Arrays have room for `capacity` entries; past the last one offsets stay at the end and lengths
// are 0, so that a kernel can be launched for all of them.
struct DeviceChunks {
  Index capacity = 0;                         // at least device_chunks_capacity
  std::int32_t* cu_seqlens = nullptr;         // [capacity + 1]
  std::int32_t* cu_seqlens_padded = nullptr;  // [capacity + 1]
  std::int32_t* sequence = nullptr;           // [capacity]; past the last: -1
  std::int32_t* count = nullptr;              // [1]
};
// The number of chunks that no offsets can exceed.
WEFT_API Index device_chunks_capacity(const DeviceStream& stream, Index chunk);
// Cuts each sequence into chunks of `chunk` tokens.
WEFT_API void sequences_to_chunks(DeviceContext& context, const DeviceStream& stream, Index chunk,
                                  const DeviceChunks& out);

// A step as VarlenStep describes it. Unlimited bounds are ±kDeviceUnlimited.
struct DeviceStep {
  Index capacity = 0;                                                           // at least device_step_capacity
  std::int32_t *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;                // [capacity + 1]
  std::int32_t *cu_seqlens_q_padded = nullptr, *cu_seqlens_k_padded = nullptr;  // [capacity + 1]
  std::int32_t *seqused_q = nullptr, *seqused_k = nullptr;                      // [capacity]
  std::int32_t *lo = nullptr, *hi = nullptr;                                    // [capacity]
  std::int32_t* sequence = nullptr;                                             // [capacity]; past the last: -1
  std::int32_t* count = nullptr;  // [3] entries, max_seqlen_q, max_seqlen_k
};
// The arguments of a step.
struct DeviceStepArgs {
  DeviceStream q = {}, k = {};  // default k: self-attention
  Mask mask = {};
  DeviceLayout layout = {};  // dual_chunk
  Index rank = 0, step = 0;
};
// The number of entries of a step of either kind that no offsets can exceed: `sequences` without chunks.
WEFT_API Index device_step_capacity(const DeviceStepArgs& args);
// The entries of one step of all_gather, and of ring.
WEFT_API void all_gather_step(DeviceContext& context, const DeviceStepArgs& args, const DeviceStep& out);
WEFT_API void ring_step(DeviceContext& context, const DeviceStepArgs& args, const DeviceStep& out);

}  // namespace weft
