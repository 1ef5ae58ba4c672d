#include "check/dense.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "index.h"

namespace weft::check {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A matrix [tokens_q, tokens_k] of one head.
struct Matrix {
  Matrix(Index rows, Index columns_, double fill = 0) : columns(columns_), values(at(rows * columns_), fill) {}
  double& operator()(Index i, Index j) { return values[at(i * columns + j)]; }
  double operator()(Index i, Index j) const { return values[at(i * columns + j)]; }

  Index columns;
  std::vector<double> values;
};

// Everything about one query head. Hidden pairs: seen 0, logit -inf, the rest 0.
struct Head {
  Head(const DenseProblem& p, Index head);

  Matrix seen, logit;
  Matrix slope;                                // d logit / d (scale·q·k): 1, or 1 - (logit / softcap)^2
  Matrix logit_bound;                          // of the logit
  Matrix prob;                                 // softmax
  Matrix prob_bound;                           // softmax depends on every logit: P·(1 + |dx| + sum of P·|dx|)
  std::vector<double> sink_prob, spread, lse;  // [tq]; spread: sum of P·|dx|
};

void score(const DenseProblem& p, Index head, Head& h) {
  for (Index i = 0; i < p.tokens_q; ++i) {
    for (Index j = 0; j < p.tokens_k; ++j) {
      if (!p.sees(i, j)) continue;
      const Index row = i * p.heads_q + head, key = j * p.heads_k + p.kv_head(head);
      double x = 0, terms = 0;
      for (Index c = 0; c < p.dim_qk; ++c) {
        const double term = p.scale * p.q[at(row * p.dim_qk + c)] * p.k[at(key * p.dim_qk + c)];
        x += term;
        terms += std::abs(term);
      }
      const double tanh = p.softcap > 0 ? std::tanh(x / p.softcap) : 0;
      h.seen(i, j) = 1;
      h.logit(i, j) = p.softcap > 0 ? p.softcap * tanh : x;
      h.slope(i, j) = 1 - tanh * tanh;
      h.logit_bound(i, j) = p.softcap > 0 ? h.slope(i, j) * terms + std::abs(h.logit(i, j)) : terms;
    }
  }
}

void softmax(const DenseProblem& p, Index head, Head& h) {
  const double sink = p.sink.empty() ? -kInfinity : p.sink[at(head)];
  for (Index i = 0; i < p.tokens_q; ++i) {
    double top = sink;
    for (Index j = 0; j < p.tokens_k; ++j) top = std::max(top, h.logit(i, j));
    if (top == -kInfinity) continue;
    double total = std::exp(sink - top);
    for (Index j = 0; j < p.tokens_k; ++j) total += std::exp(h.logit(i, j) - top);
    h.lse[at(i)] = top + std::log(total);
    h.sink_prob[at(i)] = std::exp(sink - top) / total;
    for (Index j = 0; j < p.tokens_k; ++j) {
      h.prob(i, j) = std::exp(h.logit(i, j) - top) / total;
      h.spread[at(i)] += h.prob(i, j) * h.logit_bound(i, j);
    }
    for (Index j = 0; j < p.tokens_k; ++j) {
      h.prob_bound(i, j) = h.prob(i, j) * (1 + h.logit_bound(i, j) + h.spread[at(i)]);
    }
  }
}

Head::Head(const DenseProblem& p, Index head)
    : seen(p.tokens_q, p.tokens_k),
      logit(p.tokens_q, p.tokens_k, -kInfinity),
      slope(p.tokens_q, p.tokens_k),
      logit_bound(p.tokens_q, p.tokens_k),
      prob(p.tokens_q, p.tokens_k),
      prob_bound(p.tokens_q, p.tokens_k),
      sink_prob(at(p.tokens_q)),
      spread(at(p.tokens_q)),
      lse(at(p.tokens_q), -kInfinity) {
  score(p, head, *this);
  softmax(p, head, *this);
}

Bounded zeros(Index size) { return {std::vector<double>(at(size)), std::vector<double>(at(size))}; }

// to[i] += factor·from[j] over dim elements, and the same of absolute values.
void add(Bounded& to, Index i, double factor, double factor_bound, std::span<const double> from, Index j, Index dim) {
  for (Index c = 0; c < dim; ++c) {
    to.value[at(i * dim + c)] += factor * from[at(j * dim + c)];
    to.bound[at(i * dim + c)] += factor_bound * std::abs(from[at(j * dim + c)]);
  }
}

// dP = dout·v for all visible pairs of a head.
struct ShareGradient {
  ShareGradient(const DenseProblem& p, const Head& h, std::span<const double> dout, Index head)
      : value(p.tokens_q, p.tokens_k), bound(p.tokens_q, p.tokens_k) {
    for (Index i = 0; i < p.tokens_q; ++i) {
      for (Index j = 0; j < p.tokens_k; ++j) {
        if (h.seen(i, j) == 0) continue;
        const Index row = i * p.heads_q + head, key = j * p.heads_k + p.kv_head(head);
        for (Index c = 0; c < p.dim_v; ++c) {
          const double term = dout[at(row * p.dim_v + c)] * p.v[at(key * p.dim_v + c)];
          value(i, j) += term;
          bound(i, j) += std::abs(term);
        }
      }
    }
  }
  Matrix value, bound;
};

// One row of one head: the Jacobian of softmax is P_j·(delta_jl - P_l), the sink's column included (its dP is 0).
void backward_row(const DenseProblem& p, const Head& h, const ShareGradient& dp, std::span<const double> dout, Index i,
                  Index head, DenseBackward& to) {
  const Index row = i * p.heads_q + head;
  double mean = 0, mean_terms = 0, mean_bound = 0;
  for (Index j = 0; j < p.tokens_k; ++j) {
    mean += h.prob(i, j) * dp.value(i, j);
    mean_terms += h.prob(i, j) * dp.bound(i, j);
    mean_bound += h.prob_bound(i, j) * dp.bound(i, j);
  }
  to.dsink.value[at(head)] -= h.sink_prob[at(i)] * mean;
  to.dsink.bound[at(head)] += h.sink_prob[at(i)] * ((1 + h.spread[at(i)]) * mean_terms + mean_bound);
  for (Index j = 0; j < p.tokens_k; ++j) {
    if (h.seen(i, j) == 0) continue;
    const Index key = j * p.heads_k + p.kv_head(head);
    const double slope = h.slope(i, j), scale = std::abs(p.scale);
    // The product rule: the absolute terms of each factor times the error of the others.
    const double terms = dp.bound(i, j) + mean_terms;
    const double slope_bound =
        p.softcap > 0 ? 2 * std::abs(h.logit(i, j)) * h.logit_bound(i, j) / std::pow(p.softcap, 2) : 0;
    const double ds = p.scale * slope * h.prob(i, j) * (dp.value(i, j) - mean);
    const double ds_bound =
        scale * slope * (h.prob_bound(i, j) * terms + h.prob(i, j) * (dp.bound(i, j) + mean_bound)) +
        scale * slope_bound * h.prob(i, j) * terms;
    add(to.dq, row, ds, ds_bound, p.k, key, p.dim_qk);
    add(to.dk, key, ds, ds_bound, p.q, row, p.dim_qk);
    add(to.dv, key, h.prob(i, j), h.prob_bound(i, j), dout, row, p.dim_v);
  }
}

}  // namespace

DenseForward dense_forward(const DenseProblem& p) {
  DenseForward to{zeros(p.tokens_q * p.heads_q * p.dim_v), zeros(p.tokens_q * p.heads_q), zeros(p.heads_q)};
  for (Index head = 0; head < p.heads_q; ++head) {
    const Head h(p, head);
    double& largest = to.max_logit.value[at(head)] = -kInfinity;
    for (Index i = 0; i < p.tokens_q; ++i) {
      const Index row = i * p.heads_q + head;
      const double lse = h.lse[at(i)];
      to.lse.value[at(row)] = lse;
      to.lse.bound[at(row)] = lse == -kInfinity ? 0 : 1 + h.spread[at(i)] + std::abs(lse);
      for (Index j = 0; j < p.tokens_k; ++j) {
        if (h.seen(i, j) == 0) continue;
        const Index key = j * p.heads_k + p.kv_head(head);
        add(to.out, row, h.prob(i, j), h.prob_bound(i, j), p.v, key, p.dim_v);
        largest = std::max(largest, h.logit(i, j));
        to.max_logit.bound[at(head)] = std::max(to.max_logit.bound[at(head)], h.logit_bound(i, j));
      }
    }
  }
  return to;
}

DenseBackward dense_backward(const DenseProblem& p, std::span<const double> dout) {
  DenseBackward to{zeros(p.tokens_q * p.heads_q * p.dim_qk), zeros(p.tokens_k * p.heads_k * p.dim_qk),
                   zeros(p.tokens_k * p.heads_k * p.dim_v), zeros(p.heads_q)};
  for (Index head = 0; head < p.heads_q; ++head) {
    const Head h(p, head);
    const ShareGradient dp(p, h, dout, head);
    for (Index i = 0; i < p.tokens_q; ++i) backward_row(p, h, dp, dout, i, head, to);
  }
  return to;
}

Comparison worst_element(std::span<const double> got, const Bounded& expected, Index heads, Index dim) {
  Comparison worst;
  if (got.size() != expected.value.size()) return {.ratio = kInfinity, .relative_norm = kInfinity};
  double error_squares = 0, expected_squares = 0, bound_squares = 0;
  for (Index i = 0; i < static_cast<Index>(expected.value.size()); ++i) {
    const double g = got[at(i)], e = expected.value[at(i)], bound = expected.bound[at(i)];
    const double error = g == e ? 0 : std::abs(g - e);  // equal infinities are equal
    double ratio = error == 0 ? 0 : error / bound;
    if (!(ratio < kInfinity)) ratio = kInfinity;
    if (ratio > worst.ratio || i == 0) {
      worst = {ratio, g, e, bound, i / (heads * dim), i / dim % heads, i % dim, 0};
    }
    if (!std::isfinite(error) || !std::isfinite(e)) continue;
    error_squares += error * error;
    expected_squares += e * e;
    bound_squares += bound * bound;
  }
  const double reference_squares = expected_squares > 0 ? expected_squares : bound_squares;
  if (error_squares > 0) worst.relative_norm = std::sqrt(error_squares / reference_squares);
  return worst;
}

}  // namespace weft::check
