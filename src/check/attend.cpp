#include "check/attend.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "check/definition.h"
#include "check/dense.h"
#include "check/tensors.h"
#include "weft/attention.h"
#include "weft/plan.h"

namespace weft::check {
namespace {

// Rounding once to this dtype moves a value by at most relative·|value| + absolute (subnormals; small in f16 only).
struct Rounding {
  double relative = 0, absolute = 0;
};
constexpr Rounding kExact = {};

Rounding rounding(DType type) {
  switch (type) {
    case DType::f64: return {0x1p-53, 0};
    case DType::f32: return {0x1p-24, 0};
    case DType::bf16: return {0x1p-8, 0};
    default: return {0x1p-11, 0x1p-25};
  }
}

// What the ranks computed, in global tokens.
struct Results {
  Tensor out;                          // of the case's dtype, rounded once
  Tensor lse, dq, dk, dv;              // f64
  std::vector<double> max_logit, dsink;  // [hq]
};

// One way of bringing keys to a rank: the buffers, each with its plan, and how to send gradients back.
struct Step {
  RunList keys;
  std::vector<Index> tokens;  // of the buffer's rows
};

class Runner {
 public:
  explicit Runner(const Case& c)
      : case_(c),
        problem_(problem_of(c)),
        layouts_(layouts_of(c, problem_)),
        definition_(c),
        engine_(c.seed),
        q_(make(definition_.q_tokens(), c.heads_q, c.dim_qk, false)),
        k_(make(definition_.k_tokens(), c.heads_k, c.dim_qk, true)),
        v_(make(definition_.k_tokens(), c.heads_k, c.dim_v, true)),
        dout_(make(definition_.q_tokens(), c.heads_q, c.dim_v, false)) {
    for (Index h = 0; h < c.heads_q; ++h) {
      const double constant = c.sink == Case::SinkKind::off_by_one ? 0 : kMinusInfinity<double>;
      sink_.push_back(c.sink == Case::SinkKind::learnable ? normal(engine_) : constant);
    }
    attention_.scale = c.scale;
    attention_.softcap = c.softcap;
    if (c.sink == Case::SinkKind::off_by_one) attention_.sink = Sink::off_by_one();
    if (c.sink == Case::SinkKind::learnable)
      attention_.sink = Sink::learnable(per_head(static_cast<const double*>(sink_.data()), DType::f64, c.heads_q));
  }

  std::vector<AttendReport> run() {
    const DenseProblem dense = dense_problem();
    const DenseForward forward = dense_forward(dense);
    const DenseBackward backward = dense_backward(dense, without_nan(dout_));
    std::vector<AttendReport> reports;
    const auto add = [&](const std::string& name, const std::vector<Step>& steps) {
      reports.push_back({name, compare(compute(steps), forward, backward)});
    };
    if (layouts_.q.rank_order().stride() != layouts_.k.rank_order().stride()) return reports;  // planner refuses
    if (layouts_.k.rank_order().stride() == 1) add("sequence order", {sequence_order()});
    add("rank order", {rank_order(0, case_.ranks)});
    std::vector<Step> ring;
    for (Index r = 0; r < case_.ranks; ++r) ring.push_back(rank_order(r, 1));
    add("ring", ring);
    return reports;
  }

 private:
  Tensor make(Index rows, Index heads, Index dim, bool keys) {
    return random_tensor(engine_, case_.dtype, rows, heads, dim,
                         [&](Index t) { return (keys ? definition_.k(t) : definition_.q(t)).real(); });
  }

  static std::vector<double> without_nan(const Tensor& t) {
    std::vector<double> values = to_f64(t.view);
    for (double& x : values) x = std::isnan(x) ? 0 : x;
    return values;
  }

  DenseProblem dense_problem() const {
    return {.tokens_q = definition_.q_tokens(),
            .tokens_k = definition_.k_tokens(),
            .heads_q = case_.heads_q,
            .heads_k = case_.heads_k,
            .dim_qk = case_.dim_qk,
            .dim_v = case_.dim_v,
            .q = to_f64(q_.view),
            .k = to_f64(k_.view),
            .v = to_f64(v_.view),
            .sees = [this](Index q, Index k) { return definition_.visible(q, k); },
            .scale = case_.scale.value_or(1 / std::sqrt(static_cast<double>(case_.dim_qk))),
            .softcap = case_.softcap,
            .sink = case_.sink == Case::SinkKind::none ? std::vector<double>{} : sink_};
  }

  Step sequence_order() const {
    Step s{layouts_.k.sequence_order(), {}};
    for (Index t = 0; t < definition_.k_tokens(); ++t) s.tokens.push_back(t);
    return s;
  }

  Step rank_order(Index first, Index count) const {
    Step s{layouts_.k.rank_order({first, count, 1}), {}};
    for (Index r = first; r < first + count; ++r) {
      const std::vector<Index> own = layouts_.k.tokens(r);
      s.tokens.insert(s.tokens.end(), own.begin(), own.end());
    }
    return s;
  }

  // The rows of a step's buffer; rows without a token stay NaN.
  static Tensor gather(Tensor& whole, const Step& step) {
    Tensor t(whole.view.dtype, step.keys.rows(), whole.view.heads, whole.view.dim);
    const std::size_t n = static_cast<std::size_t>(whole.row_bytes());
    for (std::size_t row = 0; row < step.tokens.size(); ++row) {
      if (step.tokens[row] == kNoToken) continue;
      std::copy_n(whole.bytes.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(step.tokens[row]) * n), n,
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
  static void scatter_add(const Tensor& part, const Step& step, Tensor& whole) {
    const Index width = whole.view.heads * whole.view.dim;
    for (std::size_t row = 0; row < step.tokens.size(); ++row) {
      if (step.tokens[row] == kNoToken) continue;
      double* to = whole.view.at<double>(step.tokens[row], 0);
      const double* from = part.view.at<double>(static_cast<Index>(row), 0);
      for (Index i = 0; i < width; ++i) to[i] += from[i];
    }
  }

  Results compute(const std::vector<Step>& steps) {
    const Index tq = definition_.q_tokens(), hq = case_.heads_q;
    Results r{Tensor(case_.dtype, tq, hq, case_.dim_v), Tensor(DType::f64, tq, hq, 1), f64_tensor(q_), f64_tensor(k_),
              f64_tensor(v_), std::vector<double>(static_cast<std::size_t>(hq), kMinusInfinity<double>),
              std::vector<double>(static_cast<std::size_t>(hq), 0.0)};
    // Tokens that no rank holds keep what is here: the values of a token that sees nothing.
    from_f64(std::vector<double>(static_cast<std::size_t>(tq * hq * case_.dim_v), 0.0), r.out.view);
    for (Tensor* t : {&r.dq, &r.dk, &r.dv}) std::fill(t->bytes.begin(), t->bytes.end(), std::byte{0});
    for (Index t = 0; t < tq; ++t)
      for (Index h = 0; h < hq; ++h) *r.lse.view.at<double>(t, h) = sink_[static_cast<std::size_t>(h)];
    for (Index rank = 0; rank < case_.ranks; ++rank) compute_rank(rank, steps, r);
    return r;
  }

  void compute_rank(Index rank, const std::vector<Step>& steps, Results& r) {
    const Index rows = layouts_.q.rows(), hq = case_.heads_q;
    Tensor q = shard(q_, rank), dout = shard(dout_, rank);
    Tensor out(case_.dtype, rows, hq, case_.dim_v), exact_out(DType::f64, rows, hq, case_.dim_v);
    Tensor lse(DType::f64, rows, hq, 1), max_logit(DType::f64, 1, hq, 1), dq(DType::f64, rows, hq, case_.dim_qk);
    std::vector<double> dq_sum(static_cast<std::size_t>(rows * hq * case_.dim_qk), 0.0);

    ReferenceState state(rows, hq, case_.dim_v);
    std::vector<Plan> plans;
    ForwardArgs forward{.q = q.view, .k = {}, .v = {}, .slices = {}, .attention = attention_};
    for (const Step& step : steps) {
      plans.push_back(make_plan(problem_, layouts_.q.runs(rank), step.keys));
      Tensor k = gather(k_, step), v = gather(v_, step);
      forward.k = k.view;
      forward.v = v.view;
      forward.slices = plans.back().slices;
      if (&step != &steps.back()) {
        reference_partial(forward, state);
        continue;
      }
      forward.out = out.view;
      forward.lse = lse.view;
      forward.max_logit = max_logit.view;
      if (steps.size() == 1) {
        reference_forward(forward);
      } else {
        reference_partial(forward, state);
        reference_finish(state, forward);
        forward.out = exact_out.view;
        reference_finish(state, forward);
      }
    }
    for (std::size_t n = 0; n < steps.size(); ++n) {
      Tensor k = gather(k_, steps[n]), v = gather(v_, steps[n]), dk = f64_tensor(k), dv = f64_tensor(v);
      Tensor dsink(DType::f64, 1, hq, 1);
      BackwardArgs backward{.q = q.view, .k = k.view, .v = v.view, .slices = plans[n].slices, .attention = attention_,
                            .dout = dout.view, .dq = dq.view, .dk = dk.view, .dv = dv.view};
      if (steps.size() > 1) {  // a part of the keys needs the whole row's statistics
        backward.out = exact_out.view;
        backward.lse = lse.view;
      } else if (case_.sink == Case::SinkKind::learnable) {
        backward.dsink = dsink.view;
      }
      reference_backward(backward);
      scatter_add(dk, steps[n], r.dk);
      scatter_add(dv, steps[n], r.dv);
      const std::vector<double> part = to_f64(dq.view);
      for (std::size_t i = 0; i < part.size(); ++i) dq_sum[i] += part[i];
      for (std::size_t h = 0; backward.dsink.given() && h < r.dsink.size(); ++h)
        r.dsink[h] += *dsink.view.at<double>(0, static_cast<Index>(h));
    }
    if (steps.size() > 1 && case_.sink == Case::SinkKind::learnable) add_dsink(plans, dout, exact_out, lse, r);
    from_f64(dq_sum, dq.view);
    for (auto [from, to] : {std::pair{&out, &r.out}, {&lse, &r.lse}, {&dq, &r.dq}})
      layouts_.q.unshard(rank, from->rows(), to->rows());
    for (Index h = 0; h < hq; ++h) {
      double& largest = r.max_logit[static_cast<std::size_t>(h)];
      largest = std::max(largest, *max_logit.view.at<double>(0, h));
    }
  }

  // The sink's gradient belongs to the row, not to a step: once, from the finished row. Padding is not read.
  void add_dsink(const std::vector<Plan>& plans, const Tensor& dout, const Tensor& out, const Tensor& lse,
                 Results& r) const {
    std::vector<bool> in_slice(static_cast<std::size_t>(layouts_.q.rows()), false);
    for (const Plan& plan : plans)
      for (const Slice& s : plan.slices) std::fill(in_slice.begin() + s.q_begin, in_slice.begin() + s.q_end, true);
    std::vector<double> o(static_cast<std::size_t>(case_.dim_v)), d(o);
    for (Index row = 0; row < layouts_.q.rows(); ++row) {
      if (!in_slice[static_cast<std::size_t>(row)]) continue;
      for (Index h = 0; h < case_.heads_q; ++h) {
        load_row(out.view, row, h, o.data());
        load_row(dout.view, row, h, d.data());
        const double share = std::exp(sink_[static_cast<std::size_t>(h)] - *lse.view.at<double>(row, h));
        for (std::size_t i = 0; i < o.size(); ++i) r.dsink[static_cast<std::size_t>(h)] -= share * o[i] * d[i];
      }
    }
  }

  // f64 arithmetic in another order, and the rounding of the output: nothing else may differ.
  static Measure measure(const std::string& name, std::vector<double> got, Bounded expected, Rounding rounded,
                         Index heads, Index dim) {
    constexpr double kOrder = 256 * 0x1p-53;  // sums in another order; bounds count one unit per term
    for (std::size_t i = 0; i < expected.bound.size(); ++i) {
      const double size = std::isfinite(expected.value[i]) ? std::abs(expected.value[i]) : 0;
      expected.bound[i] = kOrder * expected.bound[i] + rounded.relative * size + rounded.absolute;
    }
    const Comparison c = worst_element(got, expected, heads, dim);
    std::string where = "token " + std::to_string(c.row) + ", head " + std::to_string(c.head);
    if (heads * dim == 0 || c.row * heads * dim >= static_cast<Index>(got.size())) where = "nowhere";
    if (name == "max_logit" || name == "dsink") where = "head " + std::to_string(c.head);
    if (dim > 1) where += ", element " + std::to_string(c.i);
    return {name, c.ratio, c.relative_norm, where};
  }

  std::vector<Measure> compare(const Results& r, const DenseForward& f, const DenseBackward& b) const {
    const Index hq = case_.heads_q, hk = case_.heads_k, d = case_.dim_qk, dv = case_.dim_v;
    std::vector<Measure> m;
    m.push_back(measure("out", to_f64(r.out.view), f.out, rounding(case_.dtype), hq, dv));
    m.push_back(measure("lse", to_f64(r.lse.view), f.lse, kExact, hq, 1));
    m.push_back(measure("max_logit", r.max_logit, f.max_logit, kExact, hq, 1));
    m.push_back(measure("dq", to_f64(r.dq.view), b.dq, kExact, hq, d));
    m.push_back(measure("dk", to_f64(r.dk.view), b.dk, kExact, hk, d));
    m.push_back(measure("dv", to_f64(r.dv.view), b.dv, kExact, hk, dv));
    if (case_.sink == Case::SinkKind::learnable) m.push_back(measure("dsink", r.dsink, b.dsink, kExact, hq, 1));
    return m;
  }

  const Case& case_;
  Problem problem_;
  Layouts layouts_;
  Definition definition_;
  std::mt19937_64 engine_;
  Tensor q_, k_, v_, dout_;
  std::vector<double> sink_;  // [hq], -inf without one
  Attention attention_;
};

}  // namespace

bool AttendReport::ok() const {
  return std::all_of(measures.begin(), measures.end(), [](const Measure& m) { return m.worst < 1; });
}

std::vector<AttendReport> check_attention(const Case& c) { return Runner(c).run(); }

}  // namespace weft::check
