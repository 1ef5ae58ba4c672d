// Slices of one rank from offsets in device memory: the host's planner, with several threads per sequence.
#pragma once

#include "plan/cuda/scan.h"
#include "plan/cut.h"
#include "plan/runs.h"

namespace weft {

struct PlanArgs {
  OffsetsView q, k;
  MaskView mask;
  RunsSpec q_runs, k_runs;
  Index stride;
  bool keep_k_begin;
  int q_parts, k_parts;  // threads per sequence: q_parts·k_parts
  Index runs_per_q_part, runs_per_k_part;
  DeviceSlice* slices;
  std::int32_t* written;
  Index capacity;
  Reporter reporter;
};

template <class Queries, class Keys>
struct PlanJob : PlanArgs {
  static constexpr int kSums = 1;
  // Slices are expensive to find: the first few are cached between counting and emitting, so that most threads search
  // once.
  struct Cache {
    static constexpr int kSlices = 8;

    int count;
    DeviceSlice slices[kSlices];
  };
  struct Shared {
    SharedSide<kScanThreads> q, k;
    bool ok[kScanThreads];
  };
  using Planner = SequencePlanner<RunSubset<Queries>, RunSubset<Keys>>;

  WEFT_HD int sequences() const { return static_cast<int>(q.sequences); }
  WEFT_HD int per_tile() const { return kScanThreads / (q_parts * k_parts); }

  __device__ void load(Shared& shared, int first, int count) const {
    if (static_cast<int>(threadIdx.x) < count) shared.ok[threadIdx.x] = true;
    load_side(shared.q, shared.ok, q, q_runs.multiple(), 0, reporter.state, first, count);
    load_side(shared.k, shared.ok, k, k_runs.multiple(), 1, reporter.state, first, count);
  }

  template <class F>
  __device__ void for_each(const Shared& shared, int count, F&& f) const {
    const int parts = q_parts * k_parts, i = static_cast<int>(threadIdx.x) / parts;
    if (i >= count || !shared.ok[i]) return;
    const int part = static_cast<int>(threadIdx.x) % parts, q_part = part / k_parts, k_part = part % k_parts;
    const auto last = [](Index at, Index size, bool end) { return end ? kUnlimited : at + size; };
    const Index q_first = q_part * runs_per_q_part, k_first = k_part * runs_per_k_part;
    const Planner planner{{shared.q.offsets, shared.q.used},
                          {shared.k.offsets, shared.k.used},
                          mask,
                          {Queries{q_runs.at(shared.q.extent(), shared.q.offsets)},
                           {q_first, last(q_first, runs_per_q_part, q_part == q_parts - 1)}},
                          {Keys{k_runs.at(shared.k.extent(), shared.k.offsets)},
                           {k_first, last(k_first, runs_per_k_part, k_part == k_parts - 1)}},
                          stride,
                          keep_k_begin};
    planner.for_each(i, f);
  }

  __device__ Sums<1> visit(const Shared& shared, Cache& cache, int, int n, bool emitting, Sums<1> before) const {
    // Unsigned, because wrong offsets can make the sums anything.
    const unsigned first = static_cast<unsigned>(before.v[0]);
    if (emitting && cache.count <= Cache::kSlices) {
      for (int i = 0; i < cache.count; ++i)
        if (first + i < capacity) slices[first + i] = cache.slices[i];
      return {};
    }
    int count = 0;
    for_each(shared, n, [&](const Slice& s) {
      if (!emitting && count < Cache::kSlices) cache.slices[count] = device_slice(s);
      if (emitting && first + count < capacity) slices[first + count] = device_slice(s);
      ++count;
    });
    cache.count = count;
    return {{count}};
  }

  __device__ void finish(ScanState& state) const {
    if (threadIdx.x != 0) return;
    const Index total = static_cast<Index>(state.total[0]);
    OffsetFault fault;
    if (state.worst != 0) {
      const unsigned long long key = ~state.worst;
      const int keys = static_cast<int>(key & 1);
      fault =
          find_offset_fault(keys != 0 ? k : q, static_cast<Index>(key >> 8), (keys != 0 ? k_runs : q_runs).multiple());
      fault.keys = keys;
    } else {
      const Index q_needed = q_runs.rows_needed(q.extent().size()), k_needed = k_runs.rows_needed(k.extent().size());
      if (total > capacity) fault = {OffsetFault::few_slices, 0, 0, total, capacity};
      if (k_needed > k_runs.rows) fault = {OffsetFault::few_rows, 1, 0, k_needed, k_runs.rows};
      if (q_needed > q_runs.rows) fault = {OffsetFault::few_rows, 0, 0, q_needed, q_runs.rows};
    }
    *written = fault.code == OffsetFault::none ? static_cast<std::int32_t>(total) : 0;
    if (fault.code != OffsetFault::none) reporter.report(fault);
  }
};

using PieceRuns = FixedRuns<RegularRuns::pieces>;
using FoldedRuns = FixedRuns<RegularRuns::folded>;
using DualRuns = FixedRuns<RegularRuns::folded_per_sequence>;
using StridedRuns = FixedRuns<RegularRuns::strided>;

template <class Queries, class Keys>
void launch_plan(const PlanArgs& args, const detail::ContextData& context);

}  // namespace weft
