#include <utility>

#include "kernel/check_args.h"
#include "kernel/reference/block.h"
#include "weft/reference.h"

namespace weft {

namespace reference {
namespace {

// Of every query row that sees a key: lse and delta = dout·out.
struct RowStatistics {
  std::vector<double> lse, delta;  // [tq, hq]
  std::vector<char> seeing;        // [tq]
};

std::vector<double> zeros(const ConstTensorView& view) {
  return std::vector<double>(at(view.rows * view.heads * view.dim));
}

RowStatistics rows_that_see(const KernelBackwardArgs& args) {
  const auto size = at(args.q.rows * args.q.heads);
  RowStatistics rows{std::vector<double>(size), std::vector<double>(size), std::vector<char>(at(args.q.rows))};
  for (const Slice& slice : args.slices) {
    const Slice seen = trimmed(slice, true);
    for (Index row = seen.q_begin; row < seen.q_end; ++row) rows.seeing[at(row)] = 1;
  }
  return rows;
}

// Calls f(row, head, item of [tq, hq]) for every row that sees a key.
template <class F>
void for_each_seeing(const KernelBackwardArgs& args, const RowStatistics& rows, F&& f) {
  for (Index row = 0; row < args.q.rows; ++row) {
    if (rows.seeing[at(row)] == 0) continue;
    for (Index head = 0; head < args.q.heads; ++head) f(row, head, at(row * args.q.heads + head));
  }
}

// Where out and lse are left out, the slices hold all keys, and the forward is computed again in f64.
RowStatistics statistics(const KernelBackwardArgs& args) {
  RowStatistics rows = rows_that_see(args);
  std::vector<double> out, lse;
  ConstTensorView out_view = args.out, lse_view = args.lse;
  if (!args.out.given()) {
    const Index tokens = args.q.rows, heads = args.q.heads, dim = args.v.dim;
    out.resize(at(tokens * heads * dim));
    lse.resize(at(tokens * heads));
    const TensorView out_f64 = thd(out.data(), DType::f64, tokens, heads, dim);
    const TensorView lse_f64 = token_heads(lse.data(), DType::f64, tokens, heads);
    reference_forward(forward_of(args, out_f64, lse_f64));
    out_view = out_f64;
    lse_view = lse_f64;
  }
  std::vector<double> o(at(args.v.dim)), dout(o.size());
  for_each_seeing(args, rows, [&](Index row, Index head, std::size_t item) {
    load_row(out_view, row, head, o.data());
    load_row(args.dout, row, head, dout.data());
    rows.lse[item] = load_one(lse_view, row, head);
    rows.delta[item] = dot(o.data(), dout.data(), args.v.dim);
  });
  return rows;
}

struct Gradients {
  std::vector<double> dq, dk, dv;
};

void attend_back(const KernelBackwardArgs& args, const Slice& slice, const RowStatistics& rows, Gradients& to) {
  const Inputs in = inputs_of(args);
  const Block block(in, slice);
  const Logits logit(in);
  const F64Rows douts(args.dout, block.rows());
  for (Index row = block.rows().begin; row < block.rows().end; ++row) {
    const Range keys = keys_of(block.seen, row);
    for (Index head = 0; head < in.q.heads; ++head) {
      const Index item = row * in.q.heads + head, kv_head = block.kv_head(head);
      const double lse = rows.lse[at(item)], delta = rows.delta[at(item)];
      const double *q = block.q.at(row, head), *dout = douts.at(row, head);
      for (Index key = keys.begin; key < keys.end; ++key) {
        const double *k = block.k.at(key, kv_head), *v = block.v.at(key, kv_head);
        const double s = logit(q, k);
        if (s == kMinusInfinity<double>) continue;  // contributes nothing, and lse may be -inf too
        const double p = std::exp(s - lse);
        const double ds = p * (dot(dout, v, in.v.dim) - delta) * logit.slope(s);
        const Index key_item = key * in.k.heads + kv_head;
        add_scaled(to.dq.data() + item * in.q.dim, ds, k, in.q.dim);
        add_scaled(to.dk.data() + key_item * in.q.dim, ds, q, in.q.dim);
        add_scaled(to.dv.data() + key_item * in.v.dim, p, dout, in.v.dim);
      }
    }
  }
}

// Adds to the dk and dv of the keys that somebody sees; each sum is rounded once.
void add_to_keys(const KernelBackwardArgs& args, Gradients& to) {
  std::vector<double> old(at(max_of(args.k.dim, args.v.dim)));
  std::vector<char> done(at(args.k.rows), 0);
  const auto add = [&](const TensorView& view, Index row, std::vector<double>& sums) {
    for (Index head = 0; head < view.heads; ++head) {
      load_row(view, row, head, old.data());
      add_scaled(sums.data() + (row * view.heads + head) * view.dim, 1, old.data(), view.dim);
    }
  };
  for (const Slice& slice : args.slices) {
    const Range keys = touched_keys(slice);
    for (Index row = keys.begin; row < keys.end; ++row) {
      if (std::exchange(done[at(row)], 1)) continue;
      add(args.dk, row, to.dk);
      add(args.dv, row, to.dv);
      for (Index head = 0; head < args.k.heads; ++head) {
        store_row(args.dk, row, head, to.dk.data() + (row * args.k.heads + head) * args.k.dim);
        store_row(args.dv, row, head, to.dv.data() + (row * args.k.heads + head) * args.v.dim);
      }
    }
  }
}

void write_dsink(const KernelBackwardArgs& args, const RowStatistics& rows) {
  std::vector<double> dsink(at(args.q.heads));
  for_each_seeing(args, rows, [&](Index, Index head, std::size_t item) {
    const double sink = sink_logit(args.attention.sink, head);
    if (sink == kMinusInfinity<double>) return;
    dsink[at(head)] -= std::exp(sink - rows.lse[item]) * rows.delta[item];
  });
  from_f64(dsink, args.dsink);
}

}  // namespace
}  // namespace reference

void reference_backward(const BackwardArgs& args) { reference_backward(KernelBackwardArgs{args}); }

void reference_backward(const KernelBackwardArgs& args) {
  refuse_device_plan(args.device_plan);
  check_backward(args);
  const reference::RowStatistics rows = reference::statistics(args);
  reference::Gradients gradients{reference::zeros(args.q), reference::zeros(args.k), reference::zeros(args.v)};
  for (const Slice& slice : args.slices) reference::attend_back(args, slice, rows, gradients);
  from_f64(gradients.dq, args.dq);
  if (args.add_keys) {
    reference::add_to_keys(args, gradients);
  } else {
    from_f64(gradients.dk, args.dk);
    from_f64(gradients.dv, args.dv);
  }
  if (args.dsink.given()) reference::write_dsink(args, rows);
}

}  // namespace weft
