// A rank's share of the queries against all keys in sequence order has the bits of the whole.
#pragma once

#include <string_view>
#include <vector>

#include "kernel/kernel_features.h"

namespace weft::test {

// Rows `tokens` of a tensor; NaN for kNoToken.
inline Buffer rows_of(const Buffer& whole, const std::vector<Index>& tokens) {
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

struct QueryCuts {
  DType dtype = DType::f32;
  Index heads = 4, dqk = 40, dv = 24, keys_per_split = 0;
  std::vector<LayoutKind> layouts = {LayoutKind::dual_chunk};
  std::vector<Index> rank_counts = {3, 8};
};

inline void expect_same_however_cut(std::string_view kernel, const Mask& mask, const QueryCuts& cuts) {
  const std::vector<Index> real = {150, 1, 77, 0, 400};
  const Packing packing = Packing(lengths(real)).padded_to(48);  // a multiple of 2·ranks for all rank counts here
  const Problem problem(packing, mask);
  const AttentionProblem base{
      .hq = cuts.heads, .hk = cuts.heads / 2, .dqk = cuts.dqk, .dv = cuts.dv, .dtype = cuts.dtype};
  KernelProblem whole = make_problem(base, packing, mask, 32);
  whole.keys_per_split = cuts.keys_per_split;
  const Outputs want(whole.p), plain(whole.p);
  attend_on(kernel, want.forward_args(whole));
  KernelForwardArgs without_logits = plain.forward_args(whole);
  without_logits.max_logit = {};  // cuda.sm90 has another instance for callers that do not ask for it
  attend_on(kernel, without_logits);
  EXPECT_EQ(bits(plain.forward.out), bits(want.forward.out));
  EXPECT_EQ(bits(plain.forward.lse), bits(want.forward.lse));
  std::size_t compared = 0;
  for (const LayoutKind kind : cuts.layouts) {
    for (const Index ranks : cuts.rank_counts) {
      const Layout layout = make_layouts(kind, problem, ranks).q;
      for (Index rank = 0; rank < ranks; ++rank) {
        SCOPED_TRACE(std::string(name(kind)) + ", rank " + std::to_string(rank) + " of " + std::to_string(ranks));
        const Plan plan = make_plan(problem, layout.runs(rank), layout.sequence_order());
        const std::vector<Index> tokens = layout.tokens(rank);
        const Buffer q = rows_of(whole.p.q, tokens);
        const Buffer out(cuts.dtype, plan.q_rows, cuts.heads, cuts.dv), lse(DType::f32, plan.q_rows, cuts.heads, 1);
        KernelForwardArgs args = without_logits;
        args.q = q.view();
        args.slices = plan.slices;
        args.out = out.view();
        args.lse = lse.view();
        attend_on(kernel, args);
        std::vector<Index> real_rows, real_tokens;
        for (Index row = 0; row < plan.q_rows; ++row) {
          if (tokens[at(row)] == kNoToken) continue;
          real_rows.push_back(row);
          real_tokens.push_back(tokens[at(row)]);
          if (whole.p.q_used[at(tokens[at(row)])]) ++compared;
        }
        ASSERT_EQ(bits(rows_of(out, real_rows)), bits(rows_of(want.forward.out, real_tokens)));
        ASSERT_EQ(bits(rows_of(lse, real_rows)), bits(rows_of(want.forward.lse, real_tokens)));
      }
    }
  }
  EXPECT_EQ(compared, cuts.layouts.size() * cuts.rank_counts.size() * 628);  // every real token, every time
}

}  // namespace weft::test
