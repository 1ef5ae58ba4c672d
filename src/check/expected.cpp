// Values and allowed errors row by row, in memory that grows with the tokens and not with their pairs: of all rows and
// keys, or of those that were chosen. docs/trust.md has the derivation of what is allowed.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "check/judge.h"
#include "index.h"

namespace weft::check {
namespace {

constexpr double kUnbounded = std::numeric_limits<double>::infinity();
// exp may give 0 below 2^-126, and products of such probabilities underflow: no f32 kernel is asked for less than this.
constexpr double kUnderflow = 0x1p-100;
// Of n roundings in a sum of equal signs, sqrt(n) times this is seven standard deviations (docs/trust.md).
constexpr double kWalk = 1.5;
// Standard deviations that a sum of rounded probabilities may be off by, if each is rounded by as much as can be.
constexpr double kRoundedDeviations = 6;

// Second-order terms: a rounding of a value that was rounded before.
double twice(double relative) { return 1 + 4 * relative; }

double walk(double terms) { return kWalk * std::sqrt(terms); }

// Eight independent sums, which compilers vectorize.
double dot(const double* a, const double* b, Index size) {
  constexpr Index kSums = 8;
  double sums[kSums] = {}, sum = 0;
  Index i = 0;
  for (; i + kSums <= size; i += kSums)
    for (Index x = 0; x < kSums; ++x) sums[x] += a[i + x] * b[i + x];
  for (; i < size; ++i) sum += a[i] * b[i];
  for (const double x : sums) sum += x;
  return sum;
}

double dot_absolute(const double* a, const double* b, Index size) {
  double sum = 0;
  for (Index i = 0; i < size; ++i) sum += std::abs(a[i] * b[i]);
  return sum;
}

double largest_of(const std::vector<double>& values, double largest) {
  double lanes[4] = {largest, largest, largest, largest};
  for (std::size_t i = 0; i < values.size(); ++i) lanes[i % 4] = std::max(lanes[i % 4], values[i]);
  return std::max(std::max(lanes[0], lanes[1]), std::max(lanes[2], lanes[3]));
}

// [heads][dim][tokens] of [tokens, heads, dim]: loops over the keys of a row run through neighbours.
std::vector<double> by_columns(const std::vector<double>& from, Index tokens, Index columns) {
  std::vector<double> to(from.size());
  for (Index t = 0; t < tokens; ++t)
    for (Index c = 0; c < columns; ++c) to[at(c * tokens + t)] = from[at(t * columns + c)];
  return to;
}

// The sums that an element's value and allowed error are made of.
struct Element {
  double value = 0;
  double bound = 0;            // as in Bounded: sum of absolute terms
  double rounded = 0;          // largest sum of the roundings of 16-bit probabilities
  double rounded_squares = 0;  // sum of the squares of those roundings
  double rounded_alike = 0;    // of 16-bit roundings, the part that all terms have in common
  double drifts = 0;           // largest sum of what drifting statistics of rows add, in units of work
  double walk_squares = 0;     // sum of the squares of what other rows' statistics add

  void add(double term, double term_bound) {
    value += term;
    bound += term_bound;
  }
  void round(double error) {
    rounded += error;
    rounded_squares += error * error;
  }
  // Adds the error that a term takes over from the statistics of its row.
  void lean(double walked, double drifted) {
    walk_squares += walked * walked;
    drifts += drifted;
  }
};

// The elements of a tensor [tokens, heads, dim] for all tokens, or for the chosen ones.
struct Elements {
  Elements(Index tokens, Index heads_, Index dim_, const std::optional<std::vector<Index>>& chosen)
      : heads(heads_), dim(dim_), place(at(tokens), chosen ? -1 : 0) {
    Index n = 0;
    if (chosen)
      for (const Index token : *chosen) place[at(token)] = n++;
    else
      for (Index& to : place) to = n++;
    all.resize(at(n * heads * dim));
  }

  bool has(Index token) const { return place[at(token)] >= 0; }
  Element* of(Index token, Index head) { return all.data() + (place[at(token)] * heads + head) * dim; }

  Index heads, dim;
  std::vector<Index> place;  // by token
  std::vector<Element> all;
};

class Answer {
 public:
  Answer(const DenseProblem& p, std::optional<std::span<const double>> dout, const Arithmetic& by, const Chosen& chosen)
      : p_(p),
        dout_(dout),
        by_(by),
        chosen_(chosen),
        k_(by_columns(p.k, p.tokens_k, p.heads_k * p.dim_qk)),
        v_(by_columns(p.v, p.tokens_k, p.heads_k * p.dim_v)),
        out_(p.tokens_q, p.heads_q, p.dim_v, chosen.rows),
        lse_(p.tokens_q, p.heads_q, 1, {}),
        max_logit_(1, p.heads_q, 1, {}),
        dq_(dout ? p.tokens_q : 0, p.heads_q, p.dim_qk, dout ? chosen.rows : std::nullopt),
        dk_(dout ? p.tokens_k : 0, p.heads_k, p.dim_qk, dout ? chosen.keys : std::nullopt),
        dv_(dout ? p.tokens_k : 0, p.heads_k, p.dim_v, dout ? chosen.keys : std::nullopt),
        dsink_(dout ? 1 : 0, p.heads_q, 1, {}),
        queries_(at(dout ? p.tokens_k * p.heads_k : 0)) {
    for (Element& e : max_logit_.all) e.value = -kUnbounded;
    for (Index i = 0; i < p.tokens_q; ++i) {
      find_keys(i);
      for (Index head = 0; head < p.heads_q; ++head) add_row(i, head);
    }
  }

  Expected expected() {
    const double rows = static_cast<double>(p_.tokens_q);
    const auto none = [](std::size_t) { return 0.0; };
    const auto of_queries = [&](Index dim) {
      return [this, dim](std::size_t i) { return beyond(walk(queries_of(i, dim))); };
    };
    return {allowed(out_, by_.out, none),
            allowed(lse_, {}, none),
            allowed(max_logit_, {}, none),
            allowed(dq_, by_.gradients, none),
            allowed(dk_, by_.gradients, of_queries(p_.dim_qk)),
            allowed(dv_, by_.gradients, of_queries(p_.dim_v)),
            allowed(dsink_, {}, [&](std::size_t) { return beyond(walk(rows)); })};
  }

 private:
  // Statistics of one row of one head.
  struct Row {
    Index token, head, row, kv_head;
    double lse = -kUnbounded, spread = 0;  // spread: sum of P·|dx|
    double sink_prob = 0;                  // P of the sink
    double d = 0, d_terms = 0;             // D = dout·out, and the sum of its absolute terms
    double d_bound = 0;                    // error of D from errors of P
    double d_error = 0;                    // error of D from rounding P and out to 16 bits
    double walked = 0, drifted = 0;        // errors of the sum of exponentials beyond `order`
    double d_drifted = 0;                  // error of D from drift, times its terms
  };

  double beyond(double roundings) const { return std::max(0.0, roundings - by_.order); }

  void find_keys(Index i) {
    ranges_.clear();
    if (p_.ranges) {
      p_.ranges(i, ranges_);
    } else {
      for (Index j = 0; j < p_.tokens_k; ++j) {
        if (!p_.sees(i, j)) continue;
        if (ranges_.empty() || ranges_.back().end != j) ranges_.push_back({j, j});
        ranges_.back().end = j + 1;
      }
    }
    keys_.clear();
    for (const Range& r : ranges_)
      for (Index j = r.begin; j < r.end; ++j) keys_.push_back(j);
    for (std::vector<double>* numbers : {&logit_, &logit_bound_, &prob_, &dp_bound_}) numbers->resize(keys_.size());
    slope_.assign(keys_.size(), 1.0);
  }

  // to[n] = sum over c of x[c]·columns[c][key n], and the same of absolute values; 512 keys at a time, so that their
  // sums stay in the L1 cache.
  template <bool kBoth>
  void multiply(const double* x, Index dim, const double* columns, double* to, double* absolute) const {
    constexpr Index kKeys = 512;
    for (const Range& r : ranges_) {
      for (Index first = r.begin; first < r.end; first += kKeys) {
        const Index size = min_of(kKeys, r.end - first);
        std::fill_n(absolute, size, 0.0);
        if (kBoth) std::fill_n(to, size, 0.0);
        for (Index c = 0; c < dim; ++c) {
          const double* from = columns + c * p_.tokens_k + first;
          const double factor = x[c];
          for (Index j = 0; j < size; ++j) {
            const double term = factor * from[j];
            if (kBoth) to[j] += term;
            absolute[j] += std::abs(term);
          }
        }
        absolute += size;
        if (kBoth) to += size;
      }
    }
  }

  void add_row(Index i, Index head) {
    Row r{.token = i, .head = head, .row = i * p_.heads_q + head, .kv_head = p_.kv_head(head)};
    score(r);
    softmax(r);
    statistics(r);
    add_forward(r);
    if (dout_) add_backward(r);
  }

  void score(const Row& r) {
    multiply<true>(p_.q.data() + r.row * p_.dim_qk, p_.dim_qk, k_.data() + r.kv_head * p_.dim_qk * p_.tokens_k,
                   logit_.data(), logit_bound_.data());
    const double scale = p_.scale, scale_size = std::abs(p_.scale);
    for (double& x : logit_) x *= scale;
    for (double& x : logit_bound_) x *= scale_size;
    for (std::size_t n = 0; p_.softcap > 0 && n < keys_.size(); ++n) {
      const double capped = std::tanh(logit_[n] / p_.softcap);
      logit_[n] = p_.softcap * capped;
      slope_[n] = 1 - capped * capped;
      logit_bound_[n] = slope_[n] * logit_bound_[n] + std::abs(logit_[n]);
    }
    Element& largest = *max_logit_.of(0, r.head);
    largest.value = std::max(largest.value, largest_of(logit_, -kUnbounded));
    largest.bound = std::max(largest.bound, largest_of(logit_bound_, 0));
  }

  void softmax(Row& r) {
    const double sink = p_.sink.empty() ? -kUnbounded : p_.sink[at(r.head)];
    const double top = largest_of(logit_, sink);
    if (top == -kUnbounded) return;
    double total = std::exp(sink - top);
    for (std::size_t n = 0; n < keys_.size(); ++n) total += prob_[n] = std::exp(logit_[n] - top);
    follow_sum(r, total);
    r.lse = top + std::log(total);
    r.sink_prob = std::exp(sink - top) / total;
    for (double& p : prob_) p /= total;
    r.spread = dot(prob_.data(), logit_bound_.data(), static_cast<Index>(keys_.size()));
  }

  // How far roundings may carry the sum of exponentials; prob_ holds them, not yet divided by the total.
  void follow_sum(Row& r, double total) {
    if (static_cast<double>(keys_.size()) <= by_.order) return;  // `order` allows as many roundings
    const double n = static_cast<double>(keys_.size());
    r.walked = beyond(std::min(n, walk(n)));
    r.drifted = drift(prob_, total) - r.walked;
  }

  // Roundings beyond `order` of a sum whose terms may be equal. A term that is added to numbers of one power of two has
  // the same error each time, and most terms are added to numbers of the last three powers: the mean of these errors is
  // added to the random walk.
  double drift(const std::vector<double>& terms, double total) const {
    const double n = static_cast<double>(terms.size());
    if (total == 0) return beyond(std::min(n, walk(n)));
    constexpr int kPowers = 3, kLanes = 4;  // independent sums, as in dot
    const double size = std::abs(total), top = std::exp2(std::floor(std::log2(size)));
    double step[kPowers], steps[kPowers], errors[kPowers][kLanes] = {};
    for (int p = 0; p < kPowers; ++p) steps[p] = 1 / (step[p] = 2 * by_.work.relative * std::ldexp(top, -p));
    std::size_t i = 0;
    for (; i + kLanes <= terms.size(); i += kLanes)
      for (int p = 0; p < kPowers; ++p)
        for (int x = 0; x < kLanes; ++x)
          errors[p][x] += std::rint(terms[i + at(x)] * steps[p]) * step[p] - terms[i + at(x)];
    for (; i < terms.size(); ++i)
      for (int p = 0; p < kPowers; ++p) errors[p][0] += std::rint(terms[i] * steps[p]) * step[p] - terms[i];
    double drifted = 0, end = size;
    for (int p = 0; p < kPowers; ++p) {
      const double error = std::abs(errors[p][0] + errors[p][1] + errors[p][2] + errors[p][3]) / n;
      const double by_chance = 3 * step[p] / std::sqrt(12 * n), begin = std::ldexp(top, -p);
      drifted += n * (end - begin) / size * std::max(0.0, error - by_chance);
      end = begin;
    }
    return beyond(std::min(n, walk(n) + 2 * drifted / (by_.work.relative * size)));
  }

  double prob_bound(const Row& r, std::size_t n) const { return prob_[n] * (1 + logit_bound_[n] + r.spread); }

  // out, and D with its errors.
  void statistics(Row& r) {
    const Index size = static_cast<Index>(keys_.size());
    row_out_.assign(at(p_.dim_v), 0.0);
    out_drifted_.assign(at(p_.dim_v), 0.0);
    const double* v = v_.data() + r.kv_head * p_.dim_v * p_.tokens_k;
    for (Index c = 0; c < p_.dim_v; ++c) {
      Index n = 0;
      for (const Range& range : ranges_) {
        row_out_[at(c)] += dot(prob_.data() + n, v + c * p_.tokens_k + range.begin, range.size());
        n += range.size();
      }
      if (by_.inputs == Inputs::any && r.walked > 0) out_drifted_[at(c)] = drift_of_values(r, c);
    }
    if (!dout_ || size == 0) return;
    const double* g = dout_->data() + r.row * p_.dim_v;
    multiply<false>(g, p_.dim_v, v, nullptr, dp_bound_.data());
    r.d_terms = dot(prob_.data(), dp_bound_.data(), size);
    terms_.resize(keys_.size());
    for (std::size_t n = 0; n < keys_.size(); ++n) terms_[n] = prob_[n] * logit_bound_[n];
    r.d_bound = (1 + r.spread) * r.d_terms + dot(terms_.data(), dp_bound_.data(), size);  // sum of prob_bound·dp_bound
    double absolute = 0;
    for (std::size_t n = 0; rounds() && n < keys_.size(); ++n) absolute += dp_bound_[n];
    for (Index c = 0; c < p_.dim_v; ++c) {
      r.d += g[c] * row_out_[at(c)];
      r.d_drifted += std::abs(g[c] * row_out_[at(c)]) * out_drifted_[at(c)];
      if (rounds()) r.d_error += std::abs(g[c]) * by_.out.of(row_out_[at(c)]);
    }
    r.d_drifted += 2 * r.drifted * std::abs(r.d);
    r.d_error += by_.probabilities.relative * r.d_terms + by_.probabilities.absolute * absolute;
  }

  // Values that are not random may all be equal; terms of out then drift as exponentials do.
  double drift_of_values(const Row& r, Index c) {
    terms_.resize(keys_.size());
    for (std::size_t n = 0; n < keys_.size(); ++n)
      terms_[n] = prob_[n] * p_.v[at((keys_[n] * p_.heads_k + r.kv_head) * p_.dim_v + c)];
    return drift(terms_, row_out_[at(c)]) - r.walked;
  }

  bool rounds() const { return by_.probabilities.relative > 0; }

  void add_forward(const Row& r) {
    Element& lse = *lse_.of(r.token, r.head);
    lse.add(r.lse, r.lse == -kUnbounded ? 0 : 1 + r.spread + std::abs(r.lse));
    lse.lean(r.walked, r.drifted);
    if (!out_.has(r.token)) return;
    Element* out = out_.of(r.token, r.head);
    for (std::size_t n = 0; n < keys_.size(); ++n) {
      const double* v = p_.v.data() + (keys_[n] * p_.heads_k + r.kv_head) * p_.dim_v;
      const double bound = prob_bound(r, n), error = rounds() ? by_.probabilities.of(prob_[n]) : 0;
      for (Index c = 0; c < p_.dim_v; ++c) {
        out[c].add(prob_[n] * v[c], bound * std::abs(v[c]));
        out[c].round(error * std::abs(v[c]));
      }
    }
    // The sum of P·v and the sum of exponentials that it is divided by both err.
    for (Index c = 0; c < p_.dim_v; ++c)
      out[c].lean(2 * r.walked * out[c].value, (2 * r.drifted + out_drifted_[at(c)]) * std::abs(out[c].value));
  }

  void add_backward(const Row& r) {
    if (!p_.sink.empty()) {
      Element& dsink = *dsink_.of(0, r.head);
      const double term = r.sink_prob * r.d;
      dsink.add(-term, r.sink_prob * ((1 + r.spread) * r.d_terms + r.d_bound));
      dsink.round(r.sink_prob * r.d_error);
      dsink.lean(2 * r.walked * term, r.drifted * std::abs(term) + r.sink_prob * r.d_drifted);
    }
    const bool whole = dq_.has(r.token);
    if (whole || !chosen_.keys) {
      for (std::size_t n = 0; n < keys_.size(); ++n) add_pair(r, n, whole);
    } else {
      for (const Index key : *chosen_.keys) {
        const auto found = std::lower_bound(keys_.begin(), keys_.end(), key);
        if (found != keys_.end() && *found == key) add_pair(r, at(found - keys_.begin()), false);
      }
    }
    if (whole) lean_dq(r);
  }

  void add_pair(const Row& r, std::size_t n, bool row_too) {
    const Index key = keys_[n] * p_.heads_k + r.kv_head;
    const double *q = p_.q.data() + r.row * p_.dim_qk, *g = dout_->data() + r.row * p_.dim_v;
    const double *k = p_.k.data() + key * p_.dim_qk, *v = p_.v.data() + key * p_.dim_v;
    // The product rule: the absolute terms of each factor times the error of the others.
    const double scale = std::abs(p_.scale), dp_bound = dot_absolute(g, v, p_.dim_v), terms = dp_bound + r.d_terms;
    const double slope_bound = p_.softcap > 0 ? 2 * std::abs(logit_[n]) * logit_bound_[n] / std::pow(p_.softcap, 2) : 0;
    const double steep = p_.scale * slope_[n] * prob_[n];
    const double ds = steep * (dot(g, v, p_.dim_v) - r.d);
    const double ds_bound = scale * slope_[n] * (prob_bound(r, n) * terms + prob_[n] * (dp_bound + r.d_bound)) +
                            scale * slope_bound * prob_[n] * terms;
    const double ds_error = rounds() ? by_.probabilities.of(ds) + std::abs(steep) * r.d_error : 0;
    if (row_too) {
      Element* dq = dq_.of(r.token, r.head);
      for (Index c = 0; c < p_.dim_qk; ++c) {
        dq[c].add(ds * k[c], ds_bound * std::abs(k[c]));
        dq[c].round(ds_error * std::abs(k[c]));
      }
    }
    if (!dk_.has(keys_[n])) return;
    queries_[at(key)] += 1;
    // The error of the row's sum is a factor of dS and of D.
    const double walked = r.walked * (std::abs(ds) + 2 * std::abs(steep * r.d));
    const double drifted = r.drifted * std::abs(ds) + r.d_drifted * std::abs(steep);
    Element *dk = dk_.of(keys_[n], r.kv_head), *dv = dv_.of(keys_[n], r.kv_head);
    for (Index c = 0; c < p_.dim_qk; ++c) {
      dk[c].add(ds * q[c], ds_bound * std::abs(q[c]));
      dk[c].round(ds_error * std::abs(q[c]));
      dk[c].lean(walked * q[c], drifted * std::abs(q[c]));
    }
    const double bound = prob_bound(r, n), error = rounds() ? by_.probabilities.of(prob_[n]) : 0;
    for (Index c = 0; c < p_.dim_v; ++c) {
      dv[c].add(prob_[n] * g[c], bound * std::abs(g[c]));
      dv[c].round(error * std::abs(g[c]));
      dv[c].lean(r.walked * prob_[n] * g[c], r.drifted * prob_[n] * std::abs(g[c]));
    }
  }

  // The error of a row's sum is common to all of its keys: it is a factor of dS and of D.
  void lean_dq(const Row& r) {
    if (r.walked == 0 && r.drifted == 0 && r.d_error == 0) return;
    Element* dq = dq_.of(r.token, r.head);
    std::vector<double> mean(at(p_.dim_qk));  // of d (q·k) weighted by P
    for (std::size_t n = 0; n < keys_.size(); ++n)
      for (Index c = 0; c < p_.dim_qk; ++c)
        mean[at(c)] += p_.scale * slope_[n] * prob_[n] * p_.k[at((keys_[n] * p_.heads_k + r.kv_head) * p_.dim_qk + c)];
    for (Index c = 0; c < p_.dim_qk; ++c) {
      const double value = std::abs(dq[c].value), size = std::abs(mean[at(c)]);
      dq[c].lean(2 * r.walked * (value + std::abs(r.d) * size), 2 * r.drifted * value + r.d_drifted * size);
      dq[c].rounded_alike = r.d_error * std::abs(mean[at(c)]);
    }
  }

  double queries_of(std::size_t element, Index dim) const {
    const Index row = static_cast<Index>(element) / dim;  // of chosen keys
    const Index key = chosen_.keys ? (*chosen_.keys)[at(row / p_.heads_k)] : row / p_.heads_k;
    return queries_[at(key * p_.heads_k + row % p_.heads_k)];
  }

  // `longer(i)`: roundings beyond `order` of element i, if its sum runs over query rows.
  template <class Longer>
  Bounded allowed(const Elements& from, Rounding stored, Longer&& longer) const {
    const double more = twice(by_.probabilities.relative + stored.relative);
    const double underflow = by_.work.relative > 0x1p-50 ? kUnderflow : 0;
    Bounded to{std::vector<double>(from.all.size()), std::vector<double>(from.all.size())};
    for (std::size_t i = 0; i < from.all.size(); ++i) {
      const Element& e = from.all[i];
      to.value[i] = e.value;
      if (e.bound == 0) continue;  // nothing contributes: exact
      const double sums = std::sqrt(e.walk_squares) + e.drifts + longer(i) * std::abs(e.value);
      double rounded = e.rounded;
      if (by_.inputs == Inputs::random)
        rounded = std::min(rounded, e.rounded_alike + kRoundedDeviations * std::sqrt(e.rounded_squares));
      to.bound[i] =
          by_.work.relative * (by_.order * e.bound + sums) + underflow + more * (stored.of(e.value) + rounded);
    }
    return to;
  }

  const DenseProblem& p_;
  std::optional<std::span<const double>> dout_;
  const Arithmetic& by_;
  const Chosen& chosen_;
  std::vector<double> k_, v_;  // [heads][dim][tokens]
  Elements out_, lse_, max_logit_, dq_, dk_, dv_, dsink_;
  std::vector<double> queries_;  // [tk, hk] query rows that see the key
  // Of the current row.
  std::vector<Range> ranges_;
  std::vector<Index> keys_;
  std::vector<double> logit_, logit_bound_, prob_, slope_, dp_bound_, row_out_, out_drifted_, terms_;
};

}  // namespace

Expected expected(const DenseProblem& problem, std::optional<std::span<const double>> dout, const Arithmetic& by,
                  const Chosen& chosen) {
  return Answer(problem, dout, by, chosen).expected();
}

}  // namespace weft::check
