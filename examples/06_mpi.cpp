// Level 5 on ranks that are processes: nothing but the beginning changes. On one machine:
//   tools/mpirun.sh -np 4 build/release/examples/06_mpi
#include <cmath>
#include <cstdio>
#include <vector>

#include <weft/mpi.h>
#include <weft/weft.h>

int main() {
  using weft::DType, weft::Index;
  double wrong = 0;
  weft::run_mpi([&](weft::Communicator& comm) {  // a rank that throws says why, and ends the whole job
    const std::vector<Index> lengths{301, 20, 179};
    const Index heads = 4, dim = 32;
    const weft::Problem problem(weft::Stream::from_lengths(lengths), {.causal = true});
    const weft::Layouts layouts = make_layouts(weft::LayoutKind::zigzag, problem, comm.ranks());
    weft::Executor executor(
        comm, make_schedule(problem, layouts, comm.rank(), {heads, heads}, {.kind = weft::ScheduleKind::ring}));
    const Index rows = layouts.q.rows();
    const auto make = [&](float value) { return std::vector<float>(rows * heads * dim, value); };
    const auto view = [&](std::vector<float>& x) { return weft::thd(x.data(), DType::f32, rows, heads, dim); };
    std::vector<float> q = make(0), k = make(1), v = make(0), dout = make(1);
    std::vector<float> out = q, dq = q, dk = k, dv = v, lse(rows * heads);
    const std::vector<Index> positions = layouts.q.positions(comm.rank()), tokens = layouts.q.tokens(comm.rank());
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(positions[i / (heads * dim)]);

    const weft::TensorView lse_view = weft::token_heads(lse.data(), DType::f32, rows, heads);
    executor.forward({.q = view(q), .k = view(k), .v = view(v), .out = view(out), .lse = lse_view});
    executor.backward({.q = view(q),
                       .k = view(k),
                       .v = view(v),
                       .dout = view(dout),
                       .out = view(out),
                       .lse = lse_view,
                       .dq = view(dq),
                       .dk = view(dk),
                       .dv = view(dv)});

    // q = 0: a token at position p sees p + 1 keys alike, so its output is their mean position. Each query gives its
    // keys shares that sum to 1, so dv sums to the queries: 500 tokens of 4 heads.
    double sums[2] = {0, static_cast<double>(comm.traffic().bytes_sent)};  // dv; bytes
    for (Index row = 0; row < rows; ++row) {
      if (tokens[row] == weft::kNoToken) continue;
      if (std::abs(static_cast<double>(out[row * heads * dim]) - static_cast<double>(positions[row]) / 2) > 1e-4)
        ++wrong;
      for (Index head = 0; head < heads; ++head) sums[0] += static_cast<double>(dv[(row * heads + head) * dim]);
    }
    comm.all_reduce(sums, DType::f64, 2, weft::Reduce::sum).wait();
    if (std::abs(sums[0] - 2000) > 1e-2) ++wrong;
    comm.all_reduce(&wrong, DType::f64, 1, weft::Reduce::sum).wait();
    if (comm.rank() == 0)
      std::printf("%td processes of %td rows: sum of dv %.1f, %.1f KiB sent by all, %g wrong\n", comm.ranks(), rows,
                  sums[0], sums[1] / 1024, wrong);
  });
  return wrong == 0 ? 0 : 1;
}
