#include "check/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "index.h"

namespace weft::check {
namespace {

std::vector<double> without_nan(std::vector<double> values) {
  for (double& x : values) x = std::isnan(x) ? 0 : x;
  return values;
}

std::vector<Index> all_tokens(Index count) {
  std::vector<Index> all(at(count));
  std::iota(all.begin(), all.end(), Index{0});
  return all;
}

// f64 of some rows of a tensor.
std::vector<double> some_rows(const Tensor& t, const std::vector<Index>& rows) {
  if (static_cast<Index>(rows.size()) == t.view.rows) return to_f64(t.view);
  const Index width = t.view.heads * t.view.dim;
  std::vector<double> values(rows.size() * at(width));
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (Index h = 0; h < t.view.heads; ++h)
      load_row(t.view, rows[i], h, values.data() + i * at(width) + at(h * t.view.dim));
  return values;
}

// `count` of them at random, in front.
void shuffle_front(std::vector<Index>& list, std::size_t count, std::mt19937_64& engine) {
  for (std::size_t i = 0; i < count; ++i) std::swap(list[i], list[i + engine() % (list.size() - i)]);
}

void fill(const Tensor& t, double value) {
  from_f64(std::vector<double>(at(t.view.rows * t.view.heads * t.view.dim), value), t.view);
}

}  // namespace

Oracle::Oracle(const Case& c, const Arithmetic& by, std::optional<Index> rows, std::optional<Index> keys)
    : case_(c),
      problem_(problem_of(case_)),
      definition_(case_),
      engine_(c.seed),
      q_(make(definition_.q_tokens(), c.heads_q, c.dim_qk, false)),
      k_(make(definition_.k_tokens(), c.heads_k, c.dim_qk, true)),
      v_(make(definition_.k_tokens(), c.heads_k, c.dim_v, true)),
      dout_(make(definition_.q_tokens(), c.heads_q, c.dim_v, false)) {
  choose_attention();
  Arithmetic random = by;
  random.inputs = Inputs::random;
  if (rows && keys) {
    rows_ = choose_tokens(*rows, false);
    keys_ = choose_tokens(*keys, true);
    want_ = expected(dense_problem(all_tokens(definition_.q_tokens())), without_nan(to_f64(dout_.view)), random,
                     {rows_, keys_});
  } else {
    choose_rows(rows);
    want_ = expected(dense_problem(rows_), without_nan(some_rows(dout_, rows_)), random);
  }
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
  silent_ = true;
  shuffle_front(rows_, at(*rows), engine_);
  rows_.resize(at(*rows));
  std::sort(rows_.begin(), rows_.end());
  const std::vector<double> zeros(at(case_.dim_v), 0.0);
  for (Index t = 0; t < definition_.q_tokens(); ++t) {
    if (!definition_.q(t).real() || std::binary_search(rows_.begin(), rows_.end(), t)) continue;
    for (Index h = 0; h < case_.heads_q; ++h) store_row(dout_.view, t, h, zeros.data());
  }
}

std::vector<Index> Oracle::ends(bool keys) const {
  std::vector<Index> found;
  const Index tokens = keys ? definition_.k_tokens() : definition_.q_tokens();
  const auto place = [&](Index t) { return keys ? definition_.k(t) : definition_.q(t); };
  for (Index t = 0; t < tokens; ++t) {
    const bool first = t == 0 || place(t - 1).sequence != place(t).sequence;
    const bool last = t + 1 == tokens || place(t + 1).sequence != place(t).sequence;
    if (first || last) found.push_back(t);
  }
  const Layouts layouts = layouts_of(case_, problem_);
  for (Index rank = 0; rank < case_.ranks; ++rank) {
    const std::vector<Index> held = (keys ? layouts.k : layouts.q).tokens(rank);
    for (std::size_t i = 0; i < held.size(); ++i) {
      if (held[i] == kNoToken) continue;
      if (i == 0 || i + 1 == held.size() || held[i - 1] != held[i] - 1 || held[i + 1] != held[i] + 1)
        found.push_back(held[i]);
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

std::vector<Index> Oracle::choose_tokens(Index count, bool keys) {
  std::vector<Index> all = all_tokens(keys ? definition_.k_tokens() : definition_.q_tokens());
  if (count >= static_cast<Index>(all.size())) return all;
  std::vector<Index> chosen = ends(keys);
  const std::size_t from_ends = std::min(chosen.size(), at(count / 2));
  shuffle_front(chosen, from_ends, engine_);
  chosen.resize(from_ends);
  std::erase_if(all, [&](Index t) { return std::find(chosen.begin(), chosen.end(), t) != chosen.end(); });
  shuffle_front(all, at(count) - from_ends, engine_);
  chosen.insert(chosen.end(), all.begin(), all.begin() + (count - static_cast<Index>(from_ends)));
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

// Of these query tokens and all keys.
DenseProblem Oracle::dense_problem(const std::vector<Index>& rows) const {
  return {.tokens_q = static_cast<Index>(rows.size()),
          .tokens_k = definition_.k_tokens(),
          .heads_q = case_.heads_q,
          .heads_k = case_.heads_k,
          .dim_qk = case_.dim_qk,
          .dim_v = case_.dim_v,
          .q = some_rows(q_, rows),
          .k = to_f64(k_.view),
          .v = to_f64(v_.view),
          .ranges = [this, rows](Index q, std::vector<Range>& to) { definition_.visible_runs(rows[at(q)], to); },
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
                        Index dim, const std::vector<Index>* tokens) const {
  const Comparison c = worst_element(got, want, heads, dim);
  const bool somewhere = heads * dim > 0 && c.row * heads * dim < static_cast<Index>(got.size());
  const Index token = tokens != nullptr && somewhere ? (*tokens)[at(c.row)] : c.row;
  std::string where = "token " + std::to_string(token) + ", head " + std::to_string(c.head);
  if (!somewhere) where = "nowhere";
  if (name == "max_logit" || name == "dsink") where = "head " + std::to_string(c.head);
  if (dim > 1) where += ", element " + std::to_string(c.i);
  return {name, c.ratio, c.relative_norm, where};
}

// Rows that were not chosen have a dout of 0, and so a dq of exactly 0.
std::optional<Measure> Oracle::stray_dq(const Tensor& dq) const {
  const Index width = dq.view.heads * dq.view.dim;
  const std::vector<double> values = silent_ ? to_f64(dq.view) : std::vector<double>{};
  for (Index i = 0; i < static_cast<Index>(values.size()); ++i) {
    const Index token = i / width;
    if (values[at(i)] == 0 || std::binary_search(rows_.begin(), rows_.end(), token)) continue;
    const std::string where = "token " + std::to_string(token) + ", head " + std::to_string(i % width / dq.view.dim);
    return Measure{"dq", std::numeric_limits<double>::infinity(), 1, where + ", whose dout is 0"};
  }
  return {};
}

// Where not all is compared, all must be numbers at least.
std::optional<Measure> Oracle::no_number(const std::string& name, const Tensor& t) const {
  const std::vector<double> values = keys_ ? to_f64(t.view) : std::vector<double>{};
  const auto found = std::find_if(values.begin(), values.end(), [](double x) { return !std::isfinite(x); });
  if (found == values.end()) return {};
  const Index i = static_cast<Index>(found - values.begin()), row = i / (t.view.heads * t.view.dim);
  return Measure{name, std::numeric_limits<double>::infinity(), 1,
                 "token " + std::to_string(row) + ", head " + std::to_string(i / t.view.dim % t.view.heads) +
                     ", which is no number"};
}

Measure Oracle::compare_some(const std::string& name, const Tensor& got, const Bounded& want,
                             const std::vector<Index>* tokens) const {
  if (const std::optional<Measure> wrong = no_number(name, got)) return *wrong;
  const std::vector<double> values = tokens != nullptr ? some_rows(got, *tokens) : to_f64(got.view);
  return measure(name, values, want, got.view.heads, got.view.dim, tokens);
}

std::vector<Measure> Oracle::compare(const Results& r) const {
  const Index hq = case_.heads_q;
  const std::vector<Index>* keys = keys_ ? &*keys_ : nullptr;
  std::vector<Measure> m;
  m.push_back(compare_some("out", r.out, want_.out, &rows_));
  if (keys_)
    m.push_back(measure("lse", to_f64(r.lse.view), want_.lse, hq, 1, nullptr));
  else
    m.push_back(measure("lse", some_rows(r.lse, rows_), want_.lse, hq, 1, &rows_));
  if (!silent_) m.push_back(measure("max_logit", r.max_logit, want_.max_logit, hq, 1, nullptr));
  const std::optional<Measure> stray = stray_dq(r.dq);
  m.push_back(stray ? *stray : compare_some("dq", r.dq, want_.dq, &rows_));
  m.push_back(compare_some("dk", r.dk, want_.dk, keys));
  m.push_back(compare_some("dv", r.dv, want_.dv, keys));
  if (learnable()) m.push_back(measure("dsink", r.dsink, want_.dsink, hq, 1, nullptr));
  return m;
}

}  // namespace weft::check
