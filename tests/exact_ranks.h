// What a run on ranks should have given, and how far from it it is.
#pragma once

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "ranks.h"
#include "weft/reference.h"

namespace weft::test {

using check::Tensor;

// The f64 reference on the whole tensors.
struct Exact {
  Exact(const RanksProblem& p, RanksInput& in)
      : out(DType::f64, in.q.view.rows, p.heads_q, p.dim_v),
        lse(DType::f64, in.q.view.rows, p.heads_q, 1),
        max_logit(DType::f64, 1, p.heads_q, 1),
        dq(check::f64_tensor(in.q)),
        dk(check::f64_tensor(in.k)),
        dv(check::f64_tensor(in.v)),
        dsink(DType::f64, 1, p.heads_q, 1) {
    const std::vector<Slice> slices = p.problem.global_slices();
    reference_forward({.q = in.q.view,
                       .k = in.k.view,
                       .v = in.v.view,
                       .slices = slices,
                       .attention = attention_of(p, in),
                       .out = out.view,
                       .lse = lse.view,
                       .max_logit = max_logit.view});
    reference_backward({.q = in.q.view,
                        .k = in.k.view,
                        .v = in.v.view,
                        .slices = slices,
                        .attention = attention_of(p, in),
                        .dout = in.dout.view,
                        .dq = dq.view,
                        .dk = dk.view,
                        .dv = dv.view,
                        .dsink = p.sink ? dsink.view : TensorView{}});
  }
  Tensor out, lse, max_logit, dq, dk, dv, dsink;
};

inline double relative_error(const Tensor& got, const Tensor& want) {
  const std::vector<double> a = to_f64(got.view), b = to_f64(want.view);
  double error = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isinf(b[i])) {
      EXPECT_EQ(a[i], b[i]);
      continue;
    }
    error += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return size > 0 ? std::sqrt(error / size) : std::sqrt(error);
}

// Of out, dq, dk and dv.
inline std::vector<double> errors_of(const RanksResult& got, const Exact& want) {
  return {relative_error(got.out, want.out), relative_error(got.dq, want.dq), relative_error(got.dk, want.dk),
          relative_error(got.dv, want.dv)};
}

// Of all results.
inline double worst_error(const RanksResult& r, const Exact& want, bool sink) {
  std::vector<double> all = errors_of(r, want);
  all.push_back(relative_error(r.lse, want.lse));
  all.push_back(relative_error(r.max_logit, want.max_logit));
  if (sink) all.push_back(relative_error(r.dsink, want.dsink));
  return *std::max_element(all.begin(), all.end());
}

}  // namespace weft::test
