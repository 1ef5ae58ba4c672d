// Two packed documents on two ranks: each rank attends its own queries; together that is the whole answer.
#include <cstdio>
#include <vector>

#include <weft/weft.h>

int main() {
  const std::vector<weft::Index> lengths{5, 3};
  const weft::Problem problem(weft::Stream::from_lengths(lengths), {.causal = true});
  const weft::Layout layout = weft::Layout::zigzag(problem.packing().q(), 2);
  const weft::Index tokens = 8, heads = 2, dim = 4, rows = layout.rows();
  std::vector<float> q(64, 0.0f), k(64, 1.0f), v(64), out(64);  // [tokens, heads, dim]; q = 0: the mean of visible v
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i / 8);  // v of a token is its number
  for (weft::Index rank = 0; rank < 2; ++rank) {
    std::vector<float> local_q(32), local_out(32);  // [rows, heads, dim]
    layout.shard(rank, {q.data(), tokens, 32}, {local_q.data(), rows, 32});
    const weft::Plan plan = make_plan(problem, layout.runs(rank), layout.sequence_order());
    weft::reference_forward({.q = weft::thd(local_q.data(), weft::DType::f32, rows, heads, dim),
                             .k = weft::thd(k.data(), weft::DType::f32, tokens, heads, dim),
                             .v = weft::thd(v.data(), weft::DType::f32, tokens, heads, dim),
                             .slices = plan.slices,
                             .out = weft::thd(local_out.data(), weft::DType::f32, rows, heads, dim)});
    layout.unshard(rank, {local_out.data(), rows, 32}, {out.data(), tokens, 32});
  }
  for (std::size_t t = 0; t < 8; ++t) std::printf("token %zu: %.1f\n", t, out[t * 8]);  // 0 0.5 1 1.5 2, then 5 5.5 6
  return out[4 * 8] == 2.0f && out[7 * 8] == 6.0f ? 0 : 1;
}
