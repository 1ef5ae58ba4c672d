#include <algorithm>

#include "kernel/check_args.h"
#include "run/executor_data.h"
#include "run/kernel_args.h"
#include "text.h"
#include "weft/support.h"

namespace weft::run {
namespace {

template <class Args>
void check_shape(const Schedule& s, const Args& args) {
  const ConstTensorView &q = args.q, &k = args.k;
  const Attention& attention = args.attention;
  require_support({.schedule = s.options.kind,
                   .key_order = s.options.key_order,
                   .stride_q = s.layouts.q.rank_order().stride(),
                   .stride_k = s.layouts.k.rank_order().stride(),
                   .dtype = q.dtype,
                   .bias = attention.bias.given(),
                   .dropout = attention.dropout});
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

void check_forward(const Schedule& s, const ExecutorForwardArgs& args) {
  check_shape(s, args);
  weft::check_forward(forward_call(args, {args.k, args.v}));
}

void check_backward(const Schedule& s, const ExecutorBackwardArgs& args) {
  check_shape(s, args);
  weft::check_backward(backward_call(args, {args.k, args.v}));
  if (!args.out.given() && args.q.rows > 0)  // without rows, a tensor that is given looks like one that is left out
    throw Error("out and lse are left out", "give both, as the forward wrote them");
}

}  // namespace weft::run
