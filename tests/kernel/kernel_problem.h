// The fixture of tests over every kernel of the registry, problems for them, and the error that is allowed.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "check/judge.h"
#include "kernel/attention_problem.h"
#include "kernel/on_device.h"
#include "sanitized.h"
#include "weft/kernel.h"

namespace weft::test {

struct KernelParam {
  std::string kernel;
  DType dtype;

  friend std::ostream& operator<<(std::ostream& to, const KernelParam& param) {
    return to << param.kernel << ", " << name(param.dtype);
  }
};

// Kernels of the build on one kind of device, with every dtype. On a machine without a GPU those for GPUs have no
// instances, and the list that is printed says so; what else a kernel refuses is skipped with its reason.
inline std::vector<KernelParam> kernel_params(DeviceKind on) {
  std::vector<KernelParam> params;
  std::string names;
  const bool absent = on == DeviceKind::cuda && device::count() == 0;
  for (const Kernel& kernel : kernels()) {
    if (device_of(kernel.name) != on) continue;
    names.append(" ").append(kernel.name);
    if (absent) continue;
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) params.push_back({std::string(kernel.name), dtype});
  }
  static std::map<DeviceKind, bool> printed;
  if (!names.empty() && !std::exchange(printed[on], true))
    std::printf("%s%s\n", absent ? "no GPU here, so these kernels are not tested:" : "kernels:", names.c_str());
  return params;
}
inline std::vector<KernelParam> kernel_params() {
  std::vector<KernelParam> params = kernel_params(DeviceKind::cpu);
  for (KernelParam& gpu : kernel_params(DeviceKind::cuda)) params.push_back(std::move(gpu));
  return params;
}
inline std::string param_name(const testing::TestParamInfo<KernelParam>& info) {
  std::string result = info.param.kernel + "_" + std::string(name(info.param.dtype));
  std::replace(result.begin(), result.end(), '.', '_');
  return result;
}
#define WEFT_FOR_EACH_KERNEL(Suite) \
  INSTANTIATE_TEST_SUITE_P(Kernels, Suite, testing::ValuesIn(kernel_params()), param_name)
#define WEFT_FOR_EACH_CPU_KERNEL(Suite) \
  INSTANTIATE_TEST_SUITE_P(Kernels, Suite, testing::ValuesIn(kernel_params(DeviceKind::cpu)), param_name)

template <Pass kPass>
class KernelTest : public testing::TestWithParam<KernelParam> {
 protected:
  void SetUp() override {
    for (const Pass pass : {Pass::forward, kPass})
      if (const auto reason = refusal({.pass = pass})) GTEST_SKIP() << *reason;
  }
  const std::string& kernel() const { return GetParam().kernel; }
  DType dtype() const { return GetParam().dtype; }
  bool on_gpu() const { return device_of(kernel()) == DeviceKind::cuda; }
  // Why the kernel refuses a request of its dtype on its device; head dims are 16 unless given.
  std::optional<std::string> refusal(KernelRequest request) const {
    request.dtype = dtype();
    request.device = device_of(kernel());
    if (request.dim_qk == 0) request.dim_qk = request.dim_v = 16;
    return find_kernel(kernel()).refusal(request);
  }
  // Forward alone where the kernel has no backward.
  Pass last_pass() const { return refusal({.pass = Pass::backward}) ? Pass::forward : Pass::backward; }
};
using ForwardKernelTest = KernelTest<Pass::forward>;
using BackwardKernelTest = KernelTest<Pass::backward>;

struct KernelProblem {
  std::string name;
  AttentionProblem p;
  std::vector<Index> head_map = {};
  Index keys_per_split = 0;  // of the forward

  Attention attention() const {
    Attention result = p.attention();
    result.head_map = head_map;
    return result;
  }
  check::DenseProblem dense() const {
    check::DenseProblem result = p.dense();
    result.head_map = head_map;
    return result;
  }
  std::vector<double> dout() const {
    std::vector<double> values = p.dout.values();
    for (double& x : values) x = std::isnan(x) ? 0 : x;
    return values;
  }
};

inline KernelProblem make_problem(AttentionProblem p, std::vector<Slice> slices, unsigned seed) {
  return {"", filled(std::move(p), std::move(slices), seed)};
}

// All outputs of both passes, in the dtype of the problem; each starts as NaN. Statistics are f32 or f64.
struct Outputs {
  explicit Outputs(const AttentionProblem& p, DType statistics = DType::f32)
      : forward(p, p.dtype, statistics), backward(p, p.dtype) {}

  KernelForwardArgs forward_args(const KernelProblem& problem) const {
    KernelForwardArgs args{forward.args(problem.p)};
    args.attention = problem.attention();
    args.keys_per_split = problem.keys_per_split;
    return args;
  }
  // Reads what the forward wrote.
  KernelBackwardArgs backward_args(const KernelProblem& problem) const {
    KernelBackwardArgs args{backward.args(problem.p)};
    args.attention = problem.attention();
    args.out = forward.out.view();
    args.lse = forward.lse.view();
    return args;
  }
  void run(const KernelProblem& problem, std::string_view kernel, Pass last, bool deterministic = false) const {
    attend_on(kernel, forward_args(problem));
    if (last == Pass::forward) return;
    KernelBackwardArgs args = backward_args(problem);
    args.deterministic = deterministic;
    attend_backward_on(kernel, args);
  }

  Forward forward;
  Backward backward;
};

// Values with their sign bits: -0 is not 0, and NaN is itself.
inline std::vector<std::uint64_t> bits(const std::vector<double>& values) {
  std::vector<std::uint64_t> result(values.size());
  std::transform(values.begin(), values.end(), result.begin(),
                 [](double x) { return std::bit_cast<std::uint64_t>(x); });
  return result;
}
inline std::vector<std::uint64_t> bits(const Buffer& buffer) { return bits(buffer.values()); }

inline void expect_same_bits(const Outputs& got, const Outputs& want, Pass last) {
  EXPECT_EQ(bits(got.forward.out), bits(want.forward.out));
  EXPECT_EQ(bits(got.forward.lse), bits(want.forward.lse));
  EXPECT_EQ(bits(got.forward.max_logit), bits(want.forward.max_logit));
  if (last == Pass::forward) return;
  EXPECT_EQ(bits(got.backward.dq), bits(want.backward.dq));
  EXPECT_EQ(bits(got.backward.dk), bits(want.backward.dk));
  EXPECT_EQ(bits(got.backward.dv), bits(want.backward.dv));
  EXPECT_EQ(bits(got.backward.dsink), bits(want.backward.dsink));
}

// Holds the tensors of many problems against their answers: the worst element decides, and the norms of each tensor
// over all problems. The norm of a single problem says something too, but not of a tensor whose terms cancel, such as
// dq of rows with one key: it is asked where the allowed error is small beside the tensor.
class Judge {
 public:
  // Without norms elements alone: of logits far above 1 no norm is known.
  Judge(DType dtype, bool each_norm, bool norms = true) : dtype_(dtype), each_norm_(each_norm), norms_(norms) {}
  ~Judge() {
    if (!norms_) return;
    for (const auto& [tensor, sum] : sums_) {
      EXPECT_LE(std::sqrt(sum.error), check::norm_limit(dtype_, tensor, terms_) * std::sqrt(sum.size))
          << tensor << " of all problems";
    }
  }
  Judge(const Judge&) = delete;
  Judge& operator=(const Judge&) = delete;

  void forward(const Forward& got, const check::Expected& want, const AttentionProblem& p) {
    terms_ = max_of(terms_, max_of(p.tk, p.tq * p.hq / p.hk));
    out_and_lse(got, want, p);
    close("max_logit", got.max_logit.values(), want.max_logit, p.hq, 1);
  }
  void out_and_lse(const Forward& got, const check::Expected& want, const AttentionProblem& p) {
    close("out", got.out.values(), want.out, p.hq, p.dv);
    close("lse", got.lse.values(), want.lse, p.hq, 1);
  }
  void backward(const Backward& got, const check::Expected& want, const AttentionProblem& p) {
    close("dq", got.dq.values(), want.dq, p.hq, p.dqk);
    close("dk", got.dk.values(), want.dk, p.hk, p.dqk);
    close("dv", got.dv.values(), want.dv, p.hk, p.dv);
    if (p.sink == Sink::Kind::learnable) close("dsink", got.dsink.values(), want.dsink, p.hq, 1);
  }
  void close(const std::string& tensor, const std::vector<double>& got, const check::Bounded& want, Index heads,
             Index dim) {
    const check::Comparison c = check::worst_element(got, want, heads, dim);
    EXPECT_LE(c.ratio, 1) << tensor << " [" << c.row << ", " << c.head << ", " << c.i << "]: got " << c.got
                          << ", expected " << c.expected << ", allowed error " << c.bound;
    double error = 0, size = 0, allowed = 0;
    for (std::size_t i = 0; i < want.value.size(); ++i) {
      if (!std::isfinite(want.value[i])) continue;
      error += (got[i] - want.value[i]) * (got[i] - want.value[i]);
      size += want.value[i] * want.value[i];
      allowed += want.bound[i] * want.bound[i];
    }
    sums_[tensor].error += error;
    sums_[tensor].size += size;
    // The f32 bound is that of first order for all steps of the sums, so far above what rounding does.
    const double limit = check::norm_limit(dtype_, tensor, terms_),
                 cancels = (dtype_ == DType::f32 ? 2000 : 30) * limit;
    if (!each_norm_ || allowed > cancels * cancels * size) return;
    EXPECT_LE(std::sqrt(error), limit * std::sqrt(size)) << tensor;
  }

 private:
  struct Squares {
    double error = 0, size = 0;
  };
  DType dtype_;
  bool each_norm_, norms_;
  Index terms_ = 1;  // of the longest sum
  std::map<std::string, Squares> sums_;
};

inline check::Expected expected_of(const KernelProblem& problem, Pass last) {
  const std::vector<double> dout = problem.dout();
  const check::Arithmetic by = check::kernel_arithmetic(problem.p.dtype, problem.p.dtype);
  if (last == Pass::forward) return check::expected(problem.dense(), {}, by);
  return check::expected(problem.dense(), dout, by);
}

// Problems with their answers, made once for all kernels.
struct Judged {
  KernelProblem problem;
  check::Expected want;
};
using MakeProblems = std::vector<KernelProblem> (*)(DType dtype);
inline const std::vector<Judged>& judged(DType dtype, Pass last, MakeProblems make) {
  static std::map<std::tuple<MakeProblems, DType, Pass>, std::vector<Judged>> cache;
  std::vector<Judged>& list = cache[{make, dtype, last}];
  if (!list.empty()) return list;
  for (KernelProblem& problem : make(dtype)) {
    check::Expected want = expected_of(problem, last);
    list.push_back({std::move(problem), std::move(want)});
  }
  return list;
}

}  // namespace weft::test
