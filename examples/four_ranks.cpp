// Documents of any length on four ranks that are threads: a ring, forward and backward, on each rank's own rows.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <vector>

#include <weft/weft.h>

int main() {
  using weft::DType, weft::Index;
  const std::vector<Index> lengths{301, 20, 179};
  const Index heads_q = 4, heads_k = 2, dim = 32;
  const weft::Problem problem(weft::Stream::from_lengths(lengths), {.causal = true});
  const weft::Layouts layouts = make_layouts(weft::LayoutKind::zigzag, problem, 4);
  std::atomic<int> wrong = 0;

  weft::run_ranks(4, [&](weft::Communicator& comm) {
    weft::Executor executor(
        comm, make_schedule(problem, layouts, comm.rank(), {heads_q, heads_k}, {.kind = weft::ScheduleKind::ring}));
    const Index rows = layouts.q.rows();
    const auto make = [&](Index heads, float value) { return std::vector<float>(rows * heads * dim, value); };
    const auto view = [&](std::vector<float>& x, Index heads) {
      return weft::thd(x.data(), DType::f32, rows, heads, dim);
    };
    std::vector<float> q = make(heads_q, 0), k = make(heads_k, 1), v = make(heads_k, 0), dout = make(heads_q, 1);
    std::vector<float> out = q, dq = q, dk = k, dv = v, lse(rows * heads_q);
    const std::vector<Index> positions = layouts.q.positions(comm.rank()), tokens = layouts.q.tokens(comm.rank());
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(positions[i / (heads_k * dim)]);

    const weft::TensorView lse_view = weft::token_heads(lse.data(), DType::f32, rows, heads_q);
    executor.forward({.q = view(q, heads_q),
                      .k = view(k, heads_k),
                      .v = view(v, heads_k),
                      .out = view(out, heads_q),
                      .lse = lse_view});
    executor.backward({.q = view(q, heads_q),
                       .k = view(k, heads_k),
                       .v = view(v, heads_k),
                       .dout = view(dout, heads_q),
                       .out = view(out, heads_q),
                       .lse = lse_view,
                       .dq = view(dq, heads_q),
                       .dk = view(dk, heads_k),
                       .dv = view(dv, heads_k)});

    // q = 0: a token at position p sees p + 1 keys alike, so its output is their mean position and its LSE log(p + 1).
    for (Index row = 0; row < rows; ++row) {
      if (tokens[row] == weft::kNoToken) continue;
      const double p = static_cast<double>(positions[row]);
      if (std::abs(static_cast<double>(out[row * heads_q * dim]) - p / 2) > 1e-4) ++wrong;
      if (std::abs(static_cast<double>(lse[row * heads_q]) - std::log(p + 1)) > 1e-5) ++wrong;
    }
    std::printf("rank %td: %td rows, %.1f KiB sent\n", comm.rank(), rows,
                static_cast<double>(comm.traffic().bytes_sent) / 1024);
  });
  std::printf("%d wrong\n", wrong.load());
  return wrong == 0 ? 0 : 1;
}
