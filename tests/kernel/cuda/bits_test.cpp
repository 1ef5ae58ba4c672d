// What no bit of a GPU result may depend on: padding, how queries were cut, views, the run; and offsets past 2^31.
#include <limits>

#include "index.h"
#include "kernel/cuda/gpu_problem.h"
#include "refusal.h"

namespace weft::test {
namespace {

using GpuBits = GpuTest;
WEFT_FOR_EACH_GPU_KERNEL(GpuBits);

// Several tiles, grouped heads, padding everywhere, a learnable sink.
KernelProblem packed(DType dtype, const Mask& mask, Index dim = 40) {
  const Stream stream = padded({5, 155, 165, 405}, {141, 1, 233}, 415);
  const AttentionProblem base{
      .hq = 4, .hk = 2, .dqk = dim, .dv = dim - 16, .dtype = dtype, .sink = Sink::Kind::learnable};
  KernelProblem problem{"", masked(base, stream, mask)};
  Random random(31);
  problem.p.fill(random);
  return problem;
}

void fill_unused(const Buffer& buffer, const std::vector<bool>& used, const std::vector<double>& values) {
  std::vector<double> row(at(buffer.view().dim));
  std::size_t n = 0;
  for (Index r = 0; r < buffer.view().rows; ++r) {
    for (Index head = 0; head < buffer.view().heads && !used[at(r)]; ++head) {
      for (double& x : row) x = values[n++ % values.size()];
      store_row(buffer.view(), r, head, row.data());
    }
  }
}

TEST_P(GpuBits, DoNotDependOnPadding) {
  constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
  for (const Index dim : {40, 128, 192, 256}) {
    for (const Mask& mask : {Mask{.causal = true}, Mask{.left = 30, .right = 5}}) {
      SCOPED_TRACE(dim);
      std::vector<KernelProblem> problems;
      for (int i = 0; i < 2; ++i) problems.push_back(packed(dtype(), mask, dim));
      const Outputs zeros(problems[0].p), filled(problems[1].p);
      const std::vector<double> values[] = {{0}, {kNan, kInf, -kInf, 1e4, kNan}};
      for (std::size_t i = 0; i < 2; ++i) {
        const AttentionProblem& p = problems[i].p;
        const Outputs& outputs = i == 0 ? zeros : filled;
        for (const Buffer* b : {&p.q, &p.dout}) fill_unused(*b, p.q_used, values[i]);
        for (const Buffer* b : {&p.k, &p.v}) fill_unused(*b, p.k_used, values[i]);
        gpu_attend(outputs.forward_args(problems[i]));
      }
      expect_same_bits(filled, zeros, Pass::forward);
      for (std::size_t i = 0; i < 2; ++i) {  // what the backward reads of padding is not the forward's either
        const Outputs& outputs = i == 0 ? zeros : filled;
        fill_unused(outputs.forward.out, problems[i].p.q_used, values[i]);
        fill_unused(outputs.forward.lse, problems[i].p.q_used, values[i]);
        KernelBackwardArgs args = outputs.backward_args(problems[i]);
        args.deterministic = true;
        gpu_attend_backward(args);
      }
      fill_unused(filled.forward.out, problems[1].p.q_used, {0});
      fill_unused(filled.forward.lse, problems[1].p.q_used, {0});
      expect_same_bits(filled, zeros, Pass::backward);
      // Without `deterministic` dq's bits may change, but no padding reaches it.
      gpu_attend_backward(filled.backward_args(problems[1]));
      gpu_attend_backward(zeros.backward_args(problems[0]));  // cuda.sm90 adds up dk in another order then
      for (const double x : filled.backward.dq.values()) ASSERT_FALSE(std::isnan(x));
      EXPECT_EQ(bits(filled.backward.dk), bits(zeros.backward.dk));
      EXPECT_EQ(bits(filled.backward.dv), bits(zeros.backward.dv));
    }
  }
}

TEST_P(GpuBits, DeterministicIsTheSameOnEveryRun) {
  const KernelProblem problem = packed(dtype(), {.causal = true}, 80);
  const Outputs first(problem.p);
  gpu_run(first, problem, Pass::backward, true);
  for (int i = 0; i < 4; ++i) {
    const Outputs again(problem.p);
    gpu_run(again, problem, Pass::backward, true);
    expect_same_bits(again, first, Pass::backward);
  }
}

// Rows `tokens` of a tensor; kNoToken: NaN.
Buffer rows_of(const Buffer& whole, const std::vector<Index>& tokens) {
  const ConstTensorView from = whole.view();
  Buffer result(from.dtype, static_cast<Index>(tokens.size()), from.heads, from.dim);
  std::vector<double> row(at(from.dim));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (Index head = 0; head < from.heads && tokens[i] != kNoToken; ++head) {
      load_row(from, tokens[i], head, row.data());
      store_row(result.view(), static_cast<Index>(i), head, row.data());
    }
  }
  return result;
}

// Whole Q against each rank's part of it, keys in sequence order.
void expect_same_however_cut(DType dtype, Index dim, const Mask& mask, Index heads, Index part_keys) {
  const std::vector<Index> real = {150, 1, 77, 0, 400};
  const Packing packing = Packing(lengths(real)).padded_to(48);
  const Problem problem(packing, mask);
  const Index dim_v = dim == 192 ? 128 : dim - 8;
  const AttentionProblem base{.hq = heads, .hk = heads / 2, .dqk = dim, .dv = dim_v, .dtype = dtype};
  KernelProblem whole{"", masked(base, packing, mask), {}, part_keys};
  Random random(32);
  whole.p.fill(random);
  const Outputs want(whole.p);
  gpu_attend(want.forward_args(whole));
  const std::vector<double> want_out = want.forward.out.values(), want_lse = want.forward.lse.values();
  const Outputs plain(whole.p);  // another kernel, which does not look for the largest logits
  KernelForwardArgs fewer = plain.forward_args(whole);
  fewer.max_logit = {};
  gpu_attend(fewer);
  EXPECT_EQ(bits(plain.forward.out), bits(want.forward.out));
  EXPECT_EQ(bits(plain.forward.lse), bits(want.forward.lse));
  for (const Index ranks : {3, 8}) {
    const Layout layout = make_layouts(LayoutKind::dual_chunk, problem, ranks).q;
    for (Index rank = 0; rank < ranks; ++rank) {
      SCOPED_TRACE("rank " + std::to_string(rank) + " of " + std::to_string(ranks));
      const Plan plan = make_plan(problem, layout.runs(rank), layout.sequence_order());
      const std::vector<Index> tokens = layout.tokens(rank);
      const Buffer q = rows_of(whole.p.q, tokens);
      const Buffer out(dtype, plan.q_rows, heads, dim_v), lse(DType::f32, plan.q_rows, heads, 1);
      KernelForwardArgs args = want.forward_args(whole);
      args.q = q.view();
      args.slices = plan.slices;
      args.out = out.view();
      args.lse = lse.view();
      args.max_logit = {};
      gpu_attend(args);
      const std::vector<double> got_out = out.values(), got_lse = lse.values();
      const Index wide = heads * dim_v;
      for (std::size_t row = 0; row < tokens.size(); ++row) {
        if (tokens[row] == kNoToken) continue;
        for (Index i = 0; i < wide; ++i)
          ASSERT_EQ(std::bit_cast<std::uint64_t>(got_out[row * at(wide) + at(i)]),
                    std::bit_cast<std::uint64_t>(want_out[at(tokens[row] * wide + i)]))
              << "row " << row << ", " << i;
        for (Index i = 0; i < heads; ++i)
          ASSERT_EQ(got_lse[row * at(heads) + at(i)], want_lse[at(tokens[row] * heads + i)]) << "row " << row;
      }
    }
  }
}
TEST_P(GpuBits, DoNotDependOnHowQueriesAreCut) {
  for (const Index dim : {40, 128, 256})
    for (const Mask& mask : {Mask{.left = 64, .right = 10}, Mask{.causal = true}, Mask{.causal = true, .chunk = 50}}) {
      expect_same_however_cut(dtype(), dim, mask, 4, 0);
      expect_same_however_cut(dtype(), dim, mask, 4, 128);
    }
}
// Whole Q has more tiles than are computed in parts at once, a rank's fewer: parts one after another are the same.
TEST_P(GpuBits, DoNotDependOnWhoComputesParts) {
  if (std::string_view(gpu_kernel) != kSm90) GTEST_SKIP() << "has no parts";
  for (const Index dim : {40, 128, 192, 256}) expect_same_however_cut(dtype(), dim, {.causal = true}, 200, 128);
}

// Strided views, and one fused tensor of q, k and v by heads or by dim.
TEST_P(GpuBits, DoNotDependOnViews) {
  const auto problem_of = [&](ViewKind view) {
    KernelProblem problem{"",
                          {.tq = 75,
                           .tk = 75,
                           .hq = 3,
                           .hk = 3,
                           .dqk = 24,
                           .dv = 24,
                           .dtype = dtype(),
                           .view = view,
                           .slices = {{0, 30, 0, 30, -20, 0}, {30, 70, 30, 75, -kUnlimited, 3}}}};
    Random random(33);
    problem.p.fill(random);
    return problem;
  };
  const KernelProblem plain = problem_of(ViewKind::thd);
  const AttentionProblem& p = plain.p;
  const Outputs want(p);
  gpu_run(want, plain, Pass::backward, true);
  for (const ViewKind view : {ViewKind::sbhd, ViewKind::gaps, ViewKind::head_major}) {
    SCOPED_TRACE(static_cast<int>(view));
    const KernelProblem strided = problem_of(view);
    const Outputs got(strided.p);
    gpu_run(got, strided, Pass::backward, true);
    expect_same_bits(got, want, Pass::backward);
  }
  const Buffer by_heads(dtype(), p.tq, 9, 24), by_heads_back(dtype(), p.tq, 9, 24);
  const Buffer by_dim(dtype(), p.tq, 3, 72), by_dim_back(dtype(), p.tq, 3, 72);
  const std::pair<QkvViews<void>, QkvViews<void>> fused[] = {
      {qkv_3hd(by_heads.view(), 3, 3), qkv_3hd(by_heads_back.view(), 3, 3)},
      {qkv_h3d(by_dim.view()), qkv_h3d(by_dim_back.view())}};
  for (const auto& [in, grad] : fused) {
    from_f64(p.q.values(), in.q);
    from_f64(p.k.values(), in.k);
    from_f64(p.v.values(), in.v);
    const Outputs got(p);
    KernelForwardArgs forward = got.forward_args(plain);
    forward.q = in.q;
    forward.k = in.k;
    forward.v = in.v;
    gpu_attend(forward);
    expect_same_bits(got, want, Pass::forward);
    KernelBackwardArgs backward = got.backward_args(plain);
    backward.q = in.q;
    backward.k = in.k;
    backward.v = in.v;
    backward.dq = grad.q;
    backward.dk = grad.k;
    backward.dv = grad.v;
    backward.deterministic = true;
    gpu_attend_backward(backward);
    EXPECT_EQ(bits(to_f64(grad.q)), bits(want.backward.dq));
    EXPECT_EQ(bits(to_f64(grad.k)), bits(want.backward.dk));
    EXPECT_EQ(bits(to_f64(grad.v)), bits(want.backward.dv));
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

TEST_P(GpuBits, OffsetsPass32Bits) {
  if (dtype() == DType::f32) GTEST_SKIP() << "twice the memory";
  const Index rows = 10;  // 10 GiB a tensor
  KernelProblem problem{"",
                        {.tq = rows,
                         .tk = rows,
                         .hq = 2,
                         .dqk = 8,
                         .dv = 8,
                         .dtype = dtype(),
                         .slices = {{0, rows - 1, 0, rows, -kUnlimited, 1}}}};
  const AttentionProblem& p = problem.p;
  Random random(42);
  problem.p.fill(random);
  const Outputs near(p), far(p);
  gpu_run(near, problem, Pass::backward, true);
  {
    const FarRows q(p.q.view()), k(p.k.view()), v(p.v.view()), out(far.forward.out.view());
    KernelForwardArgs args = far.forward_args(problem);
    const Buffer lse(DType::f32, rows, 2, 1);
    OnGpu gpu;
    args.q = q.view();
    args.k = k.view();
    args.v = v.view();
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
  OnGpu gpu;
  KernelBackwardArgs args = on_gpu(gpu, near.backward_args(problem));
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
  args.dout = dout.view();
  args.dq = dq.view();
  args.dk = dk.view();
  args.dv = dv.view();
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
TEST_P(GpuBits, RefusedUnderCapture) {
  const KernelProblem problem = packed(dtype(), {.causal = true});
  const Outputs outputs(problem.p);
  OnGpu gpu;
  const KernelForwardArgs args = on_gpu(gpu, outputs.forward_args(problem));
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
