// Packed documents and masks on one rank: how many keys does each token see?
#include <cmath>
#include <cstdio>
#include <limits>
#include <vector>

#include <weft/weft.h>

namespace {

using weft::DType, weft::Index;

// Queries of 0 give all visible keys the same share: exp(lse) is their number, and out the mean of their values.
std::vector<int> keys_seen(const weft::Problem& problem) {
  const weft::Stream& stream = problem.packing().q();
  const Index tokens = stream.tokens(), heads_q = 4, heads_k = 2, dim = 16;  // two query heads share a K/V head
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> q(tokens * heads_q * dim, nan), k(tokens * heads_k * dim, nan), out = q, lse(tokens * heads_q);
  for (Index i = 0; i < stream.sequences(); ++i) {  // real tokens only: padding stays NaN, since nobody reads it
    for (Index t = stream.offset(i); t < stream.offset(i) + stream.used(i); ++t) {
      for (Index x = 0; x < heads_q * dim; ++x) q[t * heads_q * dim + x] = 0;
      for (Index x = 0; x < heads_k * dim; ++x) k[t * heads_k * dim + x] = 1;
    }
  }
  const std::vector<weft::Slice> slices = problem.global_slices();  // one a document, or a few: masks are nothing else
  weft::attend({.q = weft::thd(q.data(), DType::f32, tokens, heads_q, dim),
                .k = weft::thd(k.data(), DType::f32, tokens, heads_k, dim),
                .v = weft::thd(k.data(), DType::f32, tokens, heads_k, dim),
                .slices = slices,
                .out = weft::thd(out.data(), DType::f32, tokens, heads_q, dim),
                .lse = weft::token_heads(lse.data(), DType::f32, tokens, heads_q)});
  std::vector<int> seen;
  for (Index t = 0; t < tokens; ++t) seen.push_back(static_cast<int>(std::lround(std::exp(lse[t * heads_q]))));
  return seen;
}

}  // namespace

int main() {
  const std::vector<Index> lengths{5, 3};
  const weft::Stream packed = weft::Stream::from_lengths(lengths);
  const weft::Stream padded = packed.padded_to(4);  // 5 and 3 tokens in 8 and 4 rows
  // A prefix of two tokens that the rest of the first document and all of the second see: your own slices.
  const std::vector<weft::Slice> prefix{{.q_begin = 0, .q_end = 2, .k_begin = 0, .k_end = 2, .hi = 0},
                                        {.q_begin = 2, .q_end = 8, .k_begin = 0, .k_end = 2},
                                        {.q_begin = 2, .q_end = 5, .k_begin = 2, .k_end = 5, .hi = 0},
                                        {.q_begin = 5, .q_end = 8, .k_begin = 5, .k_end = 8, .hi = 0}};
  const struct {
    const char* what;
    weft::Problem problem;
    std::vector<int> expected;
  } cases[] = {
      {"full", {packed, {}}, {5, 5, 5, 5, 5, 3, 3, 3}},
      {"causal", {packed, {.causal = true}}, {1, 2, 3, 4, 5, 1, 2, 3}},
      {"window (1, 1)", {packed, {.left = 1, .right = 1}}, {2, 3, 3, 3, 2, 2, 3, 2}},
      {"causal, window (2, 0)", {packed, {.causal = true, .left = 2, .right = 0}}, {1, 2, 3, 3, 3, 1, 2, 3}},
      {"causal, chunks of 2", {packed, {.causal = true, .chunk = 2}}, {1, 2, 1, 2, 1, 1, 2, 1}},
      {"a shared prefix", {packed, {.slices = prefix}}, {1, 2, 3, 4, 5, 3, 4, 5}},
      {"causal, padded to 4", {padded, {.causal = true}}, {1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 3, 0}},
  };
  int wrong = 0;
  for (const auto& c : cases) {
    const std::vector<int> seen = keys_seen(c.problem);
    std::printf("%-22s", c.what);
    for (const int keys : seen) std::printf(" %d", keys);
    std::printf("   %td pairs\n", c.problem.visible_pairs());
    if (seen != c.expected) ++wrong;
  }
  std::printf("%d wrong\n", wrong);
  return wrong == 0 ? 0 : 1;
}
