// Attention over the keys in parts, one call per part: by partial states, or by QuerySteps where a kernel takes them.
#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "kernel/kernel_problem.h"

namespace weft::test {

inline std::vector<Slice> keys_of(const std::vector<Slice>& slices, Range keys) {
  std::vector<Slice> part = slices;
  for (Slice& s : part) {
    s.k_begin = min_of(s.k_end, max_of(s.k_begin, keys.begin));
    s.k_end = max_of(s.k_begin, min_of(s.k_end, keys.end));
  }
  return part;
}

// Up to four ranges that cover all keys, in any order.
inline std::vector<Range> random_parts(Random& random, Index keys) {
  std::vector<Index> cuts = {0, keys};
  for (Index i = random.index(0, 3); i > 0; --i) cuts.push_back(random.index(0, keys));
  std::sort(cuts.begin(), cuts.end());
  std::vector<Range> parts;
  for (std::size_t i = 0; i + 1 < cuts.size(); ++i) parts.push_back({cuts[i], cuts[i + 1]});
  for (std::size_t i = parts.size(); i > 1; --i) std::swap(parts[i - 1], parts[at(random.index(0, Index(i) - 1))]);
  return parts;
}

inline void attend_partially(std::string_view kernel, const Outputs& got, const KernelProblem& problem,
                             const std::vector<Range>& parts) {
  const AttentionProblem& p = problem.p;
  const Buffer sums(p.view, DType::f32, p.tq, p.hq, p.dv);
  std::vector<RowState<float>> states(at(p.tq * p.hq));
  KernelForwardArgs end = got.forward_args(problem);
  end.partial = {sums.view(), states.data()};
  KernelForwardArgs step = end;
  step.out = step.lse = step.max_logit = {};
  for (const Range keys : parts) {
    const std::vector<Slice> part = keys_of(p.slices, keys);
    step.slices = part;
    attend_on(kernel, step);
  }
  finish_partial_on(kernel, end);
}

// Fills with NaN as many bytes of the stream's memory pool as a call may have taken for `out` in f32, and gives them
// back: the next call must not rely on what it finds there.
inline void spoil_memory(const KernelForwardArgs& args) {
  const std::vector<char> nan(at(args.out.rows * args.out.heads * args.out.dim) * sizeof(float), '\xff');
  const std::unique_ptr<device::Memory> memory = device::make_memory(args.place);
  void* data = memory->allocate(nan.size());
  device::to_device(args.place, data, nan.data(), static_cast<Index>(nan.size()));
  memory->deallocate(data, nan.size());
}

// Returns false if the kernel does not take such steps. `with_ends`: the kernel is told with which call each row ends.
inline bool attend_in_steps(std::string_view kernel, const Outputs& got, const KernelProblem& problem,
                            const std::vector<Range>& parts, bool with_ends = false) {
  const AttentionProblem& p = problem.p;
  const Kernel& entry = find_kernel(kernel);
  if (entry.takes_steps == nullptr) return false;
  OnDevice device(kernel);
  KernelForwardArgs args = device.bind(got.forward_args(problem));
  args.max_logit = {};
  if (!entry.takes_steps(args)) return false;
  std::vector<Range> rows;
  for (const Slice& s : p.slices) rows.push_back({s.q_begin, s.q_end});
  std::vector<Index> ends(rows.size(), 0);
  for (std::size_t n = 0; n < parts.size(); ++n)
    for (const Slice& s : keys_of(p.slices, parts[n]))
      for (std::size_t r = 0; r < rows.size(); ++r)
        if (s.q_begin < rows[r].end && s.q_end > rows[r].begin) ends[r] = static_cast<Index>(n);
  QuerySteps steps{.rows = rows, .ends = with_ends ? std::span<const Index>(ends) : std::span<const Index>{}};
  args.steps = &steps;
  for (std::size_t n = 0; n < parts.size(); ++n) {
    const std::vector<Slice> part = keys_of(p.slices, parts[n]);
    args.slices = part;
    steps.last = n + 1 == parts.size();
    attend(args, kernel);
    spoil_memory(args);
  }
  EXPECT_EQ(steps.state, nullptr);
  device.finish();
  return true;
}

// Judges every way to attend the keys in parts. Returns whether the kernel took steps.
inline bool judge_parts(Judge& judge, std::string_view kernel, const KernelProblem& problem,
                        const check::Expected& want, const std::vector<Range>& parts) {
  const AttentionProblem& p = problem.p;
  const Outputs partly(p);
  attend_partially(kernel, partly, problem, parts);
  judge.forward(partly.forward, want, p);
  for (const bool with_ends : {false, true}) {
    const Outputs stepped(p);
    if (!attend_in_steps(kernel, stepped, problem, parts, with_ends)) return false;
    judge.out_and_lse(stepped.forward, want, p);
  }
  return true;
}

}  // namespace weft::test
