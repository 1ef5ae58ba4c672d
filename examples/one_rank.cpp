// Packed documents on one rank: forward and backward by the best kernel of this machine, no ranks, no schedule.
#include <cstdio>
#include <vector>

#include <weft/weft.h>

int main() {
  using weft::DType, weft::Index, weft::thd;
  const std::vector<Index> lengths{300, 20, 180};
  const Index tokens = 500, heads_q = 4, heads_k = 2, dim = 32;
  const weft::Problem problem(weft::Stream::from_lengths(lengths), {.causal = true, .left = 128});
  const std::vector<weft::Slice> slices = problem.global_slices();

  const auto make = [&](Index heads, float value) { return std::vector<float>(tokens * heads * dim, value); };
  std::vector<float> q = make(heads_q, 0), k = make(heads_k, 1), v = make(heads_k, 2), dout = make(heads_q, 1);
  std::vector<float> out = make(heads_q, 0), dq = out, dk = k, dv = v, lse(tokens * heads_q);
  const auto view = [&](std::vector<float>& x, Index heads) { return thd(x.data(), DType::f32, tokens, heads, dim); };

  weft::attend({.q = view(q, heads_q),
                .k = view(k, heads_k),
                .v = view(v, heads_k),
                .slices = slices,
                .out = view(out, heads_q),
                .lse = weft::token_heads(lse.data(), DType::f32, tokens, heads_q)});
  weft::attend_backward({.q = view(q, heads_q),
                         .k = view(k, heads_k),
                         .v = view(v, heads_k),
                         .slices = slices,
                         .dout = view(dout, heads_q),
                         .out = view(out, heads_q),
                         .lse = weft::token_heads(lse.data(), DType::f32, tokens, heads_q),
                         .dq = view(dq, heads_q),
                         .dk = view(dk, heads_k),
                         .dv = view(dv, heads_k)});
  // Every query gives weights that sum to 1 to the keys that it sees, so all of dv together is all of dout.
  double given = 0;
  for (const float x : dv) given += static_cast<double>(x);
  std::printf("%s: out %.3f, sum of dv %.1f of %td\n", weft::find_kernel("").name.data(), static_cast<double>(out[0]),
              given, static_cast<std::ptrdiff_t>(dout.size()));
  return given > 63999 && given < 64001 ? 0 : 1;
}
