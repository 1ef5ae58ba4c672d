// A job in which one rank ends in mid-exchange: failing HOW RANK MARKER FILE. The marker is there to be found among
// processes; the file is written when the rank ends.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <unistd.h>

#include "index.h"
#include "weft/error.h"
#include "weft/executor.h"
#include "weft/mpi.h"

namespace {

void fail(const char* how, const char* file) {
  if (std::FILE* now = std::fopen(file, "w")) std::fclose(now);
  if (std::strcmp(how, "throw") == 0) throw weft::Error("this rank has had enough", "leave it alone");
  if (std::strcmp(how, "abort") == 0) std::abort();
  if (std::strcmp(how, "kill") == 0) std::raise(SIGKILL);
  if (std::strcmp(how, "exit") == 0) _exit(0);  // without a word to MPI
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 0;  // which the script would notice
  weft::run_mpi([&](weft::Communicator& comm) {
    using weft::Index;
    const weft::Problem problem(weft::Stream::from_lengths(std::vector<Index>{2000, 600}), {.causal = true});
    const weft::Layouts layouts = make_layouts(weft::LayoutKind::zigzag, problem, comm.ranks());
    Index steps = 0;
    weft::Executor executor(comm,
                            make_schedule(problem, layouts, comm.rank(), {4, 4}, {.kind = weft::ScheduleKind::ring}),
                            {.observer = [&](const weft::StepEvent&) {  // keys of the next step are on their way
                              if (comm.rank() == std::atoi(argv[2]) && ++steps == 5) fail(argv[1], argv[4]);
                            }});
    const Index rows = layouts.q.rows();
    std::vector<float> x(weft::at(rows * 4 * 32), 1.0F), y(x);
    const auto view = weft::thd(x.data(), weft::DType::f32, rows, 4, 32);
    while (true)  // nobody leaves alive
      executor.forward({.q = view, .k = view, .v = view, .out = weft::thd(y.data(), weft::DType::f32, rows, 4, 32)});
  });
  return 0;
}
