// Plans in device memory: made there from cu_seqlens that lie there, in one launch and without a word from the host, or
// made on the host and uploaded. See docs/concepts.md, "On a device".
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "weft/config.h"
#include "weft/device.h"
#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/plan.h"
#include "weft/slice.h"

namespace weft {

// --- What is asked, with offsets in device memory ---

enum class OffsetType { i32, i64 };

// One side's stream, as Stream has it. Sizes are capacities, so that a captured graph can be replayed on other offsets:
// fewer sequences are said by repeating the last offset, fewer tokens by a last offset before `tokens`.
struct DeviceStream {
  const void* cu_seqlens = nullptr;         // [sequences + 1] prefix sums of real lengths
  const void* cu_seqlens_padded = nullptr;  // [sequences + 1] where sequences begin; null: as cu_seqlens
  OffsetType type = OffsetType::i32;        // of both arrays
  Index sequences = 0;
  Index tokens = 0;  // rows of the buffer; those past the last offset belong to no sequence and to no rank

  friend bool operator==(const DeviceStream&, const DeviceStream&) = default;
};

// The rows of one buffer, as RunList has them.
struct DeviceRuns {
  LayoutKind kind = LayoutKind::contiguous;
  Index ranks = 1;
  Index rows = 0;  // of each rank's buffer; 0: rows_for
  RunList::Members members = {0, 1, 1};
  bool sequence_order = false;  // row = token; the rest is not looked at
};

// How a stream is dealt out: contiguous, dual_chunk, zigzag or striped, by the same arithmetic as Layout. What depends
// on the offsets is found on the device; the number of rows is fixed by the caller.
struct DeviceLayout {
  LayoutKind kind = LayoutKind::contiguous;
  Index ranks = 1;
  Index rows = 0;  // of each rank's buffer; 0: rows_for(kind, tokens, ranks)

  DeviceRuns runs(Index rank) const { return {kind, ranks, rows, {rank, 1, 1}}; }
  DeviceRuns rank_order() const { return {kind, ranks, rows, {0, ranks, 1}}; }
  DeviceRuns rank_order(RunList::Members members) const { return {kind, ranks, rows, members}; }
  static DeviceRuns sequence_order() { return {.sequence_order = true}; }
};
// Rows of a rank that are enough for any offsets within `tokens`; Layout::rows() if sequences fill all of them.
WEFT_API Index rows_for(LayoutKind kind, Index tokens, Index ranks);

// As make_plan(problem, q_runs, k_runs).
struct DevicePlanArgs {
  DeviceStream q = {}, k = {};  // k left as it is: self-attention
  Mask mask = {};               // not the caller's own slices
  DeviceRuns q_runs = {}, k_runs = {};
};

// Slices that no offsets can exceed. Error for what is planned on the host alone (balanced, explicit, own slices), for
// sides whose strides differ, and for sizes that 32 bits cannot hold.
WEFT_API Index device_plan_capacity(const DevicePlanArgs& args);
// Slices that no query row, and no key row, can lie in more of.
WEFT_API Index device_slices_per_row(const DevicePlanArgs& args);
WEFT_API Index device_slices_per_key(const DevicePlanArgs& args);

// --- Slices in device memory ---

// A band without limit. No two rows are further apart than 2^31 - 2, so bounds beyond saturate here and mean the same.
inline constexpr std::int32_t kDeviceUnlimited = 0x7fffffff;

// As Slice, in 32 bits: lo = -kDeviceUnlimited and hi = kDeviceUnlimited are no limit. Sums with them need 64 bits.
struct alignas(8) DeviceSlice {
  std::int32_t q_begin, q_end, k_begin, k_end, lo, hi;

  friend bool operator==(const DeviceSlice&, const DeviceSlice&) = default;
};
static_assert(sizeof(DeviceSlice) == 24);

WEFT_HD constexpr std::int32_t device_bound(Index bound) {
  constexpr Index kTop = kDeviceUnlimited;
  return static_cast<std::int32_t>(max_of(-kTop, min_of(kTop, bound)));
}
WEFT_HD constexpr DeviceSlice device_slice(const Slice& s) {
  return {static_cast<std::int32_t>(s.q_begin),
          static_cast<std::int32_t>(s.q_end),
          static_cast<std::int32_t>(s.k_begin),
          static_cast<std::int32_t>(s.k_end),
          device_bound(s.lo),
          device_bound(s.hi)};
}

// What kernels take. All pointers are the device's; the number of slices is known there alone.
struct DeviceSlices {
  const DeviceSlice* slices = nullptr;  // [capacity]
  const std::int32_t* count = nullptr;  // [1], at most capacity
  Index capacity = 0;
  Index q_rows = 0, k_rows = 0;  // of the two buffers
};

// --- One stream's scratch, and what the device found wrong ---

namespace detail {
struct ContextData;
struct DevicePlanData;
}  // namespace detail

// Counters that launches share, and a page of host memory where the device says what is wrong with its offsets. Make it
// outside of a capture; use it on one stream at a time; it outlives the work.
//
// Offsets that are wrong (negative, falling, more used than padded, past the tokens, not a multiple of 2·ranks) or more
// than fit touch nothing out of bounds: plans and steps get count 0, row kernels leave out what they cannot place. The
// next call with the same context throws the Error, which names sequence and values.
class WEFT_API DeviceContext {
 public:
  explicit DeviceContext(const Place& place);
  ~DeviceContext();
  DeviceContext(DeviceContext&&) noexcept;
  DeviceContext& operator=(DeviceContext&&) noexcept;

  const Place& place() const;
  // Throws what work that has ended reported, once. Waits for nothing: synchronize the stream first to be sure.
  void check();

  detail::ContextData& data() { return *data_; }  // for Weft's own code

 private:
  std::unique_ptr<detail::ContextData> data_;
};

// A list of slices in device memory, filled again and again at the same addresses; kernels take it as
// ForwardArgs::device_plan. A graph that holds kernels of an uploaded plan has room for plans with as many slices over
// a row as that one: more are a fault.
class WEFT_API DevicePlan {
 public:
  // The context must outlive the plan. Make it outside of a capture.
  DevicePlan(DeviceContext& context, Index capacity);
  ~DevicePlan();
  DevicePlan(DevicePlan&&) noexcept;
  DevicePlan& operator=(DevicePlan&&) noexcept;

  // One launch; may be captured. Slices come in the order of make_plan.
  void plan(const DevicePlanArgs& args);
  // Any plan made on the host. Copies it aside and returns; refused while a graph is captured, which would replay the
  // copy of today. Error if it has more slices than the capacity.
  void upload(const Plan& plan);

  const Place& place() const;  // the context's
  DeviceSlices slices() const;
  std::vector<Slice> download() const;  // waits for the stream; for tests

  detail::DevicePlanData& data() { return *data_; }  // for Weft's own code

 private:
  std::unique_ptr<detail::DevicePlanData> data_;
};

}  // namespace weft
