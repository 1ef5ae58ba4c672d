// Rows of a RowTensor: checked, found, copied.
#pragma once

#include <cstddef>
#include <cstring>
#include <string_view>

#include "index.h"
#include "text.h"
#include "weft/layout.h"

namespace weft {

inline void check_row_tensor(std::string_view what, const RowTensor& t, Index rows, Index row_bytes) {
  if (t.rows != rows)
    throw Error(text(what, " has ", t.rows, " rows, expected ", rows), text("give a tensor of ", rows, " rows"));
  if (t.row_bytes < 1 || t.row_bytes != row_bytes)
    throw Error(text(what, " has rows of ", t.row_bytes, " bytes, expected ", row_bytes),
                "give both tensors rows of the same size, of 1 byte or more");
  if (t.data == nullptr && rows > 0) throw Error(text(what, " has no data"), "give a pointer to its first row");
  if (t.inner < 0)
    throw Error(text(what, ": inner = ", t.inner, " is negative"), "give the rows of an outer step, or 0");
}

inline std::byte* row_of(const RowTensor& t, Index row) {
  const Index stride = t.row_stride == 0 ? t.row_bytes : t.row_stride;
  const Index outer = t.inner == 0 ? 0 : row / t.inner, inner = t.inner == 0 ? row : row % t.inner;
  return static_cast<std::byte*>(t.data) + outer * t.outer_stride + inner * stride;
}

inline bool dense(const RowTensor& t) { return t.inner == 0 && (t.row_stride == 0 || t.row_stride == t.row_bytes); }

// `count` neighbouring rows; at once where both sides are dense. Rows may lie on themselves: memmove.
inline void copy_rows(const RowTensor& from, Index from_row, const RowTensor& to, Index to_row, Index count) {
  const Index block = dense(from) && dense(to) ? count : 1;
  for (Index i = 0; i < count; i += block)
    std::memmove(row_of(to, to_row + i), row_of(from, from_row + i), at(block * to.row_bytes));
}

// Calls f(token, row, count) for neighbouring rows that hold neighbouring tokens.
template <class F>
void for_each_block(const RunList& list, F&& f) {
  for (const Run& r : list.runs()) {
    if (r.stride == 1) {
      f(r.token, r.row, r.count);
    } else {
      for (Index i = 0; i < r.count; ++i) f(r.token + i * r.stride, r.row + i, Index{1});
    }
  }
}

}  // namespace weft
