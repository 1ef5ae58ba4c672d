#include <cuda_runtime_api.h>

#include "cuda/runtime.h"
#include "kernel/cuda/portable/params.h"
#include "kernel/cuda/sm90/aligned_copy.h"
#include "text.h"

namespace weft::cuda::sm90 {
namespace {

// Looked up by name at run time, so that nothing links with the driver.
auto encode_function() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    WEFT_CUDA(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    if (found == nullptr || result != cudaDriverEntryPointSuccess)
      throw Error("the CUDA driver has no cuTensorMapEncodeTiled", "bring the driver to CUDA 12 or later");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return function;
}

}  // namespace

CUtensorMap tensor_map(const ConstTensorView& view, int box_heads, int box_rows) {
  const Index size = size_of(view.dtype);
  // A stride that is never used must be valid all the same.
  const auto bytes = [&](Index count, Index stride) {
    return static_cast<cuuint64_t>(count <= 1 ? 16 : stride * size);
  };
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(view.dim), static_cast<cuuint64_t>(view.heads),
                               static_cast<cuuint64_t>(view.rows)};
  const cuuint64_t strides[2] = {bytes(view.heads, view.head_stride), bytes(view.rows, view.row_stride)};
  const cuuint32_t box[3] = {64, static_cast<cuuint32_t>(box_heads), static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode_function()(
      &map, select_16bit(view.dtype, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16), 3,
      const_cast<void*>(view.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw Error(text("cuTensorMapEncodeTiled: the CUDA driver describes no tensor of ", view.rows, " rows (",
                     strides[1], " bytes apart), ", view.heads, " heads (", strides[0], " bytes apart) and ", view.dim,
                     " columns: error ", static_cast<int>(result)),
                "use kernel cuda.portable");
  return map;
}

}  // namespace weft::cuda::sm90
