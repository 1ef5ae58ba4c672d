// One sequence on one rank: every token looks up the value of another one.
#include <cmath>
#include <cstdio>
#include <vector>

#include <weft/weft.h>

int main() {
  using weft::DType, weft::Index;
  const Index tokens = 8, heads = 1, dim = 8;
  // Slices say which query rows see which key rows. Here: all 8 rows, keys up to the query's own (k - q <= 0: causal).
  const std::vector<weft::Slice> slices{{.q_begin = 0, .q_end = tokens, .k_begin = 0, .k_end = tokens, .hi = 0}};

  // Key t is a one in column t, and query t asks for column t / 2, so loudly that nothing else is heard.
  std::vector<float> q(tokens * dim, 0), k = q, v = q, out = q,
                                         lse(tokens);  // [tokens, heads, dim]; lse: [tokens, heads]
  for (Index t = 0; t < tokens; ++t) {
    q[t * dim + t / 2] = 200;
    k[t * dim + t] = 1;
    for (Index i = 0; i < dim; ++i) v[t * dim + i] = static_cast<float>(100 + t);
  }

  const auto view = [&](std::vector<float>& x) { return weft::thd(x.data(), DType::f32, tokens, heads, dim); };
  weft::attend({.q = view(q),
                .k = view(k),
                .v = view(v),
                .slices = slices,
                .attention = {.scale = 0.25},  // 1 / sqrt(dim) if not given
                .out = view(out),
                .lse = weft::token_heads(lse.data(), DType::f32, tokens, heads)});

  int wrong = 0;
  for (Index t = 0; t < tokens; ++t) {
    std::printf("token %td asks for token %td: %g\n", t, t / 2, static_cast<double>(out[t * dim]));
    // lse: the log of the sum of exp(logit), and the one logit that counts is 0.25 * 200.
    if (out[t * dim] != static_cast<float>(100 + t / 2) || std::abs(lse[t] - 50) > 1e-4f) ++wrong;
  }
  std::printf("%d wrong\n", wrong);
  return wrong == 0 ? 0 : 1;
}
