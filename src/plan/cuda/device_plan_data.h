// What a DevicePlan holds.
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
  Index per_row = 0, per_key = 0;  // slices that no query row, and no key row, lies in more of
  Pinned<DeviceSlice> aside;       // [capacity + 1]: the count, then an upload's slices on their way
  std::optional<cuda::PooledEvent> uploaded;

  DevicePlanData(ContextData& of, Index size)
      : context(&of), capacity(size), slices(at(max_of(1, size)), of.stream()), count(1, of.stream()) {
    WEFT_CUDA(cudaMemsetAsync(count.get(), 0, sizeof(std::int32_t), of.stream()));
  }
  DevicePlanData(const DevicePlanData&) = delete;
};

}  // namespace weft::detail
