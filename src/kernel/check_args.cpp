#include "kernel/check_args.h"

#include <array>
#include <cmath>

#include "index.h"
#include "text.h"
#include "weft/device_plan.h"
#include "weft/support.h"

namespace weft {
namespace {

constexpr std::array kStatistics = {DType::f32, DType::f64};

void check_qkv(const Inputs& in) {
  check_tensor(in.q, {.name = "q"});
  check_tensor(in.k, {.name = "k"});
  check_tensor(in.v, {.name = "v"});
  if (in.q.dtype != in.k.dtype || in.q.dtype != in.v.dtype) {
    throw Error(text("q is ", name(in.q.dtype), ", k is ", name(in.k.dtype), " and v is ", name(in.v.dtype)),
                "give all three the same dtype");
  }
  if (in.q.dim != in.k.dim) {
    throw Error(text("q has dim ", in.q.dim, " and k has dim ", in.k.dim), "give both the same; only v's may differ");
  }
  if (in.k.rows != in.v.rows || in.k.heads != in.v.heads) {
    throw Error(text("k has ", in.k.rows, " rows of ", in.k.heads, " heads and v has ", in.v.rows, " rows of ",
                     in.v.heads, " heads"),
                "give k and v the same rows and heads");
  }
}

void check_heads(const Inputs& in) {
  const Index hq = in.q.heads, hk = in.k.heads;
  const std::span<const Index> map = in.attention.head_map;
  if (map.empty()) {
    if (hq % hk == 0) return;
    const std::string fewer = hq > hk ? text(hq / hk * hk, " or ") : "";
    throw Error(text("q has ", hq, " heads and k has ", hk, ": query heads must be a multiple of key heads"),
                text("use ", fewer, (hq / hk + 1) * hk, " query heads, or give Attention::head_map"));
  }
  if (static_cast<Index>(map.size()) != hq) {
    throw Error(text("head_map has ", map.size(), " entries and q has ", hq, " heads"), "give one entry a query head");
  }
  for (Index head = 0; head < hq; ++head) {
    const Index to = map[at(head)];
    if (to >= 0 && to < hk) continue;
    throw Error(text("head_map sends query head ", head, " to K/V head ", to, " of ", hk),
                text("name one of 0 .. ", hk - 1));
  }
}

void check_sink(const Sink& sink, Index heads) {
  if (sink.kind == Sink::Kind::learnable) {
    check_tensor(sink.logits, {.name = "sink.logits", .rows = 1, .heads = heads, .dim = 1, .dtypes = kStatistics});
  } else if (sink.logits.given()) {
    throw Error("sink.logits is given and the sink is not learnable", "use Sink::learnable(logits), or leave it out");
  }
}

// Kernels compute in f32, where a larger scale or softcap becomes infinite, a smaller softcap 0, and logits NaN.
constexpr double kMostScale = 1e38, kLeastSoftcap = 1e-30, kMostSoftcap = 1e30;

void check_attention(const Inputs& in) {
  if (in.attention.scale && !(std::abs(*in.attention.scale) <= kMostScale)) {
    throw Error(text("scale is ", *in.attention.scale),
                "give a finite scale of at most 1e38, or none for 1 / sqrt(dim of q)");
  }
  const double softcap = in.attention.softcap;
  if (softcap != 0 && !(softcap >= kLeastSoftcap && softcap <= kMostSoftcap)) {
    throw Error(text("softcap is ", softcap), "give a finite softcap above 0, from 1e-30 to 1e30, or 0 for none");
  }
  check_heads(in);
  check_sink(in.attention.sink, in.q.heads);
}

[[noreturn]] void refuse_slice(const Slice& s, std::size_t index, const std::string& why, const std::string& remedy) {
  throw Error(text("slice ", index, " (query rows ", s.q_begin, " .. ", s.q_end, ", key rows ", s.k_begin, " .. ",
                   s.k_end, ", band ", s.lo, " .. ", s.hi, ") ", why),
              remedy);
}

void check_slice(const Slice& s, std::size_t index, Index rows_q, Index rows_k) {
  if (s.q_begin < 0 || s.q_begin > s.q_end || s.q_end > rows_q) {
    refuse_slice(s, index, text("does not lie in the ", rows_q, " rows of q"),
                 text("let 0 <= q_begin <= q_end <= ", rows_q));
  }
  if (s.k_begin < 0 || s.k_begin > s.k_end || s.k_end > rows_k) {
    refuse_slice(s, index, text("does not lie in the ", rows_k, " rows of k and v"),
                 text("let 0 <= k_begin <= k_end <= ", rows_k));
  }
  if (s.lo > s.hi) refuse_slice(s, index, "has a band with lo > hi", "leave out slices that show nothing");
  if (s.lo < -kUnlimited || s.hi > kUnlimited) {
    refuse_slice(s, index, "has a band past kUnlimited", "use -kUnlimited and kUnlimited for no limit");
  }
}

// The host does not know the slices themselves, but it knows for how many rows they were planned.
void check_device_plan(const Inputs& in) {
  if (!in.slices.empty())
    throw Error(text(in.slices.size(), " slices and a device_plan are given"), "give one of the two");
  if (in.place.kind != DeviceKind::cuda)
    throw Error("a device_plan is given, and by `place` the tensors lie in memory of the CPU",
                "give the place of the tensors, or slices on the host");
  const Place& planned = in.device_plan->place();
  if (!(planned == in.place))
    throw Error(text("the device_plan is made in ", planned.device == in.place.device ? "another stream of " : "",
                     name(planned), ", and the call is for ", name(in.place)),
                "give the call the place of the plan's context, so that one waits for the other");
  const DeviceSlices s = in.device_plan->slices();
  if (s.q_rows != in.q.rows || s.k_rows != in.k.rows)
    throw Error(text("the device_plan is for ", s.q_rows, " query rows and ", s.k_rows, " key rows; q has ", in.q.rows,
                     " and k has ", in.k.rows),
                "plan (or upload) before the call, for buffers of as many rows as the tensors have");
}

void check_statistics(const ConstTensorView& view, std::string_view what, Index rows, Index heads, bool output) {
  check_tensor(view, {.name = what, .rows = rows, .heads = heads, .dim = 1, .dtypes = kStatistics, .output = output});
}

TensorSpec like(const ConstTensorView& view, std::string_view what, bool output) {
  return {.name = what, .rows = view.rows, .heads = view.heads, .dim = view.dim, .output = output};
}

void check_partial(const KernelForwardArgs& args) {
  const DType either[] = {DType::f32, sum_type(args.q.dtype)};
  const std::size_t types = args.q.dtype == DType::f64 ? 2 : 1;
  check_tensor(args.partial.sums, {.name = "partial.sums",
                                   .rows = args.q.rows,
                                   .heads = args.q.heads,
                                   .dim = args.v.dim,
                                   .dtypes = std::span(either, types),
                                   .output = true});
  const bool f64 = args.partial.sums.dtype == DType::f64;
  const bool states = f64 ? args.partial.states_f64 != nullptr : args.partial.states != nullptr;
  const bool others = f64 ? args.partial.states != nullptr : args.partial.states_f64 != nullptr;
  if ((!states && args.q.rows > 0) || others)
    throw Error(text("partial.sums is ", name(args.partial.sums.dtype), " and is given ",
                     others ? "with states of another type" : "without states"),
                text("give a RowState of ", f64 ? "double (partial.states_f64)" : "float (partial.states)",
                     " for every row and head"));
  if (args.out.given() || args.lse.given() || args.max_logit.given())
    throw Error("out, lse or max_logit is given together with partial",
                "leave them out here; finish_partial writes them at the end");
}

}  // namespace

void check_inputs(const Inputs& in) {
  require_support({.dtype = in.q.dtype, .bias = in.attention.bias.given(), .dropout = in.attention.dropout});
  check_qkv(in);
  check_attention(in);
  if (in.device_plan != nullptr) check_device_plan(in);
  for (std::size_t i = 0; i < in.slices.size(); ++i) check_slice(in.slices[i], i, in.q.rows, in.k.rows);
}

FinishArgs finish_args(const KernelForwardArgs& args) {
  return {.partial = args.partial,
          .sink = args.attention.sink,
          .out = args.out,
          .lse = args.lse,
          .max_logit = args.max_logit,
          .place = args.place};
}

void refuse_device_plan(const DevicePlan* plan) {
  if (plan != nullptr)
    throw Error("a device_plan is given to the reference, which reads slices on the host", "give slices (make_plan)");
}

void check_outputs(const FinishArgs& args, Index rows, Index heads, Index dim) {
  check_sink(args.sink, heads);
  check_tensor(args.out, {.name = "out", .rows = rows, .heads = heads, .dim = dim, .output = true});
  if (args.lse.given()) check_statistics(args.lse, "lse", rows, heads, true);
  if (args.max_logit.given()) check_statistics(args.max_logit, "max_logit", 1, heads, true);
}

void check_forward(const KernelForwardArgs& args) {
  check_inputs(inputs_of(args));
  if (args.partial.given())
    check_partial(args);
  else
    check_outputs(finish_args(args), args.q.rows, args.q.heads, args.v.dim);
  if (args.keys_per_split < 0)
    throw Error(text("keys_per_split is ", args.keys_per_split),
                "give the keys of a split, kUnlimited for none, or 0 for the default");
}

void check_backward(const KernelBackwardArgs& args) {
  check_inputs(inputs_of(args));
  ConstTensorView out = args.q;  // only its shape counts
  out.dim = args.v.dim;
  check_tensor(args.dout, like(out, "dout", false));
  if (args.out.given() != args.lse.given()) {
    throw Error(text(args.out.given() ? "out" : "lse", " is given without ", args.out.given() ? "lse" : "out"),
                "give both, as the forward wrote them, or neither");
  }
  if (args.out.given()) {
    check_tensor(args.out, like(out, "out", false));
    check_statistics(args.lse, "lse", args.q.rows, args.q.heads, false);
  }
  check_tensor(args.dq, like(args.q, "dq", true));
  check_tensor(args.dk, like(args.k, "dk", true));
  check_tensor(args.dv, like(args.v, "dv", true));
  const auto adds_to = [&](DType dtype) { return dtype == DType::f32 || dtype == sum_type(args.q.dtype); };
  if (args.add_keys && !(adds_to(args.dk.dtype) && adds_to(args.dv.dtype))) {
    throw Error(text("add_keys with a dk of ", name(args.dk.dtype), " and a dv of ", name(args.dv.dtype)),
                text("give ", name(sum_type(args.q.dtype)), " to add to, and round at the end"));
  }
  if (!args.dsink.given()) return;
  if (args.attention.sink.kind != Sink::Kind::learnable) {
    throw Error("dsink is asked for and the sink is not learnable", "leave dsink out, or use Sink::learnable(logits)");
  }
  check_statistics(args.dsink, "dsink", 1, args.q.heads, true);
}

}  // namespace weft
