// Times the GPU kernel on packed documents, whole and as one rank of eight sees them. Useful TFLOP/s count visible
// pairs: 4·d forward and 10·d backward, per query head.
//   attention                 all cases
//   attention CASE...         some, by name
//   attention --list          the names
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "cuda/check.h"
#include "tensor.h"
#include "weft/kernel.h"
#include "weft/plan.h"

namespace {

using namespace weft;
using bench::Tensor;

struct BenchCase {
  std::string name;
  std::vector<Index> lengths;
  Index heads_q, heads_k, dim;
  Mask mask = {.causal = true};
  Index ranks = 1, rank = 0;
  DType dtype = DType::bf16;
};

std::vector<Index> repeated(std::initializer_list<std::pair<Index, Index>> counts) {
  std::vector<Index> result;
  for (const auto& [count, length] : counts) result.insert(result.end(), static_cast<std::size_t>(count), length);
  return result;
}

std::vector<BenchCase> all_cases() {
  const std::vector<Index> packed = {1456, 1952, 704,  4320, 2624,  1280, 4560, 1008, 16384,
                                     4176, 2432, 2288, 2704, 12384, 2464, 3248, 1040, 512};
  const std::vector<Index> short_ones = repeated({{64, 512}, {16, 1024}, {8, 2048}});
  return {{"packed", packed, 32, 8, 128},
          {"rank-of-8", packed, 32, 8, 128, {.causal = true}, 8, 3},
          {"short-rank-of-8", short_ones, 32, 8, 128, {.causal = true}, 8, 3},
          {"dense", {16384}, 32, 8, 128},
          {"width-64", repeated({{16, 4096}}), 16, 16, 64},
          {"window", {32768}, 32, 8, 128, {.causal = true, .left = 4096}},
          {"mha-full", {16384}, 16, 16, 128, {}},
          {"width-256", {8192}, 16, 4, 256},
          {"f32", {8192}, 16, 4, 128, {.causal = true}, 1, 0, DType::f32}};
}

// Median milliseconds of 20 runs, after two.
template <class Run>
float median_ms(const Run& run) {
  constexpr int kRuns = 20;
  cudaEvent_t begin, end;
  WEFT_CUDA(cudaEventCreate(&begin));
  WEFT_CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kRuns + 2; ++i) {
    WEFT_CUDA(cudaEventRecord(begin));
    run();
    WEFT_CUDA(cudaEventRecord(end));
    WEFT_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    WEFT_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  WEFT_CUDA(cudaEventDestroy(begin));
  WEFT_CUDA(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void run(const BenchCase& c) {
  const Problem problem(Stream::from_lengths(c.lengths), c.mask);
  const Layout layout = make_layouts(c.ranks > 1 ? LayoutKind::dual_chunk : LayoutKind::contiguous, problem, c.ranks).q;
  const Plan plan = make_plan(problem, layout.runs(c.rank), layout.sequence_order());
  Index pairs = 0;
  for (const Slice& s : plan.slices) pairs += visible_pairs(s);
  const DType type = c.dtype;
  const Tensor q(type, plan.q_rows, c.heads_q, c.dim, 1), k(type, plan.k_rows, c.heads_k, c.dim, 2),
      v(type, plan.k_rows, c.heads_k, c.dim, 3), dout(type, plan.q_rows, c.heads_q, c.dim, 4);
  const Tensor out(type, plan.q_rows, c.heads_q, c.dim), lse(DType::f32, plan.q_rows, c.heads_q, 1);
  const Tensor dq(type, plan.q_rows, c.heads_q, c.dim), dk(type, plan.k_rows, c.heads_k, c.dim),
      dv(type, plan.k_rows, c.heads_k, c.dim);
  const Place place{.kind = DeviceKind::cuda};
  const ForwardArgs forward{.q = q.view(),
                            .k = k.view(),
                            .v = v.view(),
                            .slices = plan.slices,
                            .out = out.view(),
                            .lse = lse.view(),
                            .place = place};
  BackwardArgs backward{.q = q.view(),
                        .k = k.view(),
                        .v = v.view(),
                        .slices = plan.slices,
                        .dout = dout.view(),
                        .out = out.view(),
                        .lse = lse.view(),
                        .dq = dq.view(),
                        .dk = dk.view(),
                        .dv = dv.view(),
                        .place = place};
  const float forward_ms = median_ms([&] { attend(forward); });
  const float backward_ms = median_ms([&] { attend_backward(backward); });
  backward.deterministic = true;
  const float same_ms = median_ms([&] { attend_backward(backward); });
  const double flop = static_cast<double>(pairs * c.heads_q * c.dim);
  const auto rate = [&](double per_pair, float ms) { return per_pair * flop / (static_cast<double>(ms) * 1e9); };
  const auto d = [](float x) { return static_cast<double>(x); };
  std::printf("%-16s %9.3f %8.0f %9.3f %8.0f %9.3f %8.0f\n", c.name.c_str(), d(forward_ms), rate(4, forward_ms),
              d(backward_ms), rate(10, backward_ms), d(same_ms), rate(10, same_ms));
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<BenchCase> cases = all_cases();
  const std::vector<std::string> asked(arguments + 1, arguments + count);
  if (asked == std::vector<std::string>{"--list"}) {
    for (const BenchCase& c : cases) std::printf("%s\n", c.name.c_str());
    return 0;
  }
  for (const std::string& name : asked) {
    if (std::any_of(cases.begin(), cases.end(), [&](const BenchCase& c) { return c.name == name; })) continue;
    std::fprintf(stderr, "there is no case '%s'; --list names them\n", name.c_str());
    return 2;
  }
  if (asked.size() != 1)
    std::printf("%-16s %9s %8s %9s %8s %9s %8s\n", "case", "fwd ms", "TFLOP/s", "bwd ms", "TFLOP/s", "same bits",
                "TFLOP/s");
  try {
    // Workspaces stay with the process, as they do under any framework's allocator.
    cudaMemPool_t pool;
    WEFT_CUDA(cudaDeviceGetDefaultMemPool(&pool, 0));
    std::uint64_t keep = ~std::uint64_t{0};
    WEFT_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
    for (const BenchCase& c : cases)
      if (asked.empty() || std::find(asked.begin(), asked.end(), c.name) != asked.end()) run(c);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
