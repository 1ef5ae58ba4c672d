#include "weft/rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "index.h"
#include "rows/row_tensor.h"
#include "weft/layout.h"

namespace weft {
namespace {

void check_orders(const Layout& layout, const RowTensor& sequence, const RowTensor& ranks) {
  check_row_tensor("sequence", sequence, layout.stream().tokens(), sequence.row_bytes);
  check_row_tensor("ranks", ranks, layout.ranks() * layout.rows(), sequence.row_bytes);
  if (sequence.data == ranks.data && sequence.rows > 0 && ranks.rows > 0)
    throw Error("sequence and ranks are the same buffer", "give two: rows change places");
}

// A step is a plain struct that a caller may have put together: what is relied on is looked at again.
void check_entries(const VarlenStep& step) {
  const std::size_t n = step.sequence.size();
  const auto check = [&](std::string_view what, const std::vector<Index>& array, std::size_t wanted) {
    if (array.size() != wanted)
      throw Error(text("a step of ", n, " entries has ", array.size(), " ", what),
                  text("give ", wanted, ", as all_gather_step and ring_step do"));
  };
  check("cu_seqlens_q", step.cu_seqlens_q, n + 1);
  check("cu_seqlens_k", step.cu_seqlens_k, n + 1);
  check("cu_seqlens_q_padded", step.cu_seqlens_q_padded, n + 1);
  check("cu_seqlens_k_padded", step.cu_seqlens_k_padded, n + 1);
  check("seqused_q", step.seqused_q, n);
  check("seqused_k", step.seqused_k, n);
  check("lo", step.lo, n);
  check("hi", step.hi, n);
}

void check_places(const VarlenStep& step, std::string_view what, std::span<const Index> offsets, Index rows) {
  if (offsets.size() != step.sequence.size() + 1)
    throw Error(
        text(offsets.size(), " offsets in ", what, " for a step of ", step.entries(), " entries"),
        text("give ", step.entries() + 1, ": step.cu_seqlens_q if packed, step.cu_seqlens_q_padded if in place"));
  for (Index e = 0; e < step.entries(); ++e) {
    const Index count = step.seqused_q[at(e)], begin = offsets[at(e)];
    // Compared by subtraction: sums of hostile values could overflow.
    if (count < 0 || begin < 0 || count > rows || begin > rows - count)
      throw Error(
          text("entry ", e, ": ", count, " rows from row ", begin, " do not lie in the ", rows, " rows of ", what),
          "give the offsets that the tensor was made with");
  }
}

// Calls copy(row of the step's tensor, row of the rank's, count) for each entry.
template <class Copy>
void for_each_entry(const VarlenStep& step, const RowTensor& step_rows, std::span<const Index> step_offsets,
                    const RowTensor& rank_rows, Copy&& copy) {
  check_entries(step);
  check_row_tensor("rank_rows", rank_rows, step.cu_seqlens_q_padded.back(), rank_rows.row_bytes);
  check_row_tensor("step_rows", step_rows, step_rows.rows, rank_rows.row_bytes);
  check_places(step, "step_rows", step_offsets, step_rows.rows);
  check_places(step, "rank_rows", step.cu_seqlens_q_padded, rank_rows.rows);
  for (Index e = 0; e < step.entries(); ++e)
    copy(step_offsets[at(e)], step.cu_seqlens_q_padded[at(e)], step.seqused_q[at(e)]);
}

}  // namespace

void sequence_to_rank_order(const Layout& layout, const RowTensor& sequence, const RowTensor& ranks) {
  check_orders(layout, sequence, ranks);
  for_each_block(layout.rank_order(),
                 [&](Index token, Index row, Index count) { copy_rows(sequence, token, ranks, row, count); });
}

void rank_to_sequence_order(const Layout& layout, const RowTensor& ranks, const RowTensor& sequence) {
  check_orders(layout, sequence, ranks);
  for_each_block(layout.rank_order(),
                 [&](Index token, Index row, Index count) { copy_rows(ranks, row, sequence, token, count); });
}

std::vector<Index> sequence_rows_of_rank_order(const Layout& layout) {
  std::vector<Index> tokens(at(layout.ranks() * layout.rows()), kNoToken);
  for_each_block(layout.rank_order(), [&](Index token, Index row, Index count) {
    std::iota(tokens.begin() + row, tokens.begin() + row + count, token);
  });
  return tokens;
}

std::vector<Index> rank_rows_of_sequence_order(const Layout& layout) {
  std::vector<Index> rows(at(layout.stream().tokens()), kNoRow);
  for_each_block(layout.rank_order(), [&](Index token, Index row, Index count) {
    std::iota(rows.begin() + token, rows.begin() + token + count, row);
  });
  return rows;
}

std::vector<std::uint8_t> valid_rows(const Stream& stream) {
  std::vector<std::uint8_t> valid(at(stream.tokens()), 0);
  for (Index i = 0; i < stream.sequences(); ++i) std::fill_n(valid.begin() + stream.offset(i), stream.used(i), 1);
  return valid;
}

std::vector<std::uint8_t> valid_rows(const Layout& layout, Index rank) {
  const std::vector<std::uint8_t> real = valid_rows(layout.stream());
  std::vector<std::uint8_t> valid(at(layout.rows()), 0);
  for_each_block(layout.runs(rank), [&](Index token, Index row, Index count) {
    std::copy_n(real.begin() + token, count, valid.begin() + row);
  });
  return valid;
}

RankOffsets cu_seqlens_on_rank(const Layout& layout, Index rank) {
  std::vector<Index> tokens = layout.tokens(rank);
  while (!tokens.empty() && tokens.back() == kNoToken) tokens.pop_back();
  // A row without a token is below all others.
  for (std::size_t row = 0; row < tokens.size(); ++row)
    if (tokens[row] == kNoToken || (row > 0 && tokens[row] < tokens[row - 1]))
      throw Error(text("row ", row, " of rank ", rank, " holds ",
                       tokens[row] == kNoToken ? "no token" : text("token ", tokens[row]), " after token ",
                       row > 0 ? tokens[row - 1] : kNoToken, ": sequences are no ranges of this rank's rows"),
                  "use layout contiguous, dual_chunk, zigzag or striped");
  const auto rows_before = [&](Index token) {
    return std::lower_bound(tokens.begin(), tokens.end(), token) - tokens.begin();
  };
  const Stream& stream = layout.stream();
  RankOffsets out{{0}, {}};
  for (Index i = 0; i < stream.sequences(); ++i) {
    const Index begin = rows_before(stream.offset(i));
    out.cu_seqlens_padded.push_back(begin);
    out.cu_seqlens.push_back(out.cu_seqlens.back() + rows_before(stream.offset(i) + stream.used(i)) - begin);
  }
  out.cu_seqlens_padded.push_back(rows_before(stream.extent().end));
  return out;
}

Chunks sequences_to_chunks(const Stream& stream, Index chunk) {
  if (chunk < 1) throw Error(text("chunk size ", chunk, " is below 1"), "give 1 or more positions a chunk");
  chunk = min_of(chunk, kMaxTokens);  // no sequence is longer, and sums stay small
  Chunks out{{0}, {}, {}};
  for (Index i = 0; i < stream.sequences(); ++i) {
    Index begin = 0;
    do {
      const Index length = min_of(chunk, stream.used(i) - begin);
      out.cu_seqlens.push_back(out.cu_seqlens.back() + length);
      out.cu_seqlens_padded.push_back(stream.offset(i) + begin);
      out.sequence.push_back(i);
      begin += length;
    } while (begin < stream.used(i));
  }
  out.cu_seqlens_padded.push_back(stream.extent().end);
  return out;
}

std::vector<Slice> slices(const VarlenStep& step) {
  check_entries(step);
  std::vector<Slice> out;
  for (std::size_t e = 0; e < step.sequence.size(); ++e) {
    const Index q = step.cu_seqlens_q_padded[e], k = step.cu_seqlens_k_padded[e];
    const Slice s = trimmed({q, q + step.seqused_q[e], k, k + step.seqused_k[e], shift_bound(step.lo[e], k - q),
                             shift_bound(step.hi[e], k - q)},
                            false);
    if (s.q_begin < s.q_end) out.push_back(s);
  }
  return out;
}

void step_to_rank_rows(const VarlenStep& step, const RowTensor& step_rows, std::span<const Index> step_offsets,
                       const RowTensor& rank_rows) {
  for_each_entry(step, step_rows, step_offsets, rank_rows,
                 [&](Index from, Index to, Index count) { copy_rows(step_rows, from, rank_rows, to, count); });
}

void rank_to_step_rows(const VarlenStep& step, const RowTensor& rank_rows, const RowTensor& step_rows,
                       std::span<const Index> step_offsets) {
  for_each_entry(step, step_rows, step_offsets, rank_rows,
                 [&](Index to, Index from, Index count) { copy_rows(rank_rows, from, step_rows, to, count); });
}

std::vector<Index> rank_rows_of_packed_step(const VarlenStep& step) {
  check_entries(step);
  std::vector<Index> rows;
  for (Index e = 0; e < step.entries(); ++e)
    for (Index a = 0; a < step.seqused_q[at(e)]; ++a) rows.push_back(step.cu_seqlens_q_padded[at(e)] + a);
  return rows;
}

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
