// The same calls a great many times over: each ends, and leaves the bits that the first one left. What warps of a block
// lose of each other once in thousands of steps does not show in one call. WEFT_CUDA_CALLS says how often.
#include <cstdlib>
#include <string>

#include "kernel/cuda/gpu_problem.h"

namespace weft::test {
namespace {

int calls() {
  const char* asked = std::getenv("WEFT_CUDA_CALLS");
  return asked != nullptr ? std::stoi(asked) : 50;
}

__global__ void count_differences(const unsigned* a, const unsigned* b, std::size_t words, int* count) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x)
    if (a[i] != b[i]) atomicAdd(count, 1);
}

class GpuAgain : public GpuTest {
 protected:
  // More tiles than a GPU has multiprocessors, of few and of many steps, some without keys.
  static KernelProblem many_tiles(Index width, Index heads = 140) {
    const Index dv = width == 192 ? 128 : width;
    return make_problem({.tq = 340, .tk = 900, .hq = heads, .hk = heads, .dqk = width, .dv = dv, .dtype = dtype()},
                        {{0, 20, 0, 200},
                         {20, 21, 3, 900},
                         {140, 145, 100, 300, -kUnlimited, 0},
                         {200, 300, 100, 900, -kUnlimited, 550},
                         {300, 310, 0, 300, -250, -100},
                         {338, 340, 7, 10}},
                        31);
  }
  // Outputs of 32-bit numbers, without gaps.
  template <class Call>
  static void expect_same_each_time(const char* what, const OnDevice& gpu, const std::vector<TensorView>& outputs,
                                    const Call& call) {
    SCOPED_TRACE(what);
    const auto stream = static_cast<cudaStream_t>(gpu.place().stream);
    const int zero = 0;
    const DeviceBytes different(gpu.place(), &zero, sizeof zero);
    std::list<DeviceBytes> first;
    call();
    WEFT_CUDA(cudaStreamSynchronize(stream));
    for (const TensorView& out : outputs) {
      std::vector<char> host(spanned_bytes(out));
      WEFT_CUDA(cudaMemcpy(host.data(), out.data, host.size(), cudaMemcpyDeviceToHost));
      first.emplace_back(gpu.place(), host.data(), host.size());
    }
    for (int n = 1; n < calls(); ++n) {
      call();
      auto want = first.begin();
      for (const TensorView& out : outputs)
        count_differences<<<128, 256, 0, stream>>>(static_cast<const unsigned*>(out.data),
                                                   static_cast<const unsigned*>((want++)->data()),
                                                   spanned_bytes(out) / 4, static_cast<int*>(different.data()));
      WEFT_CUDA(cudaGetLastError());
    }
    WEFT_CUDA(cudaStreamSynchronize(stream));
    int count = 0;
    WEFT_CUDA(cudaMemcpy(&count, different.data(), sizeof count, cudaMemcpyDeviceToHost));
    EXPECT_EQ(count, 0) << "of all calls' outputs are not as in the first";
  }
};
WEFT_FOR_SM90(GpuAgain);

TEST_P(GpuAgain, Forward) {
  for (const Index width : {64, 128, 192, 256}) {
    SCOPED_TRACE(width);
    const KernelProblem problem = many_tiles(width);
    const Outputs host(problem.p);
    OnDevice gpu(gpu_kernel);
    const KernelForwardArgs all = gpu.bind(host.forward_args(problem));
    KernelForwardArgs plain = all;
    plain.max_logit = {};
    expect_same_each_time("any", gpu, {all.out, all.lse, all.max_logit}, [&] { attend(all, gpu_kernel); });
    expect_same_each_time("plain", gpu, {plain.out, plain.lse}, [&] { attend(plain, gpu_kernel); });
    const KernelProblem more = many_tiles(width, 200);  // than are computed in parts at once, with wide tiles too
    const Outputs more_host(more.p);
    KernelForwardArgs cut = gpu.bind(more_host.forward_args(more));
    cut.max_logit = {};
    cut.keys_per_split = 128;
    expect_same_each_time("parts, one after another", gpu, {cut.out, cut.lse}, [&] { attend(cut, gpu_kernel); });
    const KernelProblem few = many_tiles(width, 3);
    const Outputs few_host(few.p);
    KernelForwardArgs at_once = gpu.bind(few_host.forward_args(few));
    at_once.keys_per_split = 128;
    expect_same_each_time("any, parts at once", gpu, {at_once.out, at_once.lse, at_once.max_logit},
                          [&] { attend(at_once, gpu_kernel); });
    at_once.max_logit = {};
    expect_same_each_time("parts at once", gpu, {at_once.out, at_once.lse}, [&] { attend(at_once, gpu_kernel); });
    std::vector<Range> rows;
    for (const Slice& s : problem.p.slices) rows.push_back({s.q_begin, s.q_end});
    std::vector<std::vector<Slice>> parts;
    for (const Range keys : {Range{500, 900}, Range{150, 300}, Range{0, 100}, Range{100, 150}, Range{300, 500}})
      parts.push_back(keys_of(problem.p.slices, keys));
    expect_same_each_time("steps", gpu, {plain.out, plain.lse}, [&] {
      KernelForwardArgs args = plain;
      QuerySteps steps{.rows = rows};
      args.steps = &steps;
      for (const std::vector<Slice>& part : parts) {
        args.slices = part;
        steps.last = &part == &parts.back();
        attend(args, gpu_kernel);
      }
    });
  }
}

TEST_P(GpuAgain, Backward) {
  for (const Index width : {64, 128, 192, 256}) {
    SCOPED_TRACE(width);
    const KernelProblem problem = many_tiles(width);
    const Outputs host(problem.p);
    gpu_attend(host.forward_args(problem));
    OnDevice gpu(gpu_kernel);
    KernelBackwardArgs args = gpu.bind(host.backward_args(problem));
    expect_same_each_time("any order of dq", gpu, {args.dk, args.dv}, [&] { attend_backward(args, gpu_kernel); });
    args.deterministic = true;
    expect_same_each_time("deterministic", gpu, {args.dq, args.dk, args.dv},
                          [&] { attend_backward(args, gpu_kernel); });
  }
}

}  // namespace
}  // namespace weft::test
