// Rows of tensors: from tokens to ranks and back.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "index.h"
#include "rows/row_tensor.h"
#include "weft/layout.h"

namespace weft {

void Layout::shard(Index rank, const RowTensor& whole, const RowTensor& local) const {
  check_row_tensor("whole", whole, stream().tokens(), whole.row_bytes);
  check_row_tensor("local", local, rows(), whole.row_bytes);
  const RunList list = runs(rank);
  std::vector<bool> filled(at(rows()));
  for_each_block(list, [&](Index token, Index row, Index count) {
    copy_rows(whole, token, local, row, count);
    std::fill_n(filled.begin() + row, count, true);
  });
  for (Index row = 0; row < rows(); ++row) {
    if (!filled[at(row)]) std::memset(row_of(local, row), 0, at(local.row_bytes));
  }
}

void Layout::unshard(Index rank, const RowTensor& local, const RowTensor& whole) const {
  check_row_tensor("whole", whole, stream().tokens(), whole.row_bytes);
  check_row_tensor("local", local, rows(), whole.row_bytes);
  for_each_block(runs(rank), [&](Index token, Index row, Index count) { copy_rows(local, row, whole, token, count); });
}

std::vector<Index> Layout::tokens(Index rank) const {
  std::vector<Index> tokens(at(rows()), kNoToken);
  for_each_block(runs(rank), [&](Index token, Index row, Index count) {
    std::iota(tokens.begin() + row, tokens.begin() + row + count, token);
  });
  return tokens;
}

std::vector<Index> Layout::positions(Index rank) const {
  std::vector<Index> positions = tokens(rank);
  const std::span<const Index> offsets = stream().offsets();
  for (Index& p : positions) {
    const Index token = p;
    // The sequence that begins last at or before the token; empty ones share their offset with the next.
    const Index i = std::upper_bound(offsets.begin(), offsets.end(), token) - offsets.begin() - 1;
    const bool real =
        token != kNoToken && i >= 0 && i < stream().sequences() && token < stream().offset(i) + stream().used(i);
    p = real ? token - stream().offset(i) : 0;
  }
  return positions;
}

}  // namespace weft
