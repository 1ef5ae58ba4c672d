// When a K/V buffer drops rows: not before the last query that sees them is done, and no later.
#include <algorithm>
#include <cmath>

#include <gtest/gtest.h>

#include "index.h"
#include "prepare/kv_sequences.h"

namespace weft::test {
namespace {

// The first key that queries of micro-sequences from `micro` on see; past all tokens if they see none.
Index first_seen(const Problem& problem, const MicroSequences& micros, Index micro) {
  Index first = micros.rows().end;
  for (const Slice& s : problem.global_slices())
    for (Index q = max_of(s.q_begin, micros.rows(micro).begin); q < s.q_end; ++q)
      for (Index k = s.k_begin; k < s.k_end; ++k)
        if (k - q >= s.lo && k - q <= s.hi) first = min_of(first, k);
  return first;
}

// Masks whose later queries see keys that queries between do not: a prefix that the third micro-sequence comes back to.
std::vector<Mask> returning_masks() {
  const Index all = kUnlimited;
  const Mask prefix{
      .slices = std::vector<Slice>{
          {0, 8, 0, 8, -all, 0}, {8, 16, 8, 16, -all, 0}, {16, 24, 0, 4, -all, all}, {16, 32, 16, 32, -all, 0}}};
  const Mask last{.slices =
                      std::vector<Slice>{{0, 8, 0, 8, -all, 0}, {24, 32, 5, 7, -all, all}, {24, 32, 24, 32, -all, 0}}};
  return {prefix, last, {.causal = true, .left = 9}, {.causal = true, .chunk = 12}, {.causal = true}};
}

TEST(KvDrop, RowsStayUntilTheLastQueryThatSeesThem) {
  for (const Index ranks : {1, 2}) {
    for (const Mask& mask : returning_masks()) {
      Setting r{.lengths = {32}, .mask = mask, .ranks = ranks, .micros = 4, .deterministic = true};
      Tensors whole(r);
      run_all(r, whole);
      r.drop = true;
      const MicroSequences micros = micros_of(r);
      const Problem problem = micros.problem(mask);
      Tensors t(r);
      run_ranks(ranks, [&](Communicator& comm) {
        KvBuffer buffer(comm, options_of(r, micros));
        buffer.begin(micros, mask);
        for (Index m = 0; m < r.micros; ++m) {
          buffer.forward(m, forward_args_with_keys(r, t, micros.rows(comm.rank(), m)));
          if (m + 1 == r.micros) continue;  // its backward comes first
          const Index next = micros.rows(m + 1).begin;
          EXPECT_EQ(buffer.buffer_begin(), min_of(next, first_seen(problem, micros, m + 1))) << "after " << m;
        }
      });
      Tensors again(r);
      run_all(r, again);
      for (const auto& [got, want] : {std::pair{&t.out, &whole.out},
                                      {&t.lse, &whole.lse},
                                      {&again.dq, &whole.dq},
                                      {&again.dk, &whole.dk},
                                      {&again.dv, &whole.dv}}) {
        const std::vector<double> a = to_f64(got->view), b = to_f64(want->view);
        for (std::size_t i = 0; i < a.size(); ++i)
          EXPECT_TRUE(a[i] == b[i] || std::abs(a[i] - b[i]) < 1e-5) << a[i] << " " << b[i];
      }
    }
  }
}

}  // namespace
}  // namespace weft::test
