// The registry: which kernels there are, what they refuse, and that nobody else steps in.
#include <algorithm>
#include <fstream>
#include <functional>
#include <set>
#include <string>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <gtest/gtest.h>

#include "kernel/kernel_problem.h"
#include "refusal.h"

namespace weft::test {
namespace {

constexpr Pass kPasses[] = {Pass::forward, Pass::backward};

KernelRequest plain(DType dtype, Pass pass = Pass::forward, Index dim = 64) {
  return {.pass = pass, .dtype = dtype, .dim_qk = dim, .dim_v = dim};
}

bool is_cpu(const Kernel& kernel) { return kernel.name.starts_with("cpu."); }

// A small call of some dtype and width; gradients where asked.
struct Call {
  Call(DType dtype, Index dqk, Index dv)
      : problem(make_problem({.tq = 3, .tk = 4, .dqk = dqk, .dv = dv, .dtype = dtype}, {{0, 3, 0, 4}}, 51)) {}
  void operator()(Pass pass, std::string_view kernel) const {
    const Outputs outputs(problem.p, DType::f64);
    if (pass == Pass::forward) return attend(outputs.forward_args(problem), kernel);
    reference_forward(outputs.forward_args(problem));
    attend_backward(outputs.backward_args(problem), kernel);
  }
  KernelProblem problem;
};

TEST(KernelRegistry, NamesAreFoundAndWordsAreThere) {
  std::set<std::string_view> names;
  for (const Kernel& kernel : kernels()) {
    EXPECT_TRUE(names.insert(kernel.name).second) << kernel.name;
    EXPECT_EQ(&find_kernel(kernel.name), &kernel);
    EXPECT_FALSE(kernel.about.empty()) << kernel.name;
    EXPECT_EQ(kernel.about.find('\n'), std::string_view::npos) << kernel.name;
  }
  EXPECT_TRUE(names.contains("reference"));
  EXPECT_TRUE(names.contains("cpu.scalar"));
}

// Before a kernel is asked: most do not look at shapes themselves.
TEST(KernelRegistry, OutputsOfAnotherShapeAreRefused) {
  const Call call(DType::f32, 8, 8);
  const Outputs outputs(call.problem.p, DType::f32);
  for (const Kernel& kernel : kernels()) {
    if (kernel.refusal(plain(DType::f32, Pass::forward, 8))) continue;
    KernelForwardArgs args = outputs.forward_args(call.problem);
    args.out.dim = 7;
    expect_refusal([&] { attend(args, kernel.name); }, {"out has shape", "7"});
  }
}

TEST(KernelRegistry, AnUnknownNameListsTheNames) {
  expect_refusal([] { Call(DType::f32, 4, 4)(Pass::forward, "nope"); }, {"reference", "cpu.scalar"});
  expect_refusal([] { Call(DType::f32, 4, 4)(Pass::backward, "Cpu"); }, {"reference", "cpu.scalar"});
  for (const Kernel& kernel : kernels())
    expect_refusal([] { find_kernel("nope"); }, {"nope", std::string(kernel.name)});
}

// Best first: "cpu" and "" are the first of the list that this machine can run, and the slow ones come last.
TEST(KernelRegistry, BestFirst) {
  const auto can = [](const Kernel& k) { return !k.refusal(plain(DType::f32)); };
  const auto list = kernels();
  const auto best = std::find_if(list.begin(), list.end(), can);
  ASSERT_NE(best, list.end());
  EXPECT_EQ(&find_kernel(""), &*best);
  const auto cpu = std::find_if(list.begin(), list.end(), [&](const Kernel& k) { return is_cpu(k) && can(k); });
  ASSERT_NE(cpu, list.end());
  EXPECT_EQ(&find_kernel("cpu"), &*cpu);
  EXPECT_NE(find_kernel("cpu").name, "cpu.scalar");
  EXPECT_EQ(list.back().name, "reference");
  EXPECT_EQ(list[list.size() - 2].name, "cpu.scalar");
}

#if defined(__x86_64__)
// Whether Linux lists a feature, which it does if the processor has it and the system lets programs use it.
bool system_shows(const std::string& feature) {
  std::ifstream info("/proc/cpuinfo");
  for (std::string word; info >> word;)
    if (word == feature) return true;
  return false;
}
#endif

// On the machines that tests run on, the scalar kernel and one of the machine's own do everything.
TEST(KernelRegistry, TheMachinesOwnTargetRuns) {
  std::vector<std::string> targets = {"cpu.scalar"};
#if defined(__aarch64__)
  targets.emplace_back("cpu.neon");
  if ((getauxval(AT_HWCAP2) >> 14 & 1) != 0) targets.emplace_back("cpu.neon_bf16");
#elif defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) targets.emplace_back("cpu.avx2");
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) targets.emplace_back("cpu.avx512");
  if (__builtin_cpu_supports("avx512bf16")) targets.emplace_back("cpu.avx512_bf16");
  if (system_shows("amx_bf16")) targets.emplace_back("cpu.amx");
#endif
  EXPECT_GE(targets.size(), 2u);
  for (const std::string& target : targets) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const Pass pass : kPasses)
        EXPECT_EQ(find_kernel(target).refusal(plain(dtype, pass)), std::nullopt) << target;
      KernelRequest partial = plain(dtype);
      partial.partial = true;
      EXPECT_EQ(find_kernel(target).refusal(partial), std::nullopt) << target;
    }
  }
}

// Asked by name, a kernel answers or refuses with its reason; the outputs stay as they were.
void expect_refused(std::string_view kernel, DType dtype, Index dqk, Index dv, const std::string& part) {
  for (const Pass pass : kPasses) {
    const KernelRequest request{.pass = pass, .dtype = dtype, .dim_qk = dqk, .dim_v = dv};
    const auto reason = find_kernel(kernel).refusal(request);
    ASSERT_TRUE(reason.has_value()) << kernel;
    EXPECT_NE(reason->find(part), std::string::npos) << *reason;
    expect_refusal([&] { Call(dtype, dqk, dv)(pass, kernel); }, {std::string(kernel), *reason});
  }
}

TEST(KernelRegistry, CpuKernelsRefuseWhatTheyCannot) {
  for (const Kernel& kernel : kernels()) {
    if (!is_cpu(kernel) || kernel.refusal(plain(DType::f32))) continue;
    SCOPED_TRACE(kernel.name);
    expect_refused(kernel.name, DType::f64, 16, 16, "f64");
    for (const Pass pass : kPasses) {
      EXPECT_EQ(kernel.refusal(plain(DType::f32, pass, 4096)), std::nullopt);
      EXPECT_EQ(kernel.refusal(plain(DType::f32, pass, 1)), std::nullopt);
    }
  }
}

// They may be left out of the build, or say that the machine lacks what they need; nobody takes their place.
TEST(KernelRegistry, KernelsOfOtherMachinesRefuse) {
#if defined(__aarch64__)
  const std::vector<std::string> others = {"cpu.avx2", "cpu.avx512"};
#else
  std::vector<std::string> others = {"cpu.neon"};
  if (!system_shows("amx_bf16")) others.emplace_back("cpu.amx");
#endif
  for (const std::string& other : others) {
    for (const Pass pass : kPasses) expect_refusal([&] { Call(DType::f32, 8, 8)(pass, other); }, {other});
  }
}

// Any of the CPU's targets may do what "cpu" asks; what none can do is refused, not given to the reference.
TEST(KernelRegistry, CpuIsNeverTheReference) {
  expect_refusal([] { Call(DType::f64, 8, 8)(Pass::forward, "cpu"); }, {"f64"});
  EXPECT_NO_THROW(Call(DType::f32, 576, 512)(Pass::backward, "cpu"));
}

// Without a name the best that can: here only the reference knows f64.
TEST(KernelRegistry, WithoutANameTheBestThatCan) {
  for (const Pass pass : kPasses) {
    EXPECT_NO_THROW(Call(DType::f64, 8, 8)(pass, ""));
  }
}

// Slices in device memory: kernels of the CPU have their reason, and the entry says what is wrong before any is asked.
TEST(KernelRegistry, DevicePlansAreForGpus) {
  for (const Kernel& kernel : kernels()) {
    if (kernel.name.starts_with("cuda") || kernel.refusal(plain(DType::f32))) continue;
    KernelRequest request = plain(DType::f32);
    request.device_plan = true;
    const auto reason = kernel.refusal(request);
    ASSERT_TRUE(reason.has_value()) << kernel.name;
    EXPECT_NE(reason->find("device_plan"), std::string::npos) << *reason;
  }
  const Call call(DType::f32, 4, 4);
  const Outputs outputs(call.problem.p);
  alignas(16) std::byte nothing[64] = {};  // refused before anybody looks at it
  KernelForwardArgs forward = outputs.forward_args(call.problem);
  KernelBackwardArgs backward = outputs.backward_args(call.problem);
  forward.device_plan = backward.device_plan = reinterpret_cast<DevicePlan*>(nothing);
  for (const char* kernel : {"", "cpu", "reference"}) {
    expect_refusal([&] { attend(forward, kernel); }, {"1 slices and a device_plan"});
    expect_refusal([&] { attend_backward(backward, kernel); }, {"1 slices and a device_plan"});
  }
  forward.slices = backward.slices = {};
  for (const char* kernel : {"", "cpu", "reference"}) {
    expect_refusal([&] { attend(forward, kernel); }, {"device_plan", "place", "CPU"});
    expect_refusal([&] { attend_backward(backward, kernel); }, {"device_plan", "place", "CPU"});
  }
  ReferenceState state(3, 2, 4);
  expect_refusal([&] { reference_forward(forward); }, {"device_plan", "host"});
  expect_refusal([&] { reference_partial(forward, state); }, {"device_plan", "host"});
  expect_refusal([&] { reference_backward(backward); }, {"device_plan", "host"});
}

TEST(KernelRegistry, ArgumentsAreChecked) {
  const Call call(DType::f32, 4, 4);
  for (const Kernel& kernel : kernels()) {
    const Outputs outputs(call.problem.p);
    if (kernel.refusal(plain(DType::f32))) continue;
    KernelForwardArgs args = outputs.forward_args(call.problem);
    const Slice outside[] = {{0, 3, 0, 5}};
    args.slices = outside;
    expect_refusal([&] { attend(args, kernel.name); }, {"slice 0", "4"});
    EXPECT_TRUE(std::isnan(outputs.forward.out.values()[0])) << "something was written";
    if (kernel.refusal(plain(DType::f32, Pass::backward))) continue;
    KernelBackwardArgs back = outputs.backward_args(call.problem);
    back.lse = {};
    expect_refusal([&] { attend_backward(back, kernel.name); }, {"out", "lse"});
  }
}

// A rank may hold no rows: there are no states then, and nothing has an address.
TEST(KernelRegistry, PartialStatesOfNoRows) {
  Buffer k(DType::f32, 3, 1, 4), max_logit(DType::f32, 1, 2, 1);
  const auto none = thd(static_cast<void*>(nullptr), DType::f32, 0, 2, 4);
  for (const Kernel& kernel : kernels()) {
    if (kernel.refusal(plain(DType::f32))) continue;
    KernelForwardArgs args{{.q = none, .k = k.view(), .v = k.view()}, {none, nullptr}};
    EXPECT_NO_THROW(attend(args, kernel.name)) << kernel.name;
    args.out = none;
    args.max_logit = max_logit.view();
    EXPECT_NO_THROW(finish_partial(finish_args(args))) << kernel.name;
    EXPECT_EQ(max_logit.values(), std::vector<double>(2, kMinusInfinity<double>));
  }
}

TEST(KernelRegistry, StepsAreForKernelsThatSumUp) {
  const Call call(DType::f32, 4, 4);
  const Outputs outputs(call.problem.p, DType::f64);
  reference_forward(outputs.forward_args(call.problem));
  const Range rows[] = {{0, 3}};
  QuerySteps steps{.rows = rows};
  KernelBackwardArgs args = outputs.backward_args(call.problem);
  args.steps = &steps;
  for (const std::string_view kernel : {"reference", "cpu.scalar"})
    expect_refusal([&] { attend_backward(args, kernel); }, {std::string(kernel), "steps"});
  KernelForwardArgs forward = outputs.forward_args(call.problem);
  forward.steps = &steps;
  for (const std::string_view kernel : {"reference", "cpu.scalar"})
    expect_refusal([&] { attend(forward, kernel); }, {std::string(kernel), "steps"});
}

TEST(KernelRegistry, ThreadsCannotBeNegative) {
  expect_refusal([] { set_cpu_threads(-1); }, {"-1"});
}

}  // namespace
}  // namespace weft::test
