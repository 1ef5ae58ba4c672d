// The code of docs/kernels.md (add a kernel) and docs/schedules.md (add a schedule), as it stands there, does what is
// said.
#include <cmath>
#include <random>

#include <gtest/gtest.h>

#include "kernel/kernel_features.h"
#include "weft/executor.h"

// Cut out of the pages by CMake.
#include "recipe_schedule.inc"

namespace weft {
namespace {
#include "recipe_kernel.inc"
}  // namespace
}  // namespace weft

namespace weft::test {
namespace {

TEST(Recipes, Kernel) {
  EXPECT_EQ(naive_refusal({.dtype = DType::f32, .dim_qk = 16, .dim_v = 16, .partial = true}), std::nullopt);
  EXPECT_TRUE(naive_refusal({.dtype = DType::bf16}).has_value());
  Judge judge(DType::f32, true);
  for (const MakeProblems make : {feature_problems, planned_problems}) {
    for (const Judged& j : judged(DType::f32, Pass::forward, make)) {
      SCOPED_TRACE(j.problem.name);
      const Outputs got(j.problem.p);
      naive_forward(got.forward_args(j.problem));
      judge.forward(got.forward, j.want, j.problem.p);
    }
  }
}

struct Tensors {
  explicit Tensors(Index count) : rows(count) {
    for (std::vector<float>* x : {&q, &k, &v, &dout, &out, &dq, &dk, &dv}) x->resize(at(count * kHeads * kDim));
    lse.resize(at(count * kHeads));
  }
  TensorView view(std::vector<float>& x) const { return thd(x.data(), DType::f32, rows, kHeads, kDim); }
  TensorView lse_view() { return token_heads(lse.data(), DType::f32, rows, kHeads); }
  template <class Args>
  Args forward() {
    return {.q = view(q), .k = view(k), .v = view(v), .out = view(out), .lse = lse_view()};
  }
  template <class Args>
  Args backward() {
    return {.q = view(q),
            .k = view(k),
            .v = view(v),
            .dout = view(dout),
            .out = view(out),
            .lse = lse_view(),
            .dq = view(dq),
            .dk = view(dk),
            .dv = view(dv)};
  }
  RowTensor whole_rows(std::vector<float>& x) const { return {x.data(), rows, kHeads * kDim * Index{sizeof(float)}}; }

  static constexpr Index kHeads = 2, kDim = 8;
  Index rows;
  std::vector<float> q, k, v, dout, out, dq, dk, dv, lse;
};

TEST(Recipes, Schedule) {
  const std::vector<Index> lengths{20, 3, 18};
  const Problem problem(Stream::from_lengths(lengths), {.causal = true, .left = 9});
  Tensors whole(41), got(41);
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  for (std::vector<float>* x : {&whole.q, &whole.k, &whole.v, &whole.dout})
    for (float& value : *x) value = normal(engine);
  ForwardArgs forward = whole.forward<ForwardArgs>();
  BackwardArgs backward = whole.backward<BackwardArgs>();
  const std::vector<Slice> slices = problem.global_slices();
  forward.slices = backward.slices = slices;
  reference_forward(forward);
  reference_backward(backward);

  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 3);
  run_ranks(3, [&](Communicator& comm) {
    Schedule s = schedule::begin(problem, layouts, comm.rank(), {Tensors::kHeads, Tensors::kHeads}, {});
    schedule::broadcast(s);
    Executor executor(comm, s, {.checked = true});
    Tensors mine(layouts.q.rows());
    for (const auto x : {&Tensors::q, &Tensors::k, &Tensors::v, &Tensors::dout})
      layouts.q.shard(comm.rank(), whole.whole_rows(whole.*x), mine.whole_rows(mine.*x));
    executor.forward(mine.forward<ExecutorForwardArgs>());
    executor.backward(mine.backward<ExecutorBackwardArgs>());
    for (const auto x : {&Tensors::out, &Tensors::dq, &Tensors::dk, &Tensors::dv})  // ranks hold different tokens
      layouts.q.unshard(comm.rank(), mine.whole_rows(mine.*x), got.whole_rows(got.*x));
  });
  for (const auto x : {&Tensors::out, &Tensors::dq, &Tensors::dk, &Tensors::dv})
    for (std::size_t i = 0; i < (whole.*x).size(); ++i) EXPECT_NEAR((got.*x)[i], (whole.*x)[i], 1e-5) << i;
}

}  // namespace
}  // namespace weft::test
