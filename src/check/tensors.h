// Tensors for checks: contiguous, random in the same way on every platform, NaN where nothing may be read.
#pragma once

#include <cstddef>
#include <limits>
#include <random>
#include <vector>

#include "index.h"
#include "kernel/convert.h"
#include "weft/layout.h"
#include "weft/tensor.h"

namespace weft::check {

// A contiguous tensor [rows, heads, dim] that owns its bytes; all bits set at first, which is NaN in every dtype.
struct Tensor {
  Tensor(DType type, Index rows, Index heads, Index dim)
      : bytes(at(rows * heads * dim * size_of(type)), std::byte{0xff}),
        view(thd(static_cast<void*>(nullptr), type, rows, heads, dim)) {
    view.data = bytes.data();
  }
  Tensor(const Tensor&) = delete;
  Tensor(Tensor&&) = default;  // the bytes stay where they are

  Index row_bytes() const { return view.heads * view.dim * size_of(view.dtype); }
  RowTensor rows() { return {.data = bytes.data(), .rows = view.rows, .row_bytes = row_bytes()}; }

  std::vector<std::byte> bytes;
  TensorView view;
};

inline Tensor f64_tensor(const Tensor& like) {
  return Tensor(DType::f64, like.view.rows, like.view.heads, like.view.dim);
}

// Unit normal by sums of uniforms: the same on every platform, and never huge.
inline double normal(std::mt19937_64& engine) {
  double sum = -6;
  for (int i = 0; i < 12; ++i) sum += static_cast<double>(engine() >> 11) * 0x1p-53;
  return sum;
}

template <class Real>
Tensor random_tensor(std::mt19937_64& engine, DType type, Index rows, Index heads, Index dim, Real&& real) {
  Tensor t(type, rows, heads, dim);
  std::vector<double> row(at(dim));
  for (Index r = 0; r < rows; ++r) {
    for (Index h = 0; h < heads; ++h) {
      for (double& x : row) x = real(r) ? normal(engine) : std::numeric_limits<double>::quiet_NaN();
      store_row(t.view, r, h, row.data());
    }
  }
  return t;
}

}  // namespace weft::check
