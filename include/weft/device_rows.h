// The pieces of weft/rows.h on a device: cu_seqlens, rows and results lie in its memory, one launch each, nothing waits
// for the host, and every call may be captured. Meanings are those of the functions of the same names there and of
// Layout::shard; see docs/rows.md, "On a device".
//
// Tensors are the device's. The number of rows of a rank is that of the tensor given: rows_for, or Layout::rows().
// Offsets that are wrong are reported as DeviceContext says.
#pragma once

#include <cstdint>

#include "weft/config.h"
#include "weft/device_plan.h"
#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/rows.h"
#include "weft/tensor.h"

namespace weft {

// --- Orders; layouts contiguous, dual_chunk, zigzag and striped ---

WEFT_API void sequence_to_rank_order(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout,
                                     const RowTensor& sequence, const RowTensor& ranks);
WEFT_API void rank_to_sequence_order(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout,
                                     const RowTensor& ranks, const RowTensor& sequence);
// One rank's rows. shard sets rows that hold no token to zero bytes; unshard leaves tokens of other ranks.
WEFT_API void shard(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout, Index rank,
                    const RowTensor& whole, const RowTensor& local);
WEFT_API void unshard(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout, Index rank,
                      const RowTensor& local, const RowTensor& whole);

// --- Valid rows: those that hold a real token ---

// Both tensors in sequence order [tokens], or both a rank's rows. Other rows are left, or set to zero bytes.
enum class OtherRows { leave, zero };
WEFT_API void copy_valid_rows(DeviceContext& context, const DeviceStream& stream, const RowTensor& from,
                              const RowTensor& to, OtherRows others = OtherRows::leave);
WEFT_API void copy_valid_rows(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout,
                              Index rank, const RowTensor& from, const RowTensor& to,
                              OtherRows others = OtherRows::leave);
WEFT_API void valid_rows(DeviceContext& context, const DeviceStream& stream, std::uint8_t* valid);  // [tokens]
WEFT_API void valid_rows(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout, Index rank,
                         Index rows, std::uint8_t* valid);  // [rows]

// --- Ranges of rows: gather (to: packed), scatter (from: packed), or from place to place ---

// Range r is rows [from[r], from[r] + n) to rows [to[r], ...), n = cu[r+1] - cu[r]. Without `from` or `to` that side is
// packed: it begins at row cu[r]. Ranges may not share a row of the destination.
struct DeviceRanges {
  const std::int32_t* cu = nullptr;    // [ranges + 1], from 0
  const std::int32_t* from = nullptr;  // [ranges]
  const std::int32_t* to = nullptr;    // [ranges]
  Index ranges = 0;
  Index rows = 0;  // most rows in all: cu[ranges] may be less
};
WEFT_API void copy_row_ranges(DeviceContext& context, const DeviceRanges& ranges, const RowTensor& from,
                              const RowTensor& to);
// The same, adding: rows of f32 into rows of f32.
WEFT_API void add_row_ranges(DeviceContext& context, const DeviceRanges& ranges, const RowTensor& from,
                             const RowTensor& to);

// --- Rounding ---

// to = from, or to += from, rounded once: f32 to bf16, f16 or f32, the same shape. A NaN stays one, with other bits.
WEFT_API void round_rows(DeviceContext& context, const ConstTensorView& from, const TensorView& to,
                         bool accumulate = false);

// --- Chunks and steps: 32-bit arrays of the caller, in device memory ---

// Arrays have room for `capacity` entries; past the last one offsets stay at the end and lengths are 0, so that a
// kernel can be launched for all of them.
struct DeviceChunks {
  Index capacity = 0;                         // device_chunks_capacity
  std::int32_t* cu_seqlens = nullptr;         // [capacity + 1]
  std::int32_t* cu_seqlens_padded = nullptr;  // [capacity + 1]
  std::int32_t* sequence = nullptr;           // [capacity]; past the last: -1
  std::int32_t* count = nullptr;              // [1]
};
WEFT_API Index device_chunks_capacity(const DeviceStream& stream, Index chunk);
WEFT_API void sequences_to_chunks(DeviceContext& context, const DeviceStream& stream, Index chunk,
                                  const DeviceChunks& out);

// As VarlenStep. Bands without limit are ±kDeviceUnlimited.
struct DeviceStep {
  Index capacity = 0;                                                           // device_step_capacity
  std::int32_t *cu_seqlens_q = nullptr, *cu_seqlens_k = nullptr;                // [capacity + 1]
  std::int32_t *cu_seqlens_q_padded = nullptr, *cu_seqlens_k_padded = nullptr;  // [capacity + 1]
  std::int32_t *seqused_q = nullptr, *seqused_k = nullptr;                      // [capacity]
  std::int32_t *lo = nullptr, *hi = nullptr;                                    // [capacity]
  std::int32_t* sequence = nullptr;                                             // [capacity]; past the last: -1
  std::int32_t* count = nullptr;  // [3] entries, max_seqlen_q, max_seqlen_k
};
struct DeviceStepArgs {
  DeviceStream q = {}, k = {};  // k left as it is: self-attention
  Mask mask = {};
  DeviceLayout layout = {};  // dual_chunk
  Index rank = 0, step = 0;
};
// Entries of a step of either kind that no offsets can exceed: `sequences` without chunks.
WEFT_API Index device_step_capacity(const DeviceStepArgs& args);
WEFT_API void all_gather_step(DeviceContext& context, const DeviceStepArgs& args, const DeviceStep& out);
WEFT_API void ring_step(DeviceContext& context, const DeviceStepArgs& args, const DeviceStep& out);

}  // namespace weft
