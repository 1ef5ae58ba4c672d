#include "check/judge.h"

#include <cmath>
#include <utility>

namespace weft::check {
namespace {

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

// exp may give 0 below 2^-126, and products of such shares go under: no f32 kernel is asked for less than this.
constexpr double kUnderflow = 0x1p-100;
// Second order: a rounding of a value that is off by one already.
double twice(double relative) { return 1 + 4 * relative; }

double dot(const double* a, const double* b, Index size) {
  double sum = 0;
  for (Index i = 0; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

void add_absolute(std::vector<double>& to, Index row, double factor, const double* from, Index size) {
  for (Index i = 0; i < size; ++i) to[at(row * size + i)] += factor * std::abs(from[i]);
}

// What the rounding of P, dS and out adds to each element, pair by pair.
struct Rounded {
  Rounded(const DenseProblem& p, std::optional<std::span<const double>> dout_, const DenseForward& forward_,
          const Arithmetic& by_)
      : problem(p), dout(dout_), forward(forward_), by(by_) {
    out.resize(forward.out.value.size());
    if (dout) {
      dq.resize(p.q.size());
      dk.resize(p.k.size());
      dv.resize(p.v.size());
      dsink.resize(at(p.heads_q));
    }
    for (Index head = 0; head < p.heads_q; ++head)
      for (Index i = 0; i < p.tokens_q; ++i) add_row(i, head);
  }

  // One visible key of a row: its share, and d share / d (q·k) without the other keys' part.
  struct Pair {
    Index row, key;
    double share, slope;
  };

  void add_row(Index i, Index head) {
    const DenseProblem& p = problem;
    const Index row = i * p.heads_q + head;
    std::vector<Pair> pairs;
    for (Index j = 0; j < p.tokens_k; ++j) {
      if (!p.sees(i, j)) continue;
      pairs.push_back(pair_of(row, j * p.heads_k + p.kv_head(head)));
      add_absolute(out, row, by.shares.of(pairs.back().share), p.v.data() + pairs.back().key * p.dim_v, p.dim_v);
    }
    if (!dout || pairs.empty()) return;
    double d = 0, d_error = 0;
    for (Index c = row * p.dim_v; c < (row + 1) * p.dim_v; ++c) {
      d += (*dout)[at(c)] * forward.out.value[at(c)];
      d_error += std::abs((*dout)[at(c)]) * (by.out.of(forward.out.value[at(c)]) + out[at(c)]);
    }
    for (const Pair& pair : pairs) add_pair(pair, d, d_error);
    if (!p.sink.empty()) dsink[at(head)] += std::exp(p.sink[at(head)] - forward.lse.value[at(row)]) * d_error;
  }

  Pair pair_of(Index row, Index key) const {
    const DenseProblem& p = problem;
    const double x = p.scale * dot(p.q.data() + row * p.dim_qk, p.k.data() + key * p.dim_qk, p.dim_qk);
    const double bent = p.softcap > 0 ? std::tanh(x / p.softcap) : 0;
    const double share = std::exp((p.softcap > 0 ? p.softcap * bent : x) - forward.lse.value[at(row)]);
    return {row, key, share, p.scale * (1 - bent * bent) * share};
  }

  void add_pair(const Pair& pair, double d, double d_error) {
    const DenseProblem& p = problem;
    const double *g = dout->data() + pair.row * p.dim_v, *v = p.v.data() + pair.key * p.dim_v;
    const double ds_error = by.shares.of(pair.slope * (dot(g, v, p.dim_v) - d)) + std::abs(pair.slope) * d_error;
    add_absolute(dq, pair.row, ds_error, p.k.data() + pair.key * p.dim_qk, p.dim_qk);
    add_absolute(dk, pair.key, ds_error, p.q.data() + pair.row * p.dim_qk, p.dim_qk);
    add_absolute(dv, pair.key, by.shares.of(pair.share), g, p.dim_v);
  }

  const DenseProblem& problem;
  std::optional<std::span<const double>> dout;
  const DenseForward& forward;
  const Arithmetic& by;
  std::vector<double> out, dq, dk, dv, dsink;  // as the tensors
};

// The allowed error in place of the bound; `rounded` is empty or as large.
void allow(Bounded& b, const Arithmetic& by, const std::vector<double>& rounded, Rounding stored) {
  const double more = twice(by.shares.relative + stored.relative);
  const double underflow = by.work.relative > 0x1p-50 ? kUnderflow : 0;
  for (std::size_t i = 0; i < b.bound.size(); ++i) {
    if (b.bound[i] == 0) continue;  // nothing contributes: exact
    b.bound[i] = by.order * by.work.relative * b.bound[i] + underflow + more * stored.of(b.value[i]);
    if (!rounded.empty()) b.bound[i] += more * rounded[i];
  }
}

}  // namespace

Rounding rounding(DType type) {
  switch (type) {
    case DType::f64:
      return {0x1p-53, 0x1p-1074};
    case DType::f32:
      return {0x1p-24, 0x1p-150};
    case DType::bf16:
      return {0x1p-8, 0x1p-134};
    case DType::f16:
      return {0x1p-11, 0x1p-25};
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      break;
  }
  detail::refuse_dtype(type);
}

Arithmetic exact_arithmetic(DType out) {
  return {.work = rounding(DType::f64), .order = 256, .shares = {}, .out = rounding(out), .gradients = {}};
}

Arithmetic kernel_arithmetic(DType inputs, DType gradients) {
  return {.work = rounding(DType::f32),
          .order = 16,  // sums of some hundred terms in f32, exp and tanh: 5 is seen in a hundred thousand elements
          .shares = size_of(inputs) == 2 ? rounding(inputs) : Rounding{},
          .out = rounding(inputs),
          .gradients = rounding(gradients)};
}

double order_of_keys(Index keys) {
  constexpr Index kShort = 256;
  return keys <= kShort ? 1 : static_cast<double>(keys) / kShort;
}

// f32 accumulates some roundings of 6e-8. A value rounded to bf16 is off by up to 2^-9 .. 2^-8 of itself, 2.2e-3 at most in
// the norm of many; P and dS, rounded too, add as much again to gradients.
double norm_limit(DType dtype, std::string_view tensor) {
  const bool gradient = tensor.starts_with("d");
  const bool statistic = tensor == "lse" || tensor == "max_logit";
  switch (dtype) {
    case DType::f64:
      return 1e-14;
    case DType::f32:
      return 3e-6;
    case DType::bf16:
      return statistic ? 3e-6 : gradient ? 8e-3 : 4e-3;
    case DType::f16:
      return statistic ? 3e-6 : gradient ? 1e-3 : 5e-4;
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      break;
  }
  detail::refuse_dtype(dtype);
}

Expected expected(const DenseProblem& problem, std::optional<std::span<const double>> dout, const Arithmetic& by) {
  DenseForward forward = dense_forward(problem);
  DenseBackward backward;
  if (dout) backward = dense_backward(problem, *dout);
  std::vector<double> out, dq, dk, dv, dsink;
  if (by.shares.relative > 0) {
    Rounded more(problem, dout, forward, by);
    out = std::move(more.out);
    dq = std::move(more.dq);
    dk = std::move(more.dk);
    dv = std::move(more.dv);
    dsink = std::move(more.dsink);
  }
  allow(forward.out, by, out, by.out);
  allow(forward.lse, by, {}, {});
  allow(forward.max_logit, by, {}, {});
  allow(backward.dq, by, dq, by.gradients);
  allow(backward.dk, by, dk, by.gradients);
  allow(backward.dv, by, dv, by.gradients);
  allow(backward.dsink, by, dsink, {});
  return {std::move(forward.out), std::move(forward.lse), std::move(forward.max_logit), std::move(backward.dq),
          std::move(backward.dk), std::move(backward.dv), std::move(backward.dsink)};
}

}  // namespace weft::check
