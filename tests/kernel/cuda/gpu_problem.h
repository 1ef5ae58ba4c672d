// The fixture of tests that only GPU kernels have.
#pragma once

#include <algorithm>
#include <cmath>

#include "cuda/runtime.h"
#include "kernel/kernel_features.h"
#include "kernel/key_parts.h"

namespace weft::test {

inline constexpr const char* kPortable = "cuda.portable";
inline constexpr const char* kSm90 = "cuda.sm90";
// The kernel under test, for helpers outside the fixture.
inline std::string_view gpu_kernel = kPortable;

class GpuTest : public ForwardKernelTest {
 protected:
  void SetUp() override {
    gpu_kernel = GetParam().kernel;
    ForwardKernelTest::SetUp();
  }
  void TearDown() override { gpu_kernel = kPortable; }
  static DType dtype() { return GetParam().dtype; }
};
// Kernels for GPUs of this build, or one of them.
inline std::vector<KernelParam> gpu_params(std::string_view kernel = "") {
  std::vector<KernelParam> params = kernel_params(DeviceKind::cuda);
  std::erase_if(params, [&](const KernelParam& param) {
    return (!kernel.empty() && param.kernel != kernel) || (param.kernel == kSm90 && param.dtype == DType::f32);
  });
  return params;
}
#define WEFT_FOR_EACH_GPU_KERNEL(Suite)                                              \
  INSTANTIATE_TEST_SUITE_P(Gpu, Suite, testing::ValuesIn(gpu_params()), param_name); \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Suite)
#define WEFT_FOR_SM90(Suite)                                                              \
  INSTANTIATE_TEST_SUITE_P(Gpu, Suite, testing::ValuesIn(gpu_params(kSm90)), param_name); \
  GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Suite)

// A gradient from a device_plan against that from slices on the host. cuda.sm90 begins its tiles of query rows
// elsewhere then, and adds in another order.
inline void expect_same_sums(const Buffer& got, const Buffer& want) {
  if (bits(got) == bits(want)) return;
  ASSERT_EQ(std::string_view(gpu_kernel), kSm90);
  const std::vector<double> a = got.values(), b = want.values();
  double most = 0;
  for (const double x : b) most = std::max(most, std::abs(x));
  const double limit = 4 * check::rounding(want.view().dtype).of(most) + 1e-5 * most;
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], limit) << i;
}
inline void expect_same_by_plan(const Outputs& got, const Outputs& want) {
  expect_same_bits(got, want, Pass::forward);
  expect_same_sums(got.backward.dq, want.backward.dq);
  expect_same_sums(got.backward.dk, want.backward.dk);
  expect_same_sums(got.backward.dv, want.backward.dv);
  expect_same_sums(got.backward.dsink, want.backward.dsink);
}

inline void gpu_run(const Outputs& outputs, const KernelProblem& problem, Pass last, bool deterministic = false) {
  outputs.run(problem, gpu_kernel, last, deterministic);
}
inline void gpu_attend(const KernelForwardArgs& args) { attend_on(gpu_kernel, args); }
inline void gpu_attend_backward(const KernelBackwardArgs& args) { attend_backward_on(gpu_kernel, args); }

}  // namespace weft::test
