// Plans in device memory: made there in one launch from cu_seqlens in device memory, without the host, or made on the
// host and uploaded. See docs/concepts.md, "On a device".
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "weft/device.h"
#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/plan.h"
#include "weft/slice.h"

namespace weft {

// --- Problems with offsets in device memory ---

// The integer type of offsets.
enum class OffsetType { i32, i64 };

// One side's stream, as weft::Stream on the host. Sizes are capacities, so that a captured graph can be replayed on
// other offsets: repeat the last offset for fewer sequences, and end before `tokens` for fewer tokens.
struct DeviceStream {
  const void* cu_seqlens = nullptr;         // [sequences + 1] prefix sums of real lengths
  const void* cu_seqlens_padded = nullptr;  // [sequences + 1] where sequences begin; null: as cu_seqlens
  OffsetType type = OffsetType::i32;        // of both arrays
  Index sequences = 0;
  Index tokens = 0;  // rows of the buffer; those past the last offset belong to no sequence and to no rank

  friend bool operator==(const DeviceStream&, const DeviceStream&) = default;
};

// The rows of one buffer, as RunList describes them on the host.
struct DeviceRuns {
  LayoutKind kind = LayoutKind::contiguous;
  Index ranks = 1;
  Index rows = 0;  // of each rank's buffer; 0: rows_for
  RunList::Members members = {0, 1, 1};
  bool sequence_order = false;  // row = token; the other fields are ignored
};

// How a stream is distributed over ranks: contiguous, dual_chunk, zigzag or striped, by the same arithmetic as Layout.
// What depends on the offsets is computed on the device; the caller fixes the number of rows.
struct DeviceLayout {
  LayoutKind kind = LayoutKind::contiguous;
  Index ranks = 1;
  Index rows = 0;  // of each rank's buffer; 0: rows_for(kind, tokens, ranks)

  DeviceRuns runs(Index rank) const { return {kind, ranks, rows, {rank, 1, 1}}; }
  DeviceRuns rank_order() const { return {kind, ranks, rows, {0, ranks, 1}}; }
  DeviceRuns rank_order(RunList::Members members) const { return {kind, ranks, rows, members}; }
  static DeviceRuns sequence_order() { return {.sequence_order = true}; }
};
// The rows of a rank that suffice for any offsets within `tokens`; equals Layout::rows() if sequences fill all of them.
WEFT_API Index rows_for(LayoutKind kind, Index tokens, Index ranks);

// The arguments of a device plan, as those of make_plan(problem, q_runs, k_runs).
struct DevicePlanArgs {
  DeviceStream q = {}, k = {};  // default k: self-attention
  Mask mask = {};               // without own slices
  DeviceRuns q_runs = {}, k_runs = {};
};

// The number of slices that no offsets can exceed. Error for what only the host can plan (balanced, explicit, own
// slices), for sides whose strides differ, and for sizes that do not fit in 32 bits.
WEFT_API Index device_plan_capacity(const DevicePlanArgs& args);
// The most slices that can contain one query row, and one key row.
WEFT_API Index device_slices_per_row(const DevicePlanArgs& args);
WEFT_API Index device_slices_per_key(const DevicePlanArgs& args);

// --- Slices in device memory ---

// A bound without limit. No two rows are more than 2^31 - 2 apart, so larger bounds saturate here and mean the same.
inline constexpr std::int32_t kDeviceUnlimited = 0x7fffffff;

// A Slice in 32 bits. lo = -kDeviceUnlimited and hi = kDeviceUnlimited mean no limit; sums with them need 64 bits.
struct alignas(8) DeviceSlice {
  std::int32_t q_begin, q_end, k_begin, k_end, lo, hi;

  friend bool operator==(const DeviceSlice&, const DeviceSlice&) = default;
};
static_assert(sizeof(DeviceSlice) == 24);

// A bound, and a slice, in 32 bits.
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

// The slices of a plan as kernels take them. All pointers are device pointers; only the device knows the number of
// slices.
struct DeviceSlices {
  const DeviceSlice* slices = nullptr;  // [capacity]
  const std::int32_t* count = nullptr;  // [1], at most capacity
  Index capacity = 0;
  Index q_rows = 0, k_rows = 0;  // of the two buffers
};

// --- A stream's context, and faults that the device reports ---

namespace detail {
struct ContextData;
struct DevicePlanData;
}  // namespace detail

// Counters that launches share, and a page of host memory where the device reports invalid offsets. Create it outside
// of a capture, use it on one stream at a time, and keep it until its work is done.
//
// Invalid offsets (negative, decreasing, more used than padded, past the tokens, not a multiple of 2·ranks), or more
// entries than fit, touch nothing out of bounds: plans and steps get count 0, and row kernels skip what they cannot
// place. The next call with the same context throws the Error, which names the sequence and the values.
class WEFT_API DeviceContext {
 public:
  explicit DeviceContext(const Place& place);
  ~DeviceContext();
  DeviceContext(DeviceContext&&) noexcept;
  DeviceContext& operator=(DeviceContext&&) noexcept;

  const Place& place() const;
  // Throws a fault that completed work has reported, once. Does not wait: synchronize the stream first to be sure.
  void check();

  detail::ContextData& data() { return *data_; }  // internal

 private:
  std::unique_ptr<detail::ContextData> data_;
};

// A list of slices in device memory, refilled at the same addresses; kernels take it as ForwardArgs::device_plan. A
// graph that was captured with an uploaded plan has room for plans with as many slices per row as that plan had; more
// are a fault. cuda.sm90 keeps room for as many documents as an uploaded plan can have, its capacity: up to the sums of
// a tile, 64 rows of dQ in f32, for each in a backward. After plan() these are as many as DeviceStream::sequences
// allows. So give no more than are needed.
class WEFT_API DevicePlan {
 public:
  // The context must outlive the plan. Create it outside of a capture.
  DevicePlan(DeviceContext& context, Index capacity);
  ~DevicePlan();
  DevicePlan(DevicePlan&&) noexcept;
  DevicePlan& operator=(DevicePlan&&) noexcept;

  // Plans on the device, in one launch that can be captured. Slices are in the order of make_plan.
  void plan(const DevicePlanArgs& args);
  // Uploads a plan made on the host, from a copy, without waiting. Error while a graph is captured, which would replay
  // this copy, and if there are more slices than the capacity.
  void upload(const Plan& plan);

  const Place& place() const;  // of the context
  DeviceSlices slices() const;
  std::vector<Slice> download() const;  // for tests; synchronizes the stream

  detail::DevicePlanData& data() { return *data_; }  // internal

 private:
  std::unique_ptr<detail::DevicePlanData> data_;
};

}  // namespace weft
