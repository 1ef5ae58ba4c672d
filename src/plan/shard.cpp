// Rows of tensors: from tokens to ranks and back.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "text.h"
#include "weft/error.h"
#include "weft/layout.h"

namespace weft {
namespace {

void check(std::string_view what, const RowTensor& t, Index rows, Index row_bytes) {
  if (t.rows != rows)
    throw Error(text(what, " has ", t.rows, " rows, expected ", rows), text("give a tensor of ", rows, " rows"));
  if (t.row_bytes < 1 || t.row_bytes != row_bytes)
    throw Error(text(what, " has rows of ", t.row_bytes, " bytes, expected ", row_bytes),
                "give both tensors rows of the same size, of 1 byte or more");
  if (t.data == nullptr && rows > 0) throw Error(text(what, " has no data"), "give a pointer to its first row");
  if (t.inner < 0) throw Error(text(what, ": inner = ", t.inner, " is negative"), "give the rows of an outer step, or 0");
}

std::byte* row_of(const RowTensor& t, Index row) {
  const Index stride = t.row_stride == 0 ? t.row_bytes : t.row_stride;
  const Index outer = t.inner == 0 ? 0 : row / t.inner, inner = t.inner == 0 ? row : row % t.inner;
  return static_cast<std::byte*>(t.data) + outer * t.outer_stride + inner * stride;
}

bool dense(const RowTensor& t) { return t.inner == 0 && (t.row_stride == 0 || t.row_stride == t.row_bytes); }

// Calls copy(token, row) per row, or once per run where both sides are dense: copy(token, row, count).
template <class Copy>
void for_each_block(const RunList& list, bool whole_runs, Copy&& copy) {
  for (const Run& r : list.runs()) {
    if (whole_runs && r.stride == 1) {
      copy(r.token, r.row, r.count);
    } else {
      for (Index i = 0; i < r.count; ++i) copy(r.token + i * r.stride, r.row + i, Index{1});
    }
  }
}

}  // namespace

void Layout::shard(Index rank, const RowTensor& whole, const RowTensor& local) const {
  check("whole", whole, stream().tokens(), whole.row_bytes);
  check("local", local, rows(), whole.row_bytes);
  const RunList list = runs(rank);
  std::vector<bool> filled(static_cast<std::size_t>(rows()));
  for_each_block(list, dense(whole) && dense(local), [&](Index token, Index row, Index count) {
    std::memcpy(row_of(local, row), row_of(whole, token), static_cast<std::size_t>(count * local.row_bytes));
    std::fill_n(filled.begin() + row, count, true);
  });
  for (Index row = 0; row < rows(); ++row) {
    if (!filled[static_cast<std::size_t>(row)])
      std::memset(row_of(local, row), 0, static_cast<std::size_t>(local.row_bytes));
  }
}

void Layout::unshard(Index rank, const RowTensor& local, const RowTensor& whole) const {
  check("whole", whole, stream().tokens(), whole.row_bytes);
  check("local", local, rows(), whole.row_bytes);
  for_each_block(runs(rank), dense(whole) && dense(local), [&](Index token, Index row, Index count) {
    std::memcpy(row_of(whole, token), row_of(local, row), static_cast<std::size_t>(count * local.row_bytes));
  });
}

std::vector<Index> Layout::tokens(Index rank) const {
  std::vector<Index> tokens(static_cast<std::size_t>(rows()), kNoToken);
  for_each_block(runs(rank), false,
                 [&](Index token, Index row, Index) { tokens[static_cast<std::size_t>(row)] = token; });
  return tokens;
}

std::vector<Index> Layout::positions(Index rank) const {
  std::vector<Index> positions = tokens(rank);
  const std::span<const Index> offsets = stream().offsets();
  for (Index& p : positions) {
    const Index token = p;
    // The sequence that begins last at or before the token; empty ones share their offset with the next.
    const Index i = std::upper_bound(offsets.begin(), offsets.end(), token) - offsets.begin() - 1;
    const bool real = token != kNoToken && i >= 0 && i < stream().sequences() &&
                      token < stream().offset(i) + stream().used(i);
    p = real ? token - stream().offset(i) : 0;
  }
  return positions;
}

}  // namespace weft
