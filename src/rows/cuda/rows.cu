// Rows between orders, valid rows, ranges of rows.
#include "rows/cuda/row_launch.h"
#include "text.h"
#include "weft/device_rows.h"

namespace weft {
namespace {

void check_offsets(const DeviceStream& stream) {
  check_stream("device", stream);
  if (stream.cu_seqlens == nullptr)
    throw Error("the stream has no cu_seqlens", "give a device pointer to sequences + 1 offsets");
}

void check_two(const RowTensor& a, const RowTensor& b, std::string_view names) {
  if (a.data == b.data && a.rows > 0 && b.rows > 0)
    throw Error(text(names, " are the same buffer"), "give two: rows change places");
}

TokenMap whole_stream(const DeviceStream& stream) {
  return {.stream = offsets_view(stream),
          .cut = RegularRuns::pieces,
          .sequence_order = true,
          .ranks = FastDivisor(1),
          .rows = FastDivisor(1),
          .first_rank = 0,
          .members = 1,
          .multiple = 1,
          .real_only = false};
}

// `rows`: rows of each rank's buffer, as the tensor has them.
TokenMap ranks_rows(const DeviceStream& stream, const DeviceLayout& layout, RunList::Members members, Index rows) {
  const RunsSpec spec = runs_spec("device", {layout.kind, layout.ranks, rows, members}, stream.tokens);
  return {.stream = offsets_view(stream),
          .cut = spec.cut,
          .sequence_order = false,
          .ranks = FastDivisor(static_cast<unsigned>(spec.ranks)),
          .rows = FastDivisor(static_cast<unsigned>(max_of(1, rows))),
          .first_rank = static_cast<int>(members.first),
          .members = static_cast<int>(members.count),
          .multiple = spec.multiple(),
          .real_only = false};
}

// The tensor must have as many rows as the layout says, if it says.
void check_rank_rows(const DeviceLayout& layout, Index rows) {
  if (layout.rows != 0 && layout.rows != rows)
    throw Error(text("a rank's buffer has ", rows, " rows and the layout says ", layout.rows),
                "give tensors of the layout's rows");
}

Index rows_of_each(const DeviceLayout& layout, const RowTensor& ranks) {
  if (layout.ranks < 1 || ranks.rows % layout.ranks != 0)
    throw Error(text("ranks has ", ranks.rows, " rows for ", layout.ranks, " ranks"),
                "give every rank the same number");
  check_rank_rows(layout, ranks.rows / layout.ranks);
  return ranks.rows / layout.ranks;
}

OrderMap order_map(const DeviceStream& stream, const DeviceLayout& layout, RunList::Members members, Index rows,
                   OrderMap::Kind kind, bool zero) {
  return {ranks_rows(stream, layout, members, rows), kind, zero};
}

// At the start of a call: the context is entered, and a tensor of the whole stream and one of ranks' rows are checked.
detail::ContextData& enter(DeviceContext& context, const DeviceStream& stream, std::string_view whole_name,
                           const RowTensor& whole, std::string_view rows_name, const RowTensor& rows) {
  context.data().enter();
  check_offsets(stream);
  check_row_tensor(whole_name, whole, stream.tokens, whole.row_bytes);
  check_row_tensor(rows_name, rows, rows.rows, whole.row_bytes);
  check_two(whole, rows, text(whole_name, " and ", rows_name));
  return context.data();
}

// All ranks' rows, or one rank's.
OrderMap all_ranks_map(const DeviceStream& stream, const DeviceLayout& layout, const RowTensor& ranks,
                       OrderMap::Kind kind, OtherRows others) {
  return order_map(stream, layout, {0, layout.ranks, 1}, rows_of_each(layout, ranks), kind, others == OtherRows::zero);
}
OrderMap rank_map(const DeviceStream& stream, const DeviceLayout& layout, Index rank, const RowTensor& local,
                  OrderMap::Kind kind, bool zero) {
  check_rank_rows(layout, local.rows);
  return order_map(stream, layout, {rank, 1, 1}, local.rows, kind, zero);
}

struct Listing {
  TokenMap tokens;
  std::uint8_t* valid;    // 1 where the row has a token, or
  std::int32_t* indices;  // the token itself
  int rows;
  Reporter reporter;
};

__global__ void list_tokens(const __grid_constant__ Listing list) {
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  // The whole warp takes part, also where the rows end inside it.
  const int token = list.tokens.token(list.tokens.known(), min(row, list.rows - 1));
  if (row < list.rows && list.valid != nullptr) list.valid[row] = token >= 0 ? 1 : 0;
  if (row < list.rows && list.indices != nullptr) list.indices[row] = token;
  list.tokens.check(list.reporter);
}

void launch_listing(const detail::ContextData& context, const TokenMap& tokens, Index rows, std::uint8_t* valid,
                    std::int32_t* indices) {
  constexpr Index kThreads = 256;
  cuda::launch(list_tokens,
               {.blocks = dim3(static_cast<unsigned>(ceil_div(rows, kThreads))), .threads = dim3(kThreads)},
               context.stream(), Listing{tokens, valid, indices, static_cast<int>(rows), context.reporter()});
}

void launch_mask(const detail::ContextData& context, TokenMap tokens, Index rows, std::uint8_t* valid) {
  if (rows == 0) return;
  if (valid == nullptr) throw Error("the mask has no data", text("give a device pointer to ", rows, " bytes"));
  tokens.real_only = true;
  launch_listing(context, tokens, rows, valid, nullptr);
}

void check_ranges(const DeviceRanges& ranges) {
  if (ranges.ranges < 0 || ranges.ranges > kMaxTokens || ranges.rows < 0 || ranges.rows > kMaxTokens)
    throw Error(text(ranges.ranges, " ranges of ", ranges.rows, " rows"), text("give numbers from 0 to ", kMaxTokens));
  if (ranges.cu == nullptr && ranges.ranges > 0)
    throw Error("ranges have no cu", "give a device pointer to ranges + 1 prefix sums");
}

template <class Op>
void move_ranges(DeviceContext& context, const DeviceRanges& ranges, const RowTensor& from, const RowTensor& to) {
  context.data().enter();
  check_ranges(ranges);
  check_row_tensor("from", from, from.rows, from.row_bytes);
  check_row_tensor("to", to, to.rows, from.row_bytes);
  check_two(from, to, "from and to");
  if (ranges.ranges == 0) return;
  launch_copy<Op>(context.data(), RangeMap{ranges.cu, ranges.from, ranges.to, static_cast<int>(ranges.ranges)},
                  ranges.rows, from, to);
}

}  // namespace

void sequence_to_rank_order(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout,
                            const RowTensor& sequence, const RowTensor& ranks, OtherRows others) {
  const detail::ContextData& data = enter(context, stream, "sequence", sequence, "ranks", ranks);
  launch_copy<Replace>(data, all_ranks_map(stream, layout, ranks, OrderMap::to_rows, others), ranks.rows, sequence,
                       ranks);
}

void rank_to_sequence_order(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout,
                            const RowTensor& ranks, const RowTensor& sequence, OtherRows others) {
  const detail::ContextData& data = enter(context, stream, "sequence", sequence, "ranks", ranks);
  launch_copy<Replace>(data, all_ranks_map(stream, layout, ranks, OrderMap::to_stream, others), sequence.rows, ranks,
                       sequence);
}

void shard(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout, Index rank,
           const RowTensor& whole, const RowTensor& local) {
  const detail::ContextData& data = enter(context, stream, "whole", whole, "local", local);
  launch_copy<Replace>(data, rank_map(stream, layout, rank, local, OrderMap::to_rows, true), local.rows, whole, local);
}

void unshard(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout, Index rank,
             const RowTensor& local, const RowTensor& whole, OtherRows others) {
  const detail::ContextData& data = enter(context, stream, "whole", whole, "local", local);
  // A row of the launch for each row that is written.
  const bool zero = others == OtherRows::zero;
  launch_copy<Replace>(data,
                       rank_map(stream, layout, rank, local, zero ? OrderMap::to_stream : OrderMap::to_tokens, zero),
                       zero ? whole.rows : local.rows, local, whole);
}

void partition_indices(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout, Index rank,
                       Index rows, std::int32_t* tokens) {
  context.data().enter();
  check_offsets(stream);
  check_rank_rows(layout, rows);
  const TokenMap map = ranks_rows(stream, layout, {rank, 1, 1}, rows);
  if (rows == 0) return;
  if (tokens == nullptr) throw Error("the tokens have no data", text("give a device pointer to ", rows, " numbers"));
  launch_listing(context.data(), map, rows, nullptr, tokens);
}

void copy_valid_rows(DeviceContext& context, const DeviceStream& stream, const RowTensor& from, const RowTensor& to,
                     OtherRows others) {
  context.data().enter();
  check_offsets(stream);
  check_row_tensor("from", from, stream.tokens, from.row_bytes);
  check_row_tensor("to", to, stream.tokens, from.row_bytes);
  OrderMap map{whole_stream(stream), OrderMap::same_rows, others == OtherRows::zero};
  map.tokens.real_only = true;
  launch_copy<Replace>(context.data(), map, to.rows, from, to);
}

void copy_valid_rows(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout, Index rank,
                     const RowTensor& from, const RowTensor& to, OtherRows others) {
  context.data().enter();
  check_offsets(stream);
  check_row_tensor("from", from, from.rows, from.row_bytes);
  check_row_tensor("to", to, from.rows, from.row_bytes);
  OrderMap map = rank_map(stream, layout, rank, to, OrderMap::same_rows, others == OtherRows::zero);
  map.tokens.real_only = true;
  launch_copy<Replace>(context.data(), map, to.rows, from, to);
}

void valid_rows(DeviceContext& context, const DeviceStream& stream, std::uint8_t* valid) {
  context.data().enter();
  check_offsets(stream);
  launch_mask(context.data(), whole_stream(stream), stream.tokens, valid);
}

void valid_rows(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout, Index rank, Index rows,
                std::uint8_t* valid) {
  context.data().enter();
  check_offsets(stream);
  check_rank_rows(layout, rows);
  launch_mask(context.data(), ranks_rows(stream, layout, {rank, 1, 1}, rows), rows, valid);
}

void copy_row_ranges(DeviceContext& context, const DeviceRanges& ranges, const RowTensor& from, const RowTensor& to) {
  move_ranges<Replace>(context, ranges, from, to);
}

void add_row_ranges(DeviceContext& context, const DeviceRanges& ranges, const RowTensor& from, const RowTensor& to) {
  if (unit_of(from, to) < 4)
    throw Error(text("rows of ", to.row_bytes, " bytes, or their addresses, are not whole f32 numbers"),
                "give f32 rows that begin at multiples of 4 bytes");
  move_ranges<AddF32>(context, ranges, from, to);
}

}  // namespace weft
