#include "check/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace weft::check {
namespace {

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

std::vector<double> without_nan(std::vector<double> values) {
  for (double& x : values) x = std::isnan(x) ? 0 : x;
  return values;
}

void fill(const Tensor& t, double value) {
  from_f64(std::vector<double>(at(t.view.rows * t.view.heads * t.view.dim), value), t.view);
}

}  // namespace

Oracle::Oracle(const Case& c, const Arithmetic& by, std::optional<Index> rows)
    : case_(c),
      problem_(problem_of(case_)),
      definition_(case_),
      engine_(c.seed),
      q_(make(definition_.q_tokens(), c.heads_q, c.dim_qk, false)),
      k_(make(definition_.k_tokens(), c.heads_k, c.dim_qk, true)),
      v_(make(definition_.k_tokens(), c.heads_k, c.dim_v, true)),
      dout_(make(definition_.q_tokens(), c.heads_q, c.dim_v, false)) {
  choose_attention();
  choose_rows(rows);
  const std::vector<double> dout = without_nan(chosen(dout_));
  want_ = expected(dense_problem(), dout, by);
}

Tensor Oracle::make(Index rows, Index heads, Index dim, bool keys) {
  return random_tensor(engine_, case_.dtype, rows, heads, dim,
                       [&](Index t) { return (keys ? definition_.k(t) : definition_.q(t)).real(); });
}

void Oracle::choose_attention() {
  const Index hq = case_.heads_q;
  const double constant = case_.sink == Case::SinkKind::off_by_one ? 0 : kMinusInfinity<double>;
  for (Index h = 0; h < hq; ++h) sink_.push_back(learnable() ? normal(engine_) : constant);
  attention_.scale = case_.scale;
  attention_.softcap = case_.softcap;
  attention_.head_map = case_.head_map;
  if (case_.sink == Case::SinkKind::off_by_one) attention_.sink = Sink::off_by_one();
  if (learnable())
    attention_.sink = Sink::learnable(per_head(static_cast<const double*>(sink_.data()), DType::f64, hq));
}

void Oracle::choose_rows(std::optional<Index> rows) {
  for (Index t = 0; t < definition_.q_tokens(); ++t)
    if (!rows || definition_.q(t).real()) rows_.push_back(t);
  if (!rows || *rows >= static_cast<Index>(rows_.size())) return;
  sampled_ = true;
  for (std::size_t i = 0; i < at(*rows); ++i) std::swap(rows_[i], rows_[i + engine_() % (rows_.size() - i)]);
  rows_.resize(at(*rows));
  std::sort(rows_.begin(), rows_.end());
  const std::vector<double> zeros(at(case_.dim_v), 0.0);
  for (Index t = 0; t < definition_.q_tokens(); ++t) {
    if (!definition_.q(t).real() || std::binary_search(rows_.begin(), rows_.end(), t)) continue;
    for (Index h = 0; h < case_.heads_q; ++h) store_row(dout_.view, t, h, zeros.data());
  }
}

std::vector<double> Oracle::chosen(const Tensor& t) const {
  if (static_cast<Index>(rows_.size()) == t.view.rows) return to_f64(t.view);
  const Index width = t.view.heads * t.view.dim;
  std::vector<double> values(rows_.size() * at(width));
  for (std::size_t i = 0; i < rows_.size(); ++i)
    for (Index h = 0; h < t.view.heads; ++h)
      load_row(t.view, rows_[i], h, values.data() + i * at(width) + at(h * t.view.dim));
  return values;
}

DenseProblem Oracle::dense_problem() {
  const Index tk = definition_.k_tokens();
  for (const Index q : rows_)
    for (Index k = 0; k < tk; ++k) visible_.push_back(definition_.visible(q, k) ? 1 : 0);
  return {.tokens_q = static_cast<Index>(rows_.size()),
          .tokens_k = tk,
          .heads_q = case_.heads_q,
          .heads_k = case_.heads_k,
          .dim_qk = case_.dim_qk,
          .dim_v = case_.dim_v,
          .q = chosen(q_),
          .k = to_f64(k_.view),
          .v = to_f64(v_.view),
          .sees = [this, tk](Index q, Index k) { return visible_[at(q * tk + k)] != 0; },
          .scale = case_.scale.value_or(1 / std::sqrt(static_cast<double>(case_.dim_qk))),
          .softcap = case_.softcap,
          .sink = case_.sink == Case::SinkKind::none ? std::vector<double>{} : sink_,
          .head_map = case_.head_map};
}

Results Oracle::nothing(const ResultTypes& types) const {
  const Index tq = definition_.q_tokens(), hq = case_.heads_q;
  const auto like = [&](const Tensor& t) { return Tensor(types.gradients, t.view.rows, t.view.heads, t.view.dim); };
  Results r{Tensor(types.out, tq, hq, case_.dim_v),
            Tensor(types.lse, tq, hq, 1),
            like(q_),
            like(k_),
            like(v_),
            std::vector<double>(at(hq), kMinusInfinity<double>),
            std::vector<double>(at(hq), 0.0)};
  for (const Tensor* t : {&r.out, &r.dq, &r.dk, &r.dv}) fill(*t, 0);
  for (Index t = 0; t < tq; ++t)
    for (Index h = 0; h < hq; ++h) store_row(r.lse.view, t, h, &sink_[at(h)]);
  return r;
}

Measure Oracle::measure(const std::string& name, const std::vector<double>& got, const Bounded& want, Index heads,
                        Index dim, bool queries) const {
  const Comparison c = worst_element(got, want, heads, dim);
  const bool somewhere = heads * dim > 0 && c.row * heads * dim < static_cast<Index>(got.size());
  const Index token = queries && somewhere ? rows_[at(c.row)] : c.row;
  std::string where = "token " + std::to_string(token) + ", head " + std::to_string(c.head);
  if (!somewhere) where = "nowhere";
  if (name == "max_logit" || name == "dsink") where = "head " + std::to_string(c.head);
  if (dim > 1) where += ", element " + std::to_string(c.i);
  return {name, c.ratio, c.relative_norm, where};
}

// Rows that were not chosen have a dout of 0, and so a dq of exactly 0.
std::optional<Measure> Oracle::stray_dq(const Tensor& dq) const {
  const Index width = dq.view.heads * dq.view.dim;
  const std::vector<double> values = sampled_ ? to_f64(dq.view) : std::vector<double>{};
  for (Index i = 0; i < static_cast<Index>(values.size()); ++i) {
    const Index token = i / width;
    if (values[at(i)] == 0 || std::binary_search(rows_.begin(), rows_.end(), token)) continue;
    const std::string where = "token " + std::to_string(token) + ", head " + std::to_string(i % width / dq.view.dim);
    return Measure{"dq", std::numeric_limits<double>::infinity(), 1, where + ", whose dout is 0"};
  }
  return {};
}

std::vector<Measure> Oracle::compare(const Results& r) const {
  const Index hq = case_.heads_q, hk = case_.heads_k, d = case_.dim_qk, dv = case_.dim_v;
  std::vector<Measure> m;
  m.push_back(measure("out", chosen(r.out), want_.out, hq, dv, true));
  m.push_back(measure("lse", chosen(r.lse), want_.lse, hq, 1, true));
  if (!sampled_) m.push_back(measure("max_logit", r.max_logit, want_.max_logit, hq, 1, false));
  const std::optional<Measure> stray = stray_dq(r.dq);
  m.push_back(stray ? *stray : measure("dq", chosen(r.dq), want_.dq, hq, d, true));
  m.push_back(measure("dk", to_f64(r.dk.view), want_.dk, hk, d, false));
  m.push_back(measure("dv", to_f64(r.dv.view), want_.dv, hk, dv, false));
  if (learnable()) m.push_back(measure("dsink", r.dsink, want_.dsink, hq, 1, false));
  return m;
}

}  // namespace weft::check
