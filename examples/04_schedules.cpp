// Documents of any length on four ranks that are threads, by every schedule: the same answer, other bytes, other times.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include <weft/weft.h>

using weft::DType, weft::Index;

int main() {
  const std::vector<Index> lengths{3010, 200, 1790};
  const Index ranks = 4, heads_q = 8, heads_k = 4, dim = 32;
  const weft::Problem problem(weft::Stream::from_lengths(lengths), {.causal = true, .left = 512});
  const weft::Layouts layouts = make_layouts(weft::LayoutKind::zigzag, problem, ranks);
  const Index rows = layouts.q.rows();  // of each rank
  const weft::TensorShape shape{.dtype = DType::f32, .dim_qk = dim, .dim_v = dim};
  const weft::Machine& machine = weft::machine_preset("h100-400g");
  std::atomic<int> wrong = 0;

  std::printf("schedule     KiB received by a rank   predicted on %s\n", machine.name.c_str());
  for (const weft::ScheduleKind kind : weft::schedule_kinds()) {
    std::vector<Index> received(ranks);
    weft::run_ranks(ranks, [&](weft::Communicator& comm) {
      // A schedule is a value that says what this rank does; the executor runs it, here on this rank's own rows.
      const weft::Schedule schedule = make_schedule(problem, layouts, comm.rank(), {heads_q, heads_k}, {.kind = kind});
      weft::Executor executor(comm, schedule);
      std::vector<float> q(rows * heads_q * dim, 0), k(rows * heads_k * dim, 1), v = k, out = q;
      const std::vector<Index> tokens = layouts.q.tokens(comm.rank()), positions = layouts.q.positions(comm.rank());
      for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(positions[i / (heads_k * dim)]);
      executor.forward({.q = weft::thd(q.data(), DType::f32, rows, heads_q, dim),
                        .k = weft::thd(k.data(), DType::f32, rows, heads_k, dim),
                        .v = weft::thd(v.data(), DType::f32, rows, heads_k, dim),
                        .out = weft::thd(out.data(), DType::f32, rows, heads_q, dim)});

      // q = 0 and v = position: the mean position of the keys that are seen, the token's own and up to 512 before it.
      for (Index row = 0; row < rows; ++row) {
        if (tokens[row] == weft::kNoToken) continue;
        const double last = static_cast<double>(positions[row]), first = std::max(0.0, last - 512);
        if (std::abs(static_cast<double>(out[row * heads_q * dim]) - (first + last) / 2) > 1e-2) ++wrong;
      }
      // traffic() says before what the communicator has counted after.
      received[comm.rank()] = comm.traffic().bytes_received;
      const weft::TensorShape asked{.dtype = DType::f32, .dim_qk = dim, .dim_v = dim, .lse = {}};
      if (traffic(schedule, asked, weft::Pass::forward) != comm.traffic()) ++wrong;
    });
    const weft::Timeline timeline =
        simulate(weft::Job{problem, layouts, heads_q, heads_k, {.kind = kind}, shape}, machine, weft::Pass::forward);
    std::printf("%-12s %12.1f %22.1f us\n", std::string(name(kind)).c_str(),
                static_cast<double>(*std::max_element(received.begin(), received.end())) / 1024,
                1e6 * timeline.seconds);
  }

  // Which one, and which layout? For layers like this one, forward and backward.
  const weft::Layer layer{.problem = problem, .heads_q = heads_q, .heads_k = heads_k, .shape = shape};
  std::printf("\n%s\n", choose({&layer, 1}, ranks, machine).why().c_str());
  std::printf("\n%d wrong\n", wrong.load());
  return wrong == 0 ? 0 : 1;
}
