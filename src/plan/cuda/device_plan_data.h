// The members of a DevicePlan.
#pragma once

#include <optional>

#include "cuda/handle_pool.h"
#include "index.h"
#include "plan/cuda/context.h"

namespace weft::detail {

struct DevicePlanData {
  ContextData* context;
  Index capacity;
  cuda::StreamArray<DeviceSlice> slices;
  cuda::StreamArray<std::int32_t> count;
  Index q_rows = 0, k_rows = 0;
  Index per_row = 0, per_key = 0;  // the most slices that contain one query row, and one key row
  Index query_ranges = 0;          // the most ranges of query rows that slices connect
  Pinned<DeviceSlice> staging;     // pinned [capacity + 1]: the count, then the slices of an upload in flight
  std::optional<cuda::PooledEvent> uploaded;

  DevicePlanData(ContextData& of, Index size)
      : context(&of), capacity(size), slices(at(max_of(1, size)), of.stream()), count(1, of.stream()) {
    WEFT_CUDA(cudaMemsetAsync(count.get(), 0, sizeof(std::int32_t), of.stream()));
  }
  DevicePlanData(const DevicePlanData&) = delete;
};

}  // namespace weft::detail
