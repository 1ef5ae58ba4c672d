// Training on four ranks: forward, loss, backward, a step downhill. Every token learns to look at the one before it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include <weft/weft.h>

using weft::DType, weft::Index;

int main() {
  const std::vector<Index> lengths{31, 2, 15};
  const Index ranks = 4, heads = 2, dim = 16;
  const weft::Problem problem(weft::Stream::from_lengths(lengths), {.causal = true});
  const weft::Layouts layouts = make_layouts(weft::LayoutKind::zigzag, problem, ranks);
  const Index rows = layouts.q.rows();
  const auto number = [](Index token, Index i) {  // anything, the same for a token on whichever rank
    return std::sin(static_cast<float>(7 * token * token % 100 + 13 * i));
  };
  std::vector<double> losses;

  weft::run_ranks(ranks, [&](weft::Communicator& comm) {
    // One executor for all steps: it keeps its workspaces.
    weft::Executor executor(
        comm, make_schedule(problem, layouts, comm.rank(), {heads, heads}, {.kind = weft::ScheduleKind::ring}));
    const std::vector<Index> tokens = layouts.q.tokens(comm.rank()), positions = layouts.q.positions(comm.rank());
    // q and k are what is learned; v is given, and the target is v of the token before. Each rank makes its own rows.
    std::vector<float> q(rows * heads * dim), k = q, v = q, target = q, out = q, dout = q, dq = q, dk = q, dv = q;
    std::vector<float> lse(rows * heads);
    for (Index row = 0; row < rows; ++row) {
      for (Index i = 0; i < heads * dim && tokens[row] != weft::kNoToken; ++i) {
        const Index at = row * heads * dim + i, t = tokens[row];
        q[at] = number(t, i + 100), k[at] = number(t, i + 200), v[at] = number(t, i);
        target[at] = number(positions[row] == 0 ? t : t - 1, i);
      }
    }
    const auto view = [&](std::vector<float>& x) { return weft::thd(x.data(), DType::f32, rows, heads, dim); };
    const weft::TensorView lse_view = weft::token_heads(lse.data(), DType::f32, rows, heads);

    for (int step = 0; step <= 100; ++step) {
      executor.forward({.q = view(q), .k = view(k), .v = view(v), .out = view(out), .lse = lse_view});
      double loss = 0;
      for (std::size_t i = 0; i < out.size(); ++i) {
        dout[i] = out[i] - target[i];  // rows without a token: 0 - 0
        loss += 0.5 * static_cast<double>(dout[i]) * static_cast<double>(dout[i]);
      }
      comm.all_reduce(&loss, DType::f64, 1, weft::Reduce::sum).wait();
      if (comm.rank() == 0) losses.push_back(loss);
      // Gradients of this rank's rows, from the queries of all ranks.
      executor.backward({.q = view(q),
                         .k = view(k),
                         .v = view(v),
                         .dout = view(dout),
                         .out = view(out),
                         .lse = lse_view,
                         .dq = view(dq),
                         .dk = view(dk),
                         .dv = view(dv)});
      for (std::size_t i = 0; i < q.size(); ++i) q[i] -= dq[i], k[i] -= dk[i];
    }
  });

  for (std::size_t step = 0; step < losses.size(); step += 20)
    std::printf("step %3zu: loss %.1f\n", step, losses[step]);
  return losses.back() < 0.05 * losses.front() ? 0 : 1;
}
