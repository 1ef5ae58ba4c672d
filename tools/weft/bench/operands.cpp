#include "bench/operands.h"

#include <cmath>

#include "index.h"

namespace weft::tool {
namespace {

Index bytes_of(const check::Tensor& t) { return static_cast<Index>(t.bytes.size()); }

}  // namespace

Operands::Operands(const BenchTask& task) : Operands(task, check::problem_of(task.problem)) {}

Operands::Operands(const BenchTask& task, const Problem& problem)
    : Operands(task.problem, problem.packing().q().tokens(), problem.packing().k().tokens(),
               task.pass == Pass::backward, 0) {
  slices_ = problem.global_slices();
}

Operands::Operands(const check::Case& c, Index q_rows, Index k_rows, bool backward, std::uint64_t seed)
    : case_(c),
      random_(88172645463325252u + seed),
      sink_(at(c.heads_q), 0.5f),
      dsink_(sink_),
      q_(filled(q_rows, c.heads_q, c.dim_qk)),
      k_(filled(k_rows, c.heads_k, c.dim_qk)),
      v_(filled(k_rows, c.heads_k, c.dim_v)),
      out_(filled(q_rows, c.heads_q, c.dim_v)),
      lse_(DType::f32, q_rows, c.heads_q, 1) {
  attention_.scale = case_.scale;
  attention_.softcap = case_.softcap;
  if (case_.sink == check::Case::SinkKind::off_by_one) attention_.sink = Sink::off_by_one();
  if (case_.sink == check::Case::SinkKind::learnable)
    attention_.sink = Sink::learnable(per_head(static_cast<const float*>(sink_.data()), DType::f32, case_.heads_q));
  // 10: probabilities exp(logit - 10) that are neither 0 nor huge.
  std::fill_n(lse_.view.at<float>(0, 0), lse_.view.rows * lse_.view.heads, 10.0f);
  if (backward)
    gradients_.emplace(Gradients{filled(q_rows, c.heads_q, c.dim_v), filled(q_rows, c.heads_q, c.dim_qk),
                                 filled(k_rows, c.heads_k, c.dim_qk), filled(k_rows, c.heads_k, c.dim_v)});
}

// Near enough to a unit normal for a softmax at one draw an element: the sum of four uniforms has variance 4/12.
check::Tensor Operands::filled(Index rows, Index heads, Index dim) {
  check::Tensor t(case_.dtype, rows, heads, dim);
  with_type(case_.dtype, [&]<class T>(std::type_identity<T>) {
    T* const to = t.view.at<T>(0, 0);
    for (Index i = 0; i < rows * heads * dim; ++i) {
      random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;  // xorshift
      double sum = -2;
      for (int part = 0; part < 4; ++part) sum += static_cast<double>(random_ >> (16 * part) & 0xffff) * 0x1p-16;
      to[i] = static_cast<T>(sum * std::sqrt(3.0));
    }
  });
  return t;
}

void Operands::run_forward(std::string_view kernel) {
  attend({.q = q_.view,
          .k = k_.view,
          .v = v_.view,
          .slices = slices_,
          .attention = attention_,
          .out = out_.view,
          .lse = lse_.view},
         kernel);
}

void Operands::run(std::string_view kernel) {
  if (!gradients_) return run_forward(kernel);
  const bool learnable = attention_.sink.kind == Sink::Kind::learnable;
  attend_backward({.q = q_.view,
                   .k = k_.view,
                   .v = v_.view,
                   .slices = slices_,
                   .attention = attention_,
                   .dout = gradients_->dout.view,
                   .out = out_.view,
                   .lse = lse_.view,
                   .dq = gradients_->dq.view,
                   .dk = gradients_->dk.view,
                   .dv = gradients_->dv.view,
                   .dsink = learnable ? per_head<void>(dsink_.data(), DType::f32, case_.heads_q) : TensorView{}},
                  kernel);
}

void Operands::run(Executor& executor, Pass pass) {
  if (pass == Pass::forward)
    executor.forward(
        {.q = q_.view, .k = k_.view, .v = v_.view, .attention = attention_, .out = out_.view, .lse = lse_.view});
  else
    executor.backward({.q = q_.view,
                       .k = k_.view,
                       .v = v_.view,
                       .attention = attention_,
                       .dout = gradients_->dout.view,
                       .out = out_.view,
                       .lse = lse_.view,
                       .dq = gradients_->dq.view,
                       .dk = gradients_->dk.view,
                       .dv = gradients_->dv.view});
}

Index Operands::bytes() const {
  const Index forward = bytes_of(q_) + bytes_of(k_) + bytes_of(v_) + bytes_of(out_) + bytes_of(lse_);
  if (!gradients_) return forward;
  return forward + bytes_of(gradients_->dout) + bytes_of(gradients_->dq) + bytes_of(gradients_->dk) +
         bytes_of(gradients_->dv);
}

}  // namespace weft::tool
