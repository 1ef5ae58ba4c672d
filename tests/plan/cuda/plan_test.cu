// The planner on the device: count(i) and emit(i), a thread a sequence, entry by entry what the host plans.
#include <numeric>
#include <variant>
#include <vector>

#include <gtest/gtest.h>

#include "check/cases/random_case.h"
#include "cuda/device_array.h"
#include "index.h"
#include "plan/cut.h"
#include "plan/layout_data.h"
#include "weft/plan.h"

namespace weft {
namespace {

using Planner = SequencePlanner<RegularRuns, RegularRuns>;

__global__ void count_slices(Planner planner, Index sequences, Index* counts) {
  const Index i = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < sequences) counts[i] = planner.count(i);
}

__global__ void emit_slices(Planner planner, Index sequences, const Index* begins, Slice* slices) {
  const Index i = static_cast<Index>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < sequences) planner.emit(i, slices + begins[i]);
}

std::vector<Slice> plan_on_device(const Problem& problem, const RunList& q, const RunList& k) {
  const Stream &qs = problem.packing().q(), &ks = problem.packing().k();
  const DeviceArray<Index> q_offsets(qs.offsets()), q_used(qs.used_lengths()), k_offsets(ks.offsets()),
      k_used(ks.used_lengths());
  Planner planner{{q_offsets.get(), q_used.get()},
                  {k_offsets.get(), k_used.get()},
                  view(problem.mask()),
                  std::get<RegularRuns>(q.source().runs),
                  std::get<RegularRuns>(k.source().runs),
                  q.stride(),
                  k.in_sequence_order()};
  planner.q.offsets = q_offsets.get();
  planner.k.offsets = k_offsets.get();
  const Index n = qs.sequences();
  const unsigned blocks = static_cast<unsigned>(n / 128 + 1);
  const DeviceArray<Index> counts(at(n));
  count_slices<<<blocks, 128>>>(planner, n, counts.get());
  std::vector<Index> begins = counts.host();
  const Index total = std::accumulate(begins.begin(), begins.end(), Index{0});
  std::exclusive_scan(begins.begin(), begins.end(), begins.begin(), Index{0});
  const DeviceArray<Index> device_begins(begins);
  const DeviceArray<Slice> slices(at(total));
  emit_slices<<<blocks, 128>>>(planner, n, device_begins.get(), slices.get());
  expect_ok(cudaGetLastError());
  return slices.host();
}

TEST(DevicePlan, EqualsTheHostsOnRandomProblems) {
  int compared = 0;
  for (unsigned long long seed = 0; seed < 2000; ++seed) {
    check::RandomChoices choices(seed);
    const check::Case c = random_case(choices, static_cast<LayoutKind>(seed % 4));
    if (c.mask.slices) continue;  // planned on the host
    const Problem p = problem_of(c);
    const Layouts l = layouts_of(c, p);
    const Index rank = static_cast<Index>(seed) % c.ranks;
    for (const RunList& k : {l.k.rank_order(), l.k.runs(0), l.k.sequence_order()}) {
      if (k.stride() != l.q.runs(rank).stride()) continue;
      EXPECT_EQ(plan_on_device(p, l.q.runs(rank), k), make_plan(p, l.q.runs(rank), k).slices) << flags(c);
      ++compared;
    }
  }
  EXPECT_GT(compared, 3000);
}

TEST(DevicePlan, EqualsTheHostsOnManyDocuments) {
  std::vector<Index> lengths;
  for (Index i = 0; i < 4096; ++i) lengths.push_back(16 * (1 + i * 7919 % 61));
  const Problem p(Stream::from_lengths(lengths), {.causal = true, .left = 100});
  const Layout l = Layout::dual_chunk(p.packing().q(), 8);
  EXPECT_EQ(plan_on_device(p, l.runs(3), l.rank_order()), make_plan(p, l.runs(3), l.rank_order()).slices);
}

}  // namespace
}  // namespace weft
