#include "run/check.h"

#include <algorithm>

#include "kernel/inputs.h"
#include "text.h"
#include "weft/error.h"
#include "weft/support.h"

namespace weft::run {
namespace {

void check_shape(const Schedule& s, const reference::Inputs& in) {
  const ConstTensorView &q = in.q, &k = in.k;
  const Attention& attention = in.attention;
  require_support({.schedule = s.options.kind,
                   .key_order = s.options.key_order,
                   .stride_q = s.layouts.q.rank_order().stride(),
                   .stride_k = s.layouts.k.rank_order().stride(),
                   .dtype = q.dtype,
                   .bias = attention.bias.given(),
                   .dropout = attention.dropout,
                   .device_plan = in.device_plan != nullptr});
  if (q.rows != s.q_rows || k.rows != s.k_rows)
    throw Error(text("rank ", s.rank, ": q has ", q.rows, " rows and k has ", k.rows, ", the layouts ", s.q_rows,
                     " and ", s.k_rows),
                "give each rank its own rows (Layout::shard)");
  if (q.heads != s.heads_q || k.heads != s.heads_k)
    throw Error(text("q has ", q.heads, " heads and k has ", k.heads, ", the schedule ", s.heads_q, " and ", s.heads_k),
                "make the schedule with the heads of the tensors");
  if (!std::equal(attention.head_map.begin(), attention.head_map.end(), s.head_map.begin(), s.head_map.end()))
    throw Error("the head map is not the one that the schedule was made with",
                "give make_schedule the same Heads::map");
}

}  // namespace

void check_forward(const Schedule& s, const ForwardArgs& args) {
  if (!args.slices.empty() || args.partial.given())
    throw Error("slices or partial are given to an executor", "leave them out: they are its schedule's business");
  check_shape(s, reference::inputs_of(args));
  reference::check_inputs(reference::inputs_of(args));
  reference::check_outputs(args, args.q.rows, args.q.heads, args.v.dim);
}

void check_backward(const Schedule& s, const BackwardArgs& args) {
  if (!args.slices.empty())
    throw Error("slices are given to an executor", "leave them out: they are its schedule's business");
  if (args.add_keys) throw Error("add_keys is given to an executor", "add its dk and dv yourself, or use a KvBuffer");
  check_shape(s, reference::inputs_of(args));
  reference::check_backward(args);
  if (!args.out.given() && args.q.rows > 0)  // no rows: nothing to tell a tensor from none
    throw Error("out and lse are left out", "give both, as the forward wrote them");
}

}  // namespace weft::run
