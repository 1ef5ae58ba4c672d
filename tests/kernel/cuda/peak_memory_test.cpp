// How much memory of a GPU a backward takes beside its tensors: the gathered K and V, one f32 copy of dK, dV and dQ,
// and little else. A forward in parts of keys takes no more for more parts, where tiles are many.
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "cuda/device_array.h"
#include "cuda/handle_pool.h"
#include "kernel/cuda/gpu_problem.h"
#include "run/cuda/rank_step.h"

namespace weft::test {
namespace {

// Bytes of Weft's memory that are in use, now or at most.
double in_use(cudaMemPoolAttr what) {
  std::uint64_t bytes = 0;
  expect_ok(cudaMemPoolGetAttribute(cuda::memory_pool(), what, &bytes));
  return static_cast<double>(bytes);
}

void forget_peak() {
  std::uint64_t none = 0;
  expect_ok(cudaMemPoolSetAttribute(cuda::memory_pool(), cudaMemPoolAttrUsedMemHigh, &none));
}

struct Sizes {
  Index heads_q = 0, heads_k = 0, dim_qk = 0, dim_v = 0, ranks = 0;
};

// Of all ranks together, which share a GPU: dQ summed in any order, and for the same bits.
std::array<double, 2> peak_of_backward(const Sizes& s, const Problem& problem) {
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, s.ranks);
  std::array<double, 2> peaks = {};
  run_ranks(s.ranks, [&](Communicator& comm) {
    const Place place = check::place_of(gpu_kernel);
    const Index rows = layouts.q.rows();
    const RankStep of({rows, rows, s.heads_q, s.heads_k, s.dim_qk, s.dim_v, DType::bf16}, place, comm.rank());
    for (const bool deterministic : {false, true}) {
      const auto make = [&] {
        return Executor(comm, make_schedule(problem, layouts, comm.rank(), {s.heads_q, s.heads_k}, {}),
                        {.kernel = std::string(gpu_kernel), .deterministic = deterministic, .place = place});
      };
      {  // makes work lists, which are kept: they are a plan's, not a step's
        Executor first = make();
        of.run_both(first);
      }
      const auto settle = [&] {
        device::synchronize(place);
        meet(comm);
      };
      double before = 0;
      settle();
      if (comm.rank() == 0) {
        before = in_use(cudaMemPoolAttrUsedMemCurrent);
        forget_peak();
      }
      settle();
      Executor executor = make();
      for (int i = 0; i < 2; ++i) executor.backward(of.on_gpu.backward);
      settle();
      if (comm.rank() == 0) peaks[deterministic ? 1 : 0] = in_use(cudaMemPoolAttrUsedMemHigh) - before;
      settle();
    }
  });
  return peaks;
}

class GpuPeakMemory : public GpuTest {
 protected:
  void SetUp() override {
    const char* plain = std::getenv("WEFT_PLAIN_MEMORY");
    if (plain != nullptr && *plain == '1') GTEST_SKIP() << "pieces of memory are not the pool's";
    if (dtype() != DType::bf16) GTEST_SKIP() << "the sizes are those of bf16";
    GpuTest::SetUp();
  }
};
WEFT_FOR_EACH_GPU_KERNEL(GpuPeakMemory);

TEST_P(GpuPeakMemory, OfABackwardIsKeysAndOneCopyOfGradients) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{5000, 696, 2496, 8192}), {.causal = true});
  for (const Sizes& s : {Sizes{32, 8, 128, 128, 4}, Sizes{8, 8, 128, 128, 8}, Sizes{16, 4, 64, 64, 2},
                         Sizes{8, 8, 192, 128, 4}, Sizes{8, 2, 256, 256, 8}}) {
    const std::array<double, 2> peaks = peak_of_backward(s, problem);
    for (const bool deterministic : {false, true}) {
      const auto real = [](Index number) { return static_cast<double>(number); };
      const double tokens = 16384, rows = tokens * real(s.heads_q),
                   keys = tokens * real(s.heads_k * (s.dim_qk + s.dim_v));
      const double dq = rows * real(s.dim_qk) * 4, bound = real(s.ranks) * keys * (2 + 4) + dq;
      // Rows that fill up tiles, a few numbers more; and two a row if dQ has no room for them (cuda.portable).
      const double few = 0.005 * dq + real(s.ranks) * (1 << 16) + (gpu_kernel == kSm90 ? 0 : rows * 8);
      const double peak = peaks[deterministic ? 1 : 0];
      EXPECT_LE(peak, bound + few);
      std::printf("heads %d:%d, widths %d/%d, %d ranks%s: %.1f MB, %.4f of keys and one copy of gradients\n",
                  static_cast<int>(s.heads_q), static_cast<int>(s.heads_k), static_cast<int>(s.dim_qk),
                  static_cast<int>(s.dim_v), static_cast<int>(s.ranks), deterministic ? ", same bits" : "", peak / 1e6,
                  peak / bound);
    }
  }
}

// Of a forward in parts of so many keys.
double peak_of_forward(KernelProblem problem, Index keys_per_split) {
  Random random(61);
  problem.p.fill(random);
  problem.keys_per_split = keys_per_split;
  const Outputs got(problem.p);
  OnDevice gpu(gpu_kernel);
  const KernelForwardArgs args = gpu.bind(got.forward_args(problem));
  double peak = 0;
  for (int round = 0; round < 2; ++round) {  // the first makes lists, which are kept
    const double before = in_use(cudaMemPoolAttrUsedMemCurrent);
    forget_peak();
    attend(args, gpu_kernel);
    device::synchronize(args.place);
    peak = in_use(cudaMemPoolAttrUsedMemHigh) - before;
  }
  return peak;
}
AttentionProblem with_heads(Index heads_k, DType dtype) {
  return {.tq = 300, .tk = 2000, .hq = 2 * heads_k, .hk = heads_k, .dqk = 128, .dv = 128, .dtype = dtype};
}

TEST_P(GpuPeakMemory, OfAForwardOfManyTilesDoesNotGrowWithParts) {
  if (std::string_view(gpu_kernel) != kSm90) GTEST_SKIP() << "has no parts";
  KernelProblem problem{"", with_heads(200, dtype())};
  problem.p.slices = {{0, 300, 0, 2000}};
  const double two = peak_of_forward(problem, 1024);
  EXPECT_GT(two, peak_of_forward(problem, kUnlimited));
  EXPECT_EQ(two, peak_of_forward(problem, 128));
}
TEST_P(GpuPeakMemory, OfAForwardOfFewTilesGrowsWithPartsThatTheySee) {
  if (std::string_view(gpu_kernel) != kSm90) GTEST_SKIP() << "has no parts";
  KernelProblem problem{"", with_heads(1, dtype())};
  problem.p.slices = {{0, 300, 0, 2000}};
  const double all = peak_of_forward(problem, 128);
  problem.p.slices = {{0, 300, 0, 2000, 1400, 1500}};  // two or three of sixteen
  EXPECT_LT(peak_of_forward(problem, 128), all / 4);
}

}  // namespace
}  // namespace weft::test
