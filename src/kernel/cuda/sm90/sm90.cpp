#include "kernel/cuda/sm90/sm90.h"

#include <cmath>

#include "cuda/check.h"
#include "cuda/memory.h"
#include "cuda/on_device.h"
#include "kernel/cuda/host.h"
#include "kernel/cuda/list.h"
#include "kernel/cuda/sm90/call.h"
#include "kernel/cuda/sm90/even.h"
#include "kernel/cuda/sm90/tensor_map.h"

namespace weft::cuda::sm90 {
namespace {

// Heads in equal groups, as without a map?
bool in_groups(const Attention& attention, Index heads_q, Index heads_k) {
  for (std::size_t h = 0; h < attention.head_map.size(); ++h)
    if (attention.head_map[h] != static_cast<Index>(h) / (heads_q / heads_k)) return false;
  return heads_q % heads_k == 0;
}

int processors_of(int device) {
  int count = 0;
  WEFT_CUDA(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

}  // namespace

void forward(const ForwardArgs& args) {
  const OnDevice on(args.place.device);
  const cudaStream_t stream = stream_of(args.place);
  check_rows(max_of(args.q.rows, args.k.rows));
  const DType dtype = args.q.dtype;
  const Width width = width_of(dtype, args.q.dim, args.v.dim);
  const int group = in_groups(args.attention, args.q.heads, args.k.heads)
                        ? static_cast<int>(args.q.heads / args.k.heads)
                        : 1;
  const bool mapped = group == 1 && !args.attention.head_map.empty();
  const Grouping side = grouping(width, group);
  HostLists lists(args.slices);
  const int tiles = lists.add_tiles(Side::query, args.q.rows, side.rows);
  const int units = static_cast<int>(args.q.heads) / side.heads;
  check_grid(tiles, units);
  lists.add_heads(args.q.heads, args.k.heads, args.attention.head_map);
  const std::size_t counters = lists.add_zeros(2);
  const StreamArray<int> numbers = upload(lists.numbers(), stream);

  const double scale = scale_of(args.attention, args.q.dim);
  StreamArray<unsigned> orders;
  const EvenOut out(args.out, dtype, stream);
  ForwardCall call{.list = lists.list(numbers.get(), 0),
                   .kv_head = mapped ? lists.heads(numbers.get()).kv_head : nullptr,
                   .tiles = tiles,
                   .units = units,
                   .heads = side.heads,
                   .rows = side.rows,
                   .units_of_group = group / side.heads,
                   .q_rows = static_cast<int>(args.q.rows),
                   .k_rows = static_cast<int>(args.k.rows),
                   .heads_q = static_cast<int>(args.q.heads),
                   .processors = processors_of(args.place.device),
                   .scores = scores_of(scale == 0 ? 1 : std::abs(scale), args.attention.softcap),
                   .sign = scale > 0   ? 1.0f
                           : scale < 0 ? -1.0f
                                       : 0.0f,
                   .sink = sink_of(args.attention.sink),
                   .out = out.view(),
                   .lse = args.lse,
                   .wide_out = out.wide(),
                   .partial = args.partial,
                   .max_logit = zeroed_orders(orders, args.max_logit, stream),
                   .counters = numbers.get() + counters};
  // Without rows there is nothing to describe, and nothing is read.
  const Even q(args.q, stream), k(args.k, stream), v(args.v, stream);
  if (args.q.rows > 0) call.q = tensor_map(q.view(), side.heads, side.rows);
  if (args.k.rows > 0) {
    call.k = tensor_map(k.view(), 1, forward_shape(width).keys);
    call.v = tensor_map(v.view(), 1, forward_shape(width).keys);
  }
  (dtype == DType::bf16 ? forward_bf16 : forward_f16)(width, call, stream);
  out.finish();
  if (call.max_logit != nullptr) store_max_logit(call.max_logit, args.max_logit, stream);
}

}  // namespace weft::cuda::sm90
