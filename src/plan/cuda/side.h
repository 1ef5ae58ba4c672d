// One side's offsets in shared memory, in the planner's form, for a tile of sequences.
#pragma once

#include "plan/cuda/scan.h"
#include "plan/device_runs.h"
#include "plan/offset_faults.h"

namespace weft {

template <int kSequences>
struct SharedSide {
  Index offsets[kSequences + 1];
  Index used[kSequences];
  Index begin, end;  // of all sequences

  __device__ Range extent() const { return {begin, end}; }
};

// Each thread loads and checks one sequence; `ok` becomes false for those that cannot be planned.
template <int kSequences>
__device__ void load_side(SharedSide<kSequences>& to, bool* ok, const OffsetsView& from, Index multiple, int keys,
                          ScanState* state, int first, int count) {
  const int t = static_cast<int>(threadIdx.x);
  if (t < count) {
    OffsetFault fault = find_offset_fault(from, first + t, multiple);
    fault.keys = keys;
    if (fault.code != OffsetFault::none) note_fault(state, fault);
    if (fault.code != OffsetFault::none) ok[t] = false;
    to.offsets[t] = from.offset(first + t);
    to.used[t] = from.at(from.cu, first + t + 1) - from.at(from.cu, first + t);
    // The end of each is the beginning of the next; only the last needs its own.
    if (t == count - 1) to.offsets[count] = from.offset(first + count);
  }
  if (t == kScanThreads - 1) {
    const Range extent = valid_extent(from.extent(), from.tokens);
    to.begin = extent.begin;
    to.end = extent.end;
  }
}

}  // namespace weft
