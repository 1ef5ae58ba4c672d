// Blocks that compute many tiles, work lists that are kept between calls, and offsets past 2^31.
#include "kernel/cuda/gpu_problem.h"
#include "refusal.h"

namespace weft::test {
namespace {

using GpuTiles = GpuTest;
WEFT_FOR_EACH_GPU_KERNEL(GpuTiles);

// More tiles than a GPU has multiprocessors: blocks go from one to the next, of other lengths, some without keys.
TEST_P(GpuTiles, ManyTilesForEachBlock) {
  Judge judge(dtype(), true);
  for (const Index width : {64, 128, 192, 256}) {
    if (width > 64 && std::string_view(gpu_kernel) != kSm90) break;  // the others' blocks have one tile each
    SCOPED_TRACE(width);
    const Index dv = width == 192 ? 128 : width;
    const KernelProblem problem =
        make_problem({.tq = 340, .tk = 300, .hq = 140, .hk = 140, .dqk = width, .dv = dv, .dtype = dtype()},
                     {{0, 20, 0, 200},
                      {20, 21, 3, 300},
                      {140, 145, 100, 300, -kUnlimited, 0},
                      {300, 310, 0, 300, -250, -100},
                      {338, 340, 7, 10}},
                     18);
    const AttentionProblem& p = problem.p;
    const check::Expected want = expected_of(problem, Pass::forward);
    for (const bool largest : {true, false}) {
      const Outputs got(p);
      KernelForwardArgs args = got.forward_args(problem);
      if (!largest) args.max_logit = {};
      gpu_attend(args);
      judge.out_and_lse(got.forward, want, p);
    }
    judge_parts(judge, gpu_kernel, problem, want, {{150, 300}, {0, 100}, {100, 150}});
  }
}

// Lists that are kept between calls of a stream are those of the slices that are asked for, and are used any number of
// times.
TEST_P(GpuTiles, TheSameSlicesAgain) {
  Judge judge(dtype(), true);
  Random random(19);
  const std::vector<Slice> some[] = {{{0, 40, 0, 200, -kUnlimited, 150}},
                                     {{0, 40, 0, 200, -kUnlimited, 149}},
                                     {{0, 20, 0, 100}, {20, 40, 100, 200, -60, 120}}};
  for (int round = 0; round < 3; ++round)
    for (const std::vector<Slice>& slices : some) {
      KernelProblem problem{
          "", {.tq = 40, .tk = 200, .hq = 70, .hk = 35, .dqk = 64, .dv = 64, .dtype = dtype(), .slices = slices}};
      problem.p.fill(random);
      const Outputs got(problem.p);
      gpu_run(got, problem, Pass::backward);
      const check::Expected want = expected_of(problem, Pass::backward);
      judge.forward(got.forward, want, problem.p);
      judge.backward(got.backward, want, problem.p);
    }
}

// A tensor in device memory whose rows lie 2^29 elements apart: offsets pass 2^31 at row 4 and 2^32 at row 8.
class FarRows {
 public:
  static constexpr Index kApart = Index{1} << 29;
  explicit FarRows(const ConstTensorView& near)
      : near_(near), view_{nullptr, near.dtype, near.rows, near.heads, near.dim} {
    WEFT_CUDA(cudaMalloc(&view_.data, at(((near.rows - 1) * kApart + near.heads * near.dim) * size_of(near.dtype))));
    view_.row_stride = kApart;
    view_.head_stride = near.dim;
    copy(cudaMemcpyHostToDevice, const_cast<void*>(near.data));
    WEFT_CUDA(cudaDeviceSynchronize());
  }
  ~FarRows() { cudaFree(view_.data); }
  FarRows(const FarRows&) = delete;
  FarRows& operator=(const FarRows&) = delete;
  const TensorView& view() const { return view_; }
  void back(const TensorView& to) const { copy(cudaMemcpyDeviceToHost, to.data); }

 private:
  void copy(cudaMemcpyKind kind, void* host) const {  // a contiguous tensor on the host
    const std::size_t bytes = at(near_.heads * near_.dim * size_of(near_.dtype));
    for (Index row = 0; row < near_.rows; ++row) {
      char* far = static_cast<char*>(view_.data) + row * kApart * size_of(near_.dtype);
      char* here = static_cast<char*>(host) + at(row) * bytes;
      WEFT_CUDA(kind == cudaMemcpyHostToDevice ? cudaMemcpy(far, here, bytes, kind)
                                               : cudaMemcpy(here, far, bytes, kind));
    }
  }
  ConstTensorView near_;
  TensorView view_;
};

TEST_P(GpuTiles, OffsetsPass32Bits) {
  if (dtype() == DType::f32) GTEST_SKIP() << "twice the memory";
  const Index rows = 10;  // 10 GiB a tensor
  const KernelProblem problem = make_problem({.tq = rows, .tk = rows, .hq = 2, .dqk = 8, .dv = 8, .dtype = dtype()},
                                             {{0, rows - 1, 0, rows, -kUnlimited, 1}}, 42);
  const AttentionProblem& p = problem.p;
  const Outputs near(p), far(p);
  gpu_run(near, problem, Pass::backward, true);
  {
    const FarRows q(p.q.view()), k(p.k.view()), v(p.v.view()), out(far.forward.out.view());
    KernelForwardArgs args = far.forward_args(problem);
    OnDevice gpu(gpu_kernel);
    read_from(args, q.view(), k.view(), v.view());
    args.out = out.view();
    args.lse = gpu.out(far.forward.lse.view());
    args.max_logit = gpu.out(far.forward.max_logit.view());
    args.place = gpu.place();
    attend(args, gpu_kernel);
    gpu.finish();
    out.back(far.forward.out.view());
  }
  expect_same_bits(far, near, Pass::forward);
  const FarRows q(p.q.view()), k(p.k.view()), v(p.v.view()), dout(p.dout.view());
  const FarRows dq(far.backward.dq.view()), dk(far.backward.dk.view()), dv(far.backward.dv.view());
  OnDevice gpu(gpu_kernel);
  KernelBackwardArgs args = gpu.bind(near.backward_args(problem));
  read_from(args, q.view(), k.view(), v.view());
  write_to(args, dq.view(), dk.view(), dv.view());
  args.dout = dout.view();
  args.deterministic = true;
  attend_backward(args, gpu_kernel);
  gpu.finish();
  dq.back(far.backward.dq.view());
  dk.back(far.backward.dk.view());
  dv.back(far.backward.dv.view());
  EXPECT_EQ(bits(far.backward.dq), bits(near.backward.dq));
  EXPECT_EQ(bits(far.backward.dk), bits(near.backward.dk));
  EXPECT_EQ(bits(far.backward.dv), bits(near.backward.dv));
}

// A list from the host cannot be replayed with a graph: refused, and the capture can be ended.
TEST_P(GpuTiles, RefusedUnderCapture) {
  const KernelProblem problem =
      make_problem({.tq = 40, .tk = 90, .dtype = dtype()}, {{0, 40, 0, 90, -kUnlimited, 50}}, 31);
  const Outputs outputs(problem.p);
  OnDevice gpu(gpu_kernel);
  const KernelForwardArgs args = gpu.bind(outputs.forward_args(problem));
  const cudaStream_t stream = static_cast<cudaStream_t>(args.place.stream);
  attend(args, gpu_kernel);  // kept lists do not change that: a graph might read them when they are gone
  WEFT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  expect_refusal([&] { attend(args, gpu_kernel); }, {"graph"});
  cudaGraph_t graph = nullptr;
  WEFT_CUDA(cudaStreamEndCapture(stream, &graph));
  WEFT_CUDA(cudaGraphDestroy(graph));
}

}  // namespace
}  // namespace weft::test
