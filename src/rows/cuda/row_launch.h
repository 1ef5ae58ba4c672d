// Which kernel copies rows, and how they are distributed over warps.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cuda/launch.h"
#include "rows/cuda/row_bulk.h"
#include "rows/row_tensor.h"

namespace weft {

// The widest unit that divides all addresses and sizes.
inline int unit_of(const RowTensor& a, const RowTensor& b) {
  unsigned long long bits = 16;
  for (const RowTensor* t : {&a, &b})
    bits |= reinterpret_cast<std::uintptr_t>(t->data) | static_cast<unsigned long long>(t->row_bytes) |
            static_cast<unsigned long long>(t->row_stride) | static_cast<unsigned long long>(t->outer_stride);
  return static_cast<int>(bits & ~(bits - 1));
}

// `rows` of the launch, up to `task_bytes` per task.
inline RowCopy row_copy(const detail::ContextData& context, Index rows, const RowTensor& from, const RowTensor& to,
                        Index task_bytes) {
  const int unit = unit_of(from, to);
  const Index units = to.row_bytes / unit, width = min_of(units, max_of(1, task_bytes / unit));
  RowCopy copy{.from = RowsView(from),
               .to = RowsView(to),
               .rows = static_cast<int>(rows),
               .rows_per_warp = static_cast<int>(std::clamp<Index>(task_bytes / to.row_bytes, 1, 32)),
               .units = static_cast<int>(units),
               .parts = static_cast<int>(ceil_div(units, width)),
               .tasks = 0,
               .width = FastDivisor(static_cast<unsigned>(width)),
               .reporter = context.reporter()};
  const Index tasks = ceil_div(rows, copy.rows_per_warp) * copy.parts;
  if (tasks >= kMaxTokens)
    throw Error(text(rows, " rows of ", to.row_bytes, " bytes are too many for one launch"), "copy them in parts");
  copy.tasks = static_cast<unsigned>(tasks);
  return copy;
}

// The tensors have been checked.
template <class Op, class Map>
void launch_copy(const detail::ContextData& context, const Map& map, Index rows, const RowTensor& from,
                 const RowTensor& to) {
  if (rows == 0) return;
  const int unit = unit_of(from, to);
  if (std::is_same_v<Op, Replace> && context.has_bulk_copy && unit == 16 && to.row_bytes >= BulkCopy::kMinBytes) {
    const RowCopy copy = row_copy(context, rows, from, to, BulkCopy::kTileBytes);
    return cuda::launch(copy_rows_in_bulk<Map>,
                        {.blocks = dim3(copy.tasks), .threads = dim3(32), .shared_bytes = BulkCopy::kSharedBytes},
                        context.stream(), copy, map);
  }
  const RowCopy copy = row_copy(context, rows, from, to, RowCopy::kBytesPerWarp);
  const cuda::Shape shape{.blocks = dim3(static_cast<unsigned>(ceil_div(copy.tasks, RowCopy::kThreads / 32))),
                          .threads = dim3(RowCopy::kThreads)};
  const auto go = [&]<class Unit>(Unit) {
    if constexpr (requires(Unit u) { Op::store(&u, u); })
      cuda::launch(copy_rows_by<Unit, Op, Map>, shape, context.stream(), copy, map);
  };
  switch (unit) {
    case 16:
      return go(uint4{});
    case 8:
      return go(uint2{});
    case 4:
      return go(0u);
    case 2:
      return go(static_cast<unsigned short>(0));
    default:
      return go(static_cast<unsigned char>(0));
  }
}

}  // namespace weft
