// Loads rows of any dtype as f64 and stores them, rounded once.
#pragma once

#include <type_traits>
#include <vector>

#include "index.h"
#include "weft/slice.h"
#include "weft/tensor.h"

namespace weft {

// The `dim` elements of (row, head), exactly.
inline void load_row(const ConstTensorView& view, Index row, Index head, double* to) {
  with_type(view.dtype, [&]<class T>(std::type_identity<T>) {
    const T* from = view.at<T>(row, head);
    for (Index i = 0; i < view.dim; ++i) to[i] = static_cast<double>(from[i]);
  });
}

inline double load_one(const ConstTensorView& view, Index row, Index head) {
  double value = 0;
  ConstTensorView one = view;
  one.dim = 1;
  load_row(one, row, head, &value);
  return value;
}

inline void store_row(const TensorView& view, Index row, Index head, const double* from) {
  with_type(view.dtype, [&]<class T>(std::type_identity<T>) {
    T* to = view.at<T>(row, head);
    for (Index i = 0; i < view.dim; ++i) to[i] = static_cast<T>(from[i]);
  });
}

// Some rows of a view as f64, contiguous [rows.size(), heads, dim]; addressed by the view's own row numbers.
class F64Rows {
 public:
  F64Rows(const ConstTensorView& view, Range rows)
      : first_(rows.begin),
        heads_(view.heads),
        dim_(view.dim),
        values_(static_cast<std::size_t>(rows.size() * view.heads * view.dim)) {
    for (Index row = rows.begin; row < rows.end; ++row) {
      for (Index head = 0; head < heads_; ++head) load_row(view, row, head, values_.data() + offset(row, head));
    }
  }

  const double* at(Index row, Index head) const { return values_.data() + offset(row, head); }
  Index dim() const { return dim_; }

 private:
  Index offset(Index row, Index head) const { return ((row - first_) * heads_ + head) * dim_; }

  Index first_, heads_, dim_;
  std::vector<double> values_;
};

// A whole view as f64 [rows, heads, dim], and back.
inline std::vector<double> to_f64(const ConstTensorView& view) {
  std::vector<double> values(at(view.rows * view.heads * view.dim));
  double* to = values.data();
  for (Index row = 0; row < view.rows; ++row) {
    for (Index head = 0; head < view.heads; ++head, to += view.dim) load_row(view, row, head, to);
  }
  return values;
}

inline void from_f64(const std::vector<double>& values, const TensorView& view) {
  const double* from = values.data();
  for (Index row = 0; row < view.rows; ++row) {
    for (Index head = 0; head < view.heads; ++head, from += view.dim) store_row(view, row, head, from);
  }
}

}  // namespace weft
