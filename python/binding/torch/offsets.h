// cu_seqlens as tensors, on a CPU or a GPU.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "index.h"
#include "tensor.h"
#include "text.h"
#include "weft/device_plan.h"
#include "weft/error.h"
#include "weft/packing.h"

namespace weft::python {

// One side's cu_seqlens, both of one integer type, one-dimensional and contiguous: weft.torch has seen to that.
struct Offsets {
  Array cu;
  std::optional<Array> padded;
  std::optional<Index> tokens;  // none: as many as the offsets say

  Index sequences() const { return cu.shape.front() - 1; }
  Stream on_cpu() const {
    const std::vector<Index> real = numbers(cu), begins = padded ? numbers(*padded) : std::vector<Index>{};
    return Stream::from_cu_seqlens({.cu_seqlens = real, .cu_seqlens_padded = begins, .tokens = tokens});
  }
  DeviceStream on_gpu() const {
    return {.cu_seqlens = cu.data,
            .cu_seqlens_padded = padded ? padded->data : nullptr,
            .type = cu.item_bytes == 4 ? OffsetType::i32 : OffsetType::i64,
            .sequences = sequences(),
            .tokens = tokens.value_or(kMaxTokens)};
  }

 private:
  static std::vector<Index> numbers(const Array& a) {
    std::vector<Index> out(at(a.shape.front()));
    for (std::size_t i = 0; i < out.size(); ++i)
      out[i] =
          a.item_bytes == 4 ? static_cast<const std::int32_t*>(a.data)[i] : static_cast<const std::int64_t*>(a.data)[i];
    return out;
  }
};

inline Offsets offsets_of(const Array& cu, const std::optional<Array>& padded, std::optional<Index> tokens) {
  const auto check = [&](const Array& a, std::string_view name) {
    if (a.floating || (a.item_bytes != 4 && a.item_bytes != 8) || a.shape.size() != 1 || a.shape.front() < 1 ||
        (a.shape.front() > 1 && a.strides.front() != 1) || a.item_bytes != cu.item_bytes || a.shape != cu.shape)
      throw Error(text(name, " are no offsets, or not of cu_seqlens' shape and type"),
                  "give [sequences + 1] numbers of int32 or int64, contiguous");
  };
  check(cu, "cu_seqlens");
  if (padded) check(*padded, "cu_seqlens_padded");
  return {cu, padded, tokens};
}

}  // namespace weft::python
