// Faults of offsets in device memory: found on the device, reported on the host.
#pragma once

#include <cstdint>

#include "weft/device_plan.h"
#include "weft/error.h"
#include "weft/slice.h"

namespace weft {

struct OffsetFault {
  enum Code : int {
    none,
    negative,         // cu_seqlens[sequence] = a
    falling,          // cu_seqlens[sequence + 1] = a after b
    padded_negative,  // cu_seqlens_padded[sequence] = a
    padded_falling,   // cu_seqlens_padded[sequence + 1] = a after b
    too_long,         // a used tokens in b rows
    past_tokens,      // ends at a of b tokens
    not_multiple,     // padded length a, multiple b
    few_rows,         // a rows a rank needed, b given
    few_slices,       // a slices, entries or tiles, room for b
  };
  int code = none;
  int keys = 0;  // 1: on the key side
  Index sequence = 0;
  Index a = 0, b = 0;
};

// One side's offsets in device memory.
struct OffsetsView {
  const void* cu;
  const void* padded;  // may be `cu`
  bool wide;           // 64-bit
  Index sequences, tokens;

  WEFT_HD Index at(const void* array, Index i) const {
    return wide ? static_cast<const std::int64_t*>(array)[i] : static_cast<const std::int32_t*>(array)[i];
  }
  WEFT_HD Index offset(Index i) const { return at(padded, i); }
  WEFT_HD Range extent() const { return {offset(0), offset(sequences)}; }
};

inline OffsetsView offsets_view(const DeviceStream& s) {
  return {s.cu_seqlens, s.cu_seqlens_padded == nullptr ? s.cu_seqlens : s.cu_seqlens_padded, s.type == OffsetType::i64,
          s.sequences, s.tokens};
}

// The extent, or an empty one if it is none that valid offsets can have: then nothing is dealt out.
WEFT_HD inline Range valid_extent(Range extent, Index tokens) {
  return 0 <= extent.begin && extent.begin <= extent.end && extent.end <= tokens ? extent : Range{};
}

// The first fault of sequence i. Values are compared before they are subtracted, so that nothing overflows. If there is
// no fault, [offset(i), offset(i+1)) lies in [0, tokens).
WEFT_HD inline OffsetFault find_offset_fault(const OffsetsView& s, Index i, Index multiple) {
  const Index cu = s.at(s.cu, i), cu_end = s.at(s.cu, i + 1), begin = s.offset(i), end = s.offset(i + 1);
  if (cu < 0) return {OffsetFault::negative, 0, i, cu, 0};
  if (cu_end < cu) return {OffsetFault::falling, 0, i, cu_end, cu};
  if (begin < 0) return {OffsetFault::padded_negative, 0, i, begin, 0};
  if (end < begin) return {OffsetFault::padded_falling, 0, i, end, begin};
  if (cu_end - cu > end - begin) return {OffsetFault::too_long, 0, i, cu_end - cu, end - begin};
  if (end > s.tokens) return {OffsetFault::past_tokens, 0, i, end, s.tokens};
  if (multiple > 1 && (end - begin) % multiple != 0) return {OffsetFault::not_multiple, 0, i, end - begin, multiple};
  return {};
}

Error error_of(const OffsetFault& fault);

}  // namespace weft
