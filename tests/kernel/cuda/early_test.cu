// Calls one after another in a stream, whose kernels begin while the ones before end: lists are found again, outputs
// and buffers hold what others left, and the caller's own kernel between two calls lets the next begin before it has
// written.
#include "kernel/cuda/gpu_problem.h"

namespace weft::test {
namespace {

// Says that the kernel after may begin, and copies long after that.
__global__ void copy_late(const unsigned* from, unsigned* to, std::size_t words) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
  for (const long long begin = clock64(); clock64() - begin < 100'000;) {
  }
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += std::size_t{gridDim.x} * blockDim.x)
    to[i] = from[i];
}

template <class View>
View rows_of(View view, Index first, Index count) {
  view.data = detail::advanced(view.data, view.dtype, first * view.row_stride);
  view.rows = count;
  return view;
}

class GpuEarly : public GpuTest {
 protected:
  static void poison(const TensorView& view, const Place& place) {
    if (!view.given()) return;
    WEFT_CUDA(cudaMemsetAsync(view.data, 0xff, spanned_bytes(view), static_cast<cudaStream_t>(place.stream)));
  }
};
WEFT_FOR_EACH_GPU_KERNEL(GpuEarly);

// The first call makes the lists, the others find them.
TEST_P(GpuEarly, CallsAgain) {
  for (const bool deterministic : {false, true}) {
    for (MakeProblems make : {&feature_problems, &wide_problems}) {
      Judge judge(dtype(), false);
      for (const Judged& j : judged(dtype(), Pass::backward, make)) {
        SCOPED_TRACE(j.problem.name + (deterministic ? ", deterministic" : ""));
        const Outputs got(j.problem.p);
        gpu_attend(got.forward_args(j.problem));
        OnDevice gpu(gpu_kernel);
        KernelBackwardArgs args = gpu.bind(got.backward_args(j.problem));
        args.deterministic = deterministic;
        for (int i = 0; i < 4; ++i) {
          for (const TensorView& view : {args.dq, args.dk, args.dv, args.dsink}) poison(view, args.place);
          attend_backward(args, gpu_kernel);
        }
        gpu.finish();
        judge.backward(got.backward, j.want, j.problem.p);
      }
    }
  }
}

// Steps of a ring whose keys come to one buffer. Their slices are the same, so that they share a list and its counter.
TEST_P(GpuEarly, KeysComeBetweenCalls) {
  const Kernel& kernel = find_kernel(gpu_kernel);
  if (kernel.takes_steps_backward == nullptr) GTEST_SKIP() << "calls of this kernel do not sum up";
  const KernelProblem problem =
      make_problem({.tq = 400, .tk = 600, .hq = 4, .hk = 2, .dqk = 128, .dv = 128, .dtype = dtype()},
                   {{0, 150, 0, 600}, {150, 400, 0, 600}}, 29);
  const AttentionProblem& p = problem.p;
  const check::Expected want = expected_of(problem, Pass::backward);
  const Outputs got(p);
  gpu_attend(got.forward_args(problem));
  Backward sums(p, DType::f32);
  sums.dk.set(std::vector<double>(at(p.tk * p.hk * p.dqk), 0.0));
  sums.dv.set(std::vector<double>(at(p.tk * p.hk * p.dv), 0.0));
  KernelBackwardArgs host = got.backward_args(problem);
  host.dsink = {};
  host.dk = sums.dk.view();
  host.dv = sums.dv.view();
  host.add_keys = true;
  if (!kernel.takes_steps_backward(host)) GTEST_SKIP() << "not of these arguments";

  OnDevice gpu(gpu_kernel);
  KernelBackwardArgs args = gpu.bind(host);
  const auto stream = static_cast<cudaStream_t>(args.place.stream);
  constexpr Index kSteps = 3;
  const Index keys = p.tk / kSteps;
  const std::size_t bytes = at(keys * p.hk * p.dqk) * 2;
  const DeviceBytes k(args.place, host.k.data, bytes), v(args.place, host.v.data, bytes);
  std::vector<Range> rows;
  for (const Slice& s : p.slices) rows.push_back({s.q_begin, s.q_end});
  const std::vector<Slice> slices = {{0, 150, 0, keys}, {150, 400, 0, keys}};
  const auto bring = [&](const ConstTensorView& from, Index step, void* to, bool by_kernel) {
    const char* part = static_cast<const char*>(from.data) + at(step) * bytes;
    if (by_kernel)
      copy_late<<<4, 256, 0, stream>>>(reinterpret_cast<const unsigned*>(part), static_cast<unsigned*>(to), bytes / 4);
    else
      WEFT_CUDA(cudaMemcpyAsync(to, part, bytes, cudaMemcpyDeviceToDevice, stream));
    WEFT_CUDA(cudaGetLastError());
  };
  for (int round = 0; round < 6; ++round) {
    for (const TensorView& view : {args.dk, args.dv})
      WEFT_CUDA(cudaMemsetAsync(view.data, 0, spanned_bytes(view), stream));
    poison(args.dq, args.place);
    QuerySteps steps{.rows = rows};
    for (Index n = 0; n < kSteps; ++n) {
      bring(args.k, n, k.data(), round % 3 != 2);
      bring(args.v, n, v.data(), round % 3 != 1);
      KernelBackwardArgs step = args;
      read_from(step, args.q, rows_of(args.k, 0, keys), rows_of(args.v, 0, keys));
      step.k.data = k.data();
      step.v.data = v.data();
      step.dk = rows_of(args.dk, n * keys, keys);
      step.dv = rows_of(args.dv, n * keys, keys);
      step.slices = slices;
      step.steps = &steps;
      steps.last = n + 1 == kSteps;
      attend_backward(step, gpu_kernel);
    }
  }
  gpu.finish();
  Judge judge(dtype(), true);
  judge.close("dq", got.backward.dq.values(), want.dq, p.hq, p.dqk);
  judge.close("dk", sums.dk.values(), want.dk, p.hk, p.dqk);
  judge.close("dv", sums.dv.values(), want.dv, p.hk, p.dv);
}

}  // namespace
}  // namespace weft::test
