// Each document of a sequence as if it were alone: one dense softmax in f64, every element within its bound.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "check/judge.h"
#include "index.h"
#include "prepare/kv_sequences.h"

namespace weft::test {

// Squares of errors and of what was expected, over all documents.
struct Norm {
  double error = 0, size = 0;
  double value() const { return size > 0 ? std::sqrt(error / size) : std::sqrt(error); }
};

class Alone {
 public:
  Alone(const Setting& r, Tensors& t) : run_(r), t_(t) {
    Index begin = r.begin;
    dsink_.assign(at(r.heads_q), 0.0);
    for (const Index n : r.lengths) {
      document({begin, begin + n});
      begin += n;
    }
    for (std::size_t h = 0; r.sink && h < dsink_.size(); ++h) add(norms_[5], t.dsink[h], dsink_[h]);
    for (std::size_t h = 0; h < dsink_.size() && begin > r.begin; ++h) EXPECT_NEAR(t.max_logit[h], max_logit_[h], 1e-4);
    nobody(begin, t.q.view.rows);
  }
  double worst_norm() const {
    double worst = 0;
    for (const Norm& n : norms_) worst = std::max(worst, n.value());
    return worst;
  }

 private:
  static void add(Norm& n, double got, double want) {
    if (std::isinf(want)) {
      EXPECT_EQ(got, want);
      return;
    }
    n.error += (got - want) * (got - want);
    n.size += want * want;
  }
  // One dense softmax in f64 over this document and nothing else; every element within its bound.
  void document(Range rows) {
    if (rows.size() == 0) return;
    const auto values = [&](const Tensor& x) { return to_f64(rows_of(ConstTensorView(x.view), rows)); };
    check::DenseProblem p{.tokens_q = rows.size(),
                          .tokens_k = rows.size(),
                          .heads_q = run_.heads_q,
                          .heads_k = run_.heads_k,
                          .dim_qk = run_.dim_qk,
                          .dim_v = run_.dim_v,
                          .q = values(t_.q),
                          .k = values(t_.k),
                          .v = values(t_.v)};
    const Mask& m = run_.mask;
    p.sees = [&](Index i, Index j) {
      return (!m.causal || j <= i) && (m.left < 0 || j >= i - m.left) && (m.right < 0 || j <= i + m.right) &&
             (!m.chunk || i / *m.chunk == j / *m.chunk);
    };
    p.scale = 1 / std::sqrt(static_cast<double>(run_.dim_qk));
    p.softcap = run_.softcap;
    if (run_.sink) p.sink.assign(t_.sink.begin(), t_.sink.end());
    const std::vector<double> dout = values(t_.dout);
    const check::Expected want = check::expected(p, dout, check::kernel_arithmetic(run_.dtype, run_.dtype));
    compare(norms_[0], "out", values(t_.out), want.out, run_.heads_q, run_.dim_v);
    compare(norms_[1], "lse", values(t_.lse), want.lse, run_.heads_q, 1);
    compare(norms_[2], "dq", values(t_.dq), want.dq, run_.heads_q, run_.dim_qk);
    compare(norms_[3], "dk", values(t_.dk), want.dk, run_.heads_k, run_.dim_qk);
    compare(norms_[4], "dv", values(t_.dv), want.dv, run_.heads_k, run_.dim_v);
    if (max_logit_.empty()) max_logit_.assign(dsink_.size(), -INFINITY);
    for (std::size_t h = 0; h < dsink_.size(); ++h) {
      dsink_[h] += want.dsink.value[h];
      max_logit_[h] = std::max(max_logit_[h], want.max_logit.value[h]);
    }
  }
  static void compare(Norm& norm, const char* name, const std::vector<double>& got, const check::Bounded& want,
                      Index heads, Index dim) {
    const check::Comparison c = check::worst_element(got, want, heads, dim);
    EXPECT_LE(c.ratio, 1) << name << " [" << c.row << ", " << c.head << ", " << c.i << "]: got " << c.got
                          << ", expected " << c.expected << ", allowed error " << c.bound;
    for (std::size_t i = 0; i < got.size(); ++i) add(norm, got[i], want.value[i]);
  }
  // Padding: zeros, and an LSE of nothing (or of the sink).
  void nobody(Index begin, Index end) {
    for (Index row = begin; row < end; ++row) {
      for (const Tensor* x : {&t_.out, &t_.dq, &t_.dk, &t_.dv})
        for (const double y : to_f64(rows_of(ConstTensorView(x->view), {row, row + 1}))) ASSERT_EQ(y, 0);
      for (Index h = 0; h < run_.heads_q; ++h)
        ASSERT_EQ(load_one(t_.lse.view, row, h), run_.sink ? static_cast<double>(t_.sink[at(h)]) : -INFINITY);
    }
  }

  const Setting& run_;
  Tensors& t_;
  std::array<Norm, 6> norms_;  // out, lse, dq, dk, dv, dsink
  std::vector<double> dsink_, max_logit_;
};

inline testing::Message text_of(const Setting& r) {
  return testing::Message() << r.micros << " micros " << r.ranks << " ranks left " << r.mask.left << " chunk "
                            << r.mask.chunk.value_or(0) << " drop " << r.drop << " ahead " << r.ahead;
}

// A run through the buffer, against each document alone.
inline void expect_alone(const Setting& r, double most, const std::string& kernel = {}) {
  SCOPED_TRACE(text_of(r));
  Tensors t(r);
  run_all(r, t, kernel);
  EXPECT_LE(Alone(r, t).worst_norm(), most);
}

inline std::vector<Mask> masks() {
  return {{.causal = true}, {.causal = true, .left = 13}, {.causal = true, .chunk = 17}};
}

inline List random_lengths(std::mt19937_64& engine) {
  List lengths;
  for (Index n = 2 + static_cast<Index>(engine() % 5); n > 0; --n)
    lengths.push_back(engine() % 6 == 0 ? 0 : 1 + static_cast<Index>(engine() % (engine() % 2 == 0 ? 20 : 110)));
  return lengths;
}
inline Setting random_setting(std::mt19937_64& engine, Index micros, Index ranks, const Mask& mask, bool drop) {
  Setting r{.lengths = random_lengths(engine), .mask = mask, .ranks = ranks, .micros = micros, .drop = drop};
  r.seed = static_cast<unsigned>(engine());
  r.ahead = engine() % 2 == 0;
  r.deferred = engine() % 2 == 0;
  r.sink = engine() % 2 == 0;
  r.softcap = engine() % 2 == 0 ? 5 : 0;
  return r;
}

}  // namespace weft::test
