// The code of docs/kernels.md (add a kernel), as it stands there, does what is said. Schedules: test_recipe.py.
#include <cmath>

#include <gtest/gtest.h>

#include "kernel/kernel_features.h"

namespace weft {
namespace {
// Cut out of the page by CMake.
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

}  // namespace
}  // namespace weft::test
