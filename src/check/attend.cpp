#include "check/attend.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "check/device_mirror.h"
#include "check/judge.h"
#include "check/oracle.h"
#include "check/tensors.h"
#include "index.h"
#include "kernel/check_args.h"
#include "weft/kernel.h"
#include "weft/plan.h"
#include "weft/reference.h"

namespace weft::check {
namespace {

Arithmetic arithmetic_of(const Case& c, std::string_view kernel) {
  return kernel == kReference ? exact_arithmetic(c.dtype) : kernel_arithmetic(c.dtype, DType::f32);
}

class Runner {
 public:
  Runner(const Case& c, std::string_view kernel, std::optional<Index> some)
      : case_(c),
        kernel_(kernel),
        work_(kernel == kReference ? DType::f64 : DType::f32),
        oracle_(c, arithmetic_of(c, kernel), some, some),
        layouts_(layouts_of(c, oracle_.problem())) {}

  std::vector<AttendReport> run() {
    std::vector<AttendReport> reports;
    const auto add = [&](const std::string& name, const std::vector<Buffer>& steps) {
      reports.push_back({name, oracle_.compare(compute(steps))});
    };
    if (layouts_.q.rank_order().stride() != layouts_.k.rank_order().stride()) return reports;  // planner refuses
    if (layouts_.k.rank_order().stride() == 1) add("sequence order", {stream_buffer(layouts_.k.stream().tokens())});
    add("rank order", {rank_buffer(layouts_.k, {0, case_.ranks, 1})});
    std::vector<Buffer> ring;
    for (Index r = 0; r < case_.ranks; ++r) ring.push_back(rank_buffer(layouts_.k, {r, 1, 1}));
    add("ring", ring);
    return reports;
  }

 private:
  // The rows of a step's buffer; rows without a token stay NaN.
  static Tensor gather(Tensor& whole, const Buffer& step) {
    Tensor t(whole.view.dtype, step.runs.rows(), whole.view.heads, whole.view.dim);
    const std::size_t n = at(whole.row_bytes());
    for (std::size_t row = 0; row < step.tokens.size(); ++row) {
      if (step.tokens[row] == kNoToken) continue;
      std::copy_n(whole.bytes.begin() + static_cast<std::ptrdiff_t>(at(step.tokens[row]) * n), n,
                  t.bytes.begin() + static_cast<std::ptrdiff_t>(row * n));
    }
    return t;
  }

  Tensor shard(Tensor& whole, Index rank) {
    Tensor t(whole.view.dtype, layouts_.q.rows(), whole.view.heads, whole.view.dim);
    layouts_.q.shard(rank, whole.rows(), t.rows());
    return t;
  }

  // Adds gradients of a step's rows to those of the tokens.
  static void scatter_add(const Tensor& part, const Buffer& step, Tensor& whole) {
    const Index width = whole.view.heads * whole.view.dim;
    const std::vector<double> values = to_f64(part.view);
    for (std::size_t row = 0; row < step.tokens.size(); ++row) {
      if (step.tokens[row] == kNoToken) continue;
      double* to = whole.view.at<double>(step.tokens[row], 0);
      const double* from = values.data() + static_cast<Index>(row) * width;
      for (Index i = 0; i < width; ++i) to[i] += from[i];
    }
  }

  Results compute(const std::vector<Buffer>& steps) {
    Results r = oracle_.nothing({.out = case_.dtype, .lse = DType::f64, .gradients = DType::f64});
    for (Index rank = 0; rank < case_.ranks; ++rank) compute_rank(rank, steps, r);
    return r;
  }

  // What a rank has of one step.
  struct Part {
    Tensor k, v;
    Plan plan;
  };

  void compute_rank(Index rank, const std::vector<Buffer>& steps, Results& r) {
    const Index rows = layouts_.q.rows(), hq = case_.heads_q;
    const bool exact = kernel_ == kReference, learnable = oracle_.learnable();
    Tensor q = shard(oracle_.q(), rank), dout = shard(oracle_.dout(), rank), out(case_.dtype, rows, hq, case_.dim_v);
    Tensor exact_out(DType::f64, rows, hq, case_.dim_v), lse(DType::f64, rows, hq, 1), max_logit(work_, 1, hq, 1);
    std::vector<double> dq(at(rows * hq * case_.dim_qk), 0.0);

    std::vector<Part> parts;
    std::vector<KeyStep> key_steps;
    for (const Buffer& step : steps)
      parts.push_back({gather(oracle_.k(), step), gather(oracle_.v(), step),
                       make_plan(oracle_.problem(), layouts_.q.runs(rank), step.runs)});
    for (const Part& part : parts) key_steps.push_back({part.k.view, part.v.view, part.plan.slices});
    const ForwardArgs forward{
        .q = q.view, .attention = oracle_.attention(), .out = out.view, .lse = lse.view, .max_logit = max_logit.view};
    attend_steps(kernel_, forward, key_steps, exact_out.view);
    const Tensor& out_read = exact ? exact_out : out;
    for (std::size_t n = 0; n < steps.size(); ++n) {
      const auto& [k, v, plan] = parts[n];
      Tensor dk(work_, k.view.rows, k.view.heads, k.view.dim), dv(work_, v.view.rows, v.view.heads, v.view.dim);
      Tensor dq_part(work_, rows, hq, case_.dim_qk), dsink(work_, 1, hq, 1);
      BackwardArgs backward{.q = q.view,
                            .k = k.view,
                            .v = v.view,
                            .slices = plan.slices,
                            .attention = oracle_.attention(),
                            .dout = dout.view,
                            .dq = dq_part.view,
                            .dk = dk.view,
                            .dv = dv.view};
      if (!exact || steps.size() > 1) {  // a part of the keys needs the whole row's statistics
        backward.out = out_read.view;
        backward.lse = lse.view;
      }
      if (learnable && steps.size() == 1) backward.dsink = dsink.view;
      attend_backward_by(kernel_, backward);
      scatter_add(dk, steps[n], r.dk);
      scatter_add(dv, steps[n], r.dv);
      const std::vector<double> part = to_f64(dq_part.view);
      for (std::size_t i = 0; i < part.size(); ++i) dq[i] += part[i];
      for (std::size_t h = 0; backward.dsink.given() && h < r.dsink.size(); ++h)
        r.dsink[h] += load_one(dsink.view, 0, static_cast<Index>(h));
    }
    if (learnable && steps.size() > 1) add_dsink(parts, dout, out_read, lse, r);
    Tensor dq_rows(DType::f64, rows, hq, case_.dim_qk);
    from_f64(dq, dq_rows.view);
    for (auto [from, to] : {std::pair{&out, &r.out}, {&lse, &r.lse}, {&dq_rows, &r.dq}})
      layouts_.q.unshard(rank, from->rows(), to->rows());
    for (Index h = 0; h < hq; ++h) {
      double& largest = r.max_logit[at(h)];
      largest = std::max(largest, load_one(max_logit.view, 0, h));
    }
  }

  // The sink's gradient belongs to the row, not to a step: once, from the finished row. Padding is not read.
  void add_dsink(const std::vector<Part>& parts, const Tensor& dout, const Tensor& out, const Tensor& lse,
                 Results& r) const {
    std::vector<bool> in_slice(at(layouts_.q.rows()), false);
    for (const Part& part : parts)
      for (const Slice& s : part.plan.slices) std::fill(in_slice.begin() + s.q_begin, in_slice.begin() + s.q_end, true);
    std::vector<double> o(at(case_.dim_v)), d(o);
    for (Index row = 0; row < layouts_.q.rows(); ++row) {
      if (!in_slice[at(row)]) continue;
      for (Index h = 0; h < case_.heads_q; ++h) {
        load_row(out.view, row, h, o.data());
        load_row(dout.view, row, h, d.data());
        const double p = std::exp(oracle_.sink(h) - *lse.view.at<double>(row, h));
        for (std::size_t i = 0; i < o.size(); ++i) r.dsink[at(h)] -= p * o[i] * d[i];
      }
    }
  }

  const Case& case_;
  std::string_view kernel_;
  DType work_;  // of what is summed over ranks and steps
  Oracle oracle_;
  Layouts layouts_;
};

template <class Args>
Args with_keys(Args args, const KeyStep& step) {
  args.k = step.k;
  args.v = step.v;
  args.slices = step.slices;
  return args;
}

// The arguments with their host inputs mirrored where the kernel reads them. Args: of a forward or a backward.
template <class Args>
Args inputs_there(DeviceMirror& mirror, Args args) {
  args.q = mirror.in(args.q);
  args.k = mirror.in(args.k);
  args.v = mirror.in(args.v);
  args.attention = mirror.in(args.attention);
  args.place = mirror.place();
  return args;
}

// The call with its host tensors mirrored.
template <class Call>
void call_mirrored(std::string_view kernel, const KernelForwardArgs& args, const Call& call) {
  DeviceMirror mirror(place_of(kernel));
  KernelForwardArgs there = inputs_there(mirror, args);
  there.out = mirror.out(args.out);
  there.lse = mirror.out(args.lse);
  there.max_logit = mirror.out(args.max_logit);
  there.partial = mirror.out(args.partial);
  mirror.send();
  call(there);
  mirror.fetch();
}

void attend_mirrored(std::string_view kernel, const KernelForwardArgs& args) {
  call_mirrored(kernel, args, [&](const KernelForwardArgs& there) { attend(there, kernel); });
}

void exact_steps(ForwardArgs args, std::span<const KeyStep> steps, const TensorView& exact_out) {
  ReferenceState state(args.q.rows, args.q.heads, args.out.dim);
  for (const KeyStep& step : steps) reference_partial(with_keys(args, step), state);
  reference_finish(state, args);
  args.out = exact_out;
  reference_finish(state, args);
}

}  // namespace

std::optional<std::string> refusal(const Case& c, std::string_view kernel) {
  if (kernel == kReference) return {};
  KernelRequest request{.dtype = c.dtype, .dim_qk = c.dim_qk, .dim_v = c.dim_v};
  const Kernel& asked = find_kernel(kernel);
  if (kernel.starts_with("cuda")) request.device = DeviceKind::cuda;
  for (const auto& [pass, partial] :
       {std::pair{Pass::forward, false}, {Pass::forward, true}, {Pass::backward, false}}) {
    request.pass = pass;
    request.partial = partial;
    if (auto reason = asked.refusal(request)) return reason;
  }
  return {};
}

std::vector<AttendReport> check_attention(const Case& c, std::string_view kernel, std::optional<Index> some) {
  return Runner(c, kernel, some).run();
}

void attend_steps(std::string_view kernel, const ForwardArgs& args, std::span<const KeyStep> steps,
                  const TensorView& exact_out) {
  if (kernel == kReference) return exact_steps(args, steps, exact_out);
  if (steps.size() == 1) return attend_mirrored(kernel, {with_keys(args, steps[0])});
  const Tensor sums(DType::f32, args.q.rows, args.q.heads, args.out.dim);
  std::vector<RowState<float>> states(at(args.q.rows * args.q.heads));
  KernelForwardArgs part{{.q = args.q, .attention = args.attention}, {sums.view, states.data()}};
  for (const KeyStep& step : steps) attend_mirrored(kernel, with_keys(part, step));
  part.out = args.out;
  part.lse = args.lse;
  part.max_logit = args.max_logit;
  call_mirrored(kernel, part, [](const KernelForwardArgs& there) { finish_partial(finish_args(there)); });
}

void attend_backward_by(std::string_view kernel, const BackwardArgs& args) {
  if (kernel == kReference) return reference_backward(args);
  DeviceMirror mirror(place_of(kernel));
  BackwardArgs there = inputs_there(mirror, args);
  there.dout = mirror.in(args.dout);
  there.out = mirror.in(args.out);
  there.lse = mirror.in(args.lse);
  there.dq = mirror.out(args.dq);
  there.dk = mirror.out(args.dk);
  there.dv = mirror.out(args.dv);
  there.dsink = mirror.out(args.dsink);
  mirror.send();
  attend_backward(there, kernel);
  mirror.fetch();
}

}  // namespace weft::check
