// The GPU kernel's tests: its dtypes, its problems, and runs of both passes.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernel/cuda/on_gpu.h"
#include "kernel/kernel_features.h"

namespace weft::test {

struct GpuKernel {
  const char* kernel;
  DType dtype;
};

class GpuTest : public testing::TestWithParam<GpuKernel> {
 protected:
  void SetUp() override {
    gpu_kernel = GetParam().kernel;
    if (std::none_of(kernels().begin(), kernels().end(), [](const Kernel& k) { return k.name == gpu_kernel; }))
      GTEST_SKIP() << gpu_kernel << " is not in this build";
    const KernelRequest request{.dtype = dtype(), .dim_qk = 16, .dim_v = 16, .device = DeviceKind::cuda};
    if (const auto reason = find_kernel(gpu_kernel).refusal(request)) GTEST_SKIP() << *reason;
  }
  void TearDown() override { gpu_kernel = kPortable; }
  static DType dtype() { return GetParam().dtype; }
};
inline std::string gpu_kernel_name(const testing::TestParamInfo<GpuKernel>& info) {
  return std::string(std::string_view(info.param.kernel).substr(5)) + "_" + std::string(name(info.param.dtype));
}
inline constexpr const char* kSm90 = "cuda.sm90";
#define WEFT_FOR_EACH_GPU_KERNEL(Suite)                                                                               \
  INSTANTIATE_TEST_SUITE_P(                                                                                           \
      Gpu, Suite,                                                                                                     \
      testing::Values(GpuKernel{kPortable, DType::f32}, GpuKernel{kPortable, DType::bf16},                            \
                      GpuKernel{kPortable, DType::f16}, GpuKernel{kSm90, DType::bf16}, GpuKernel{kSm90, DType::f16}), \
      gpu_kernel_name)

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

// The slices of some of their keys.
inline std::vector<Slice> keys_of(const std::vector<Slice>& slices, Range keys) {
  std::vector<Slice> part = slices;
  for (Slice& s : part) {
    s.k_begin = min_of(s.k_end, max_of(s.k_begin, keys.begin));
    s.k_end = max_of(s.k_begin, min_of(s.k_end, keys.end));
  }
  return part;
}

inline void gpu_run(const Outputs& outputs, const KernelProblem& problem, Pass last, bool deterministic = false) {
  gpu_attend(outputs.forward_args(problem));
  if (last == Pass::forward) return;
  KernelBackwardArgs args = outputs.backward_args(problem);
  args.deterministic = deterministic;
  gpu_attend_backward(args);
}

// Every class of widths with several tiles of rows and keys.
inline std::vector<KernelProblem> wide_problems(DType dtype) {
  constexpr std::pair<Index, Index> kDims[] = {{40, 40},   {64, 64},   {80, 96},   {128, 128}, {192, 128},
                                               {129, 128}, {128, 192}, {200, 136}, {256, 256}, {8, 256}};
  std::vector<KernelProblem> problems;
  Random random(91);
  for (const auto& [dqk, dv] : kDims) {
    AttentionProblem p{.tq = 200, .tk = 290, .hq = 4, .hk = 2, .dqk = dqk, .dv = dv, .dtype = dtype};
    p.slices = {{3, 90, 5, 170, -kUnlimited, 60}, {90, 190, 100, 280, -70, 120}};
    p.sink = random.chance(0.5) ? Sink::Kind::learnable : Sink::Kind::none;
    p.fill(random);
    problems.push_back({"wide " + std::to_string(dqk) + ":" + std::to_string(dv), std::move(p)});
  }
  for (const auto& [dqk, dv] : {std::pair<Index, Index>{192, 128}, {256, 256}}) {
    AttentionProblem p{.tq = 200, .tk = 290, .hq = 4, .hk = 2, .dqk = dqk, .dv = dv, .dtype = dtype, .softcap = 3};
    p.slices = {{3, 190, 5, 280, -kUnlimited, 70}};
    p.fill(random);
    problems.push_back({"softcap " + std::to_string(dqk) + ":" + std::to_string(dv), std::move(p)});
  }
  return problems;
}

// Anything at all.
inline KernelProblem random_problem(Random& random, DType dtype) {
  constexpr Index kWidths[] = {1, 3, 8, 16, 31, 40, 64, 72, 80, 96, 128, 136, 192, 200, 256};
  const auto width = [&] { return kWidths[random.index(0, 14)]; };
  AttentionProblem p;
  p.dtype = dtype;
  p.tq = random.index(1, random.chance(0.3) ? 300 : 90);
  const Index part_keys = random.chance(0.3) ? 128 : 0;
  p.tk = part_keys > 0 ? random.index(part_keys + 1, 300) : random.index(1, random.chance(0.3) ? 300 : 90);
  p.hk = random.index(1, 3);
  p.hq = p.hk * random.index(1, 3);
  p.dqk = width();
  p.dv = random.chance(0.5) ? p.dqk : width();
  p.view = static_cast<ViewKind>(random.index(0, 3));
  if (random.chance(0.3)) p.scale = random.value();
  if (random.chance(0.2)) p.softcap = 0.5 + 10 * random.unit();
  p.sink = static_cast<Sink::Kind>(random.index(0, 2));
  p.slices = random_slices(random, p.tq, p.tk);
  p.fill(random);
  KernelProblem problem{"", std::move(p)};
  if (random.chance(0.2))
    for (Index h = 0; h < problem.p.hq; ++h) problem.head_map.push_back(random.index(0, problem.p.hk - 1));
  problem.part_keys = part_keys;
  return problem;
}

}  // namespace weft::test
