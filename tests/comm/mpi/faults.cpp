// One seeded fault plan over MPI with `checked` on:   faults PLAN MARKER FILE. Each rank prints "right" or "WRONG", or
// the job ends with an error. The marker is there to be found among processes; the file is written when the faulty run
// begins.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "comm/faulty.h"
#include "index.h"
#include "ranks.h"
#include "weft/error.h"
#include "weft/mpi.h"

namespace weft::test {
namespace {

using Kind = Fault::Kind;

void run_plan(Communicator& comm, std::size_t plan, Kind kind, const char* file) {
  const Problem asked(Stream::from_lengths(std::vector<Index>{37, 5, 22}).padded_to(8), {.causal = true});
  const RanksProblem problem{.problem = asked, .heads_q = 4, .heads_k = 2, .dim_qk = 8, .dim_v = 8, .sink = true};
  RanksInput input(problem);
  const Layouts layouts = make_layouts(LayoutKind::zigzag, asked, comm.ranks());
  const ScheduleOptions options{.kind = schedule_kinds()[plan % schedule_kinds().size()]};
  Index calls = 0;
  const auto attend_with = [&](std::vector<Fault> faults) {
    calls = 0;
    RanksResult result = empty_result(problem, comm.ranks());
    std::mutex mutex;
    const std::unique_ptr<Communicator> faulty = make_faulty(comm, std::move(faults), &calls);
    run_one_rank(*faulty, problem, input, layouts, options, {.checked = true}, result, mutex);
    return result;
  };
  const RanksResult want = attend_with({});
  const Fault fault = make_fault(kind, plan, comm.ranks(), calls, 0.002);
  if (comm.rank() == 0) {
    if (std::FILE* now = std::fopen(file, "w")) std::fclose(now);
    std::printf("%s, %s on rank %td in call %td\n", std::string(name(options.kind)).c_str(),
                std::string(name(kind)).c_str(), fault.rank, fault.call);
  }
  try {
    const RanksResult got = attend_with({fault});
    std::printf("rank %td: %s\n", comm.rank(), same_bytes(got, want) ? "right" : "WRONG");
    std::fflush(stdout);
  } catch (const Error&) {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // who is done may say so before the job ends
    throw;
  }
}

}  // namespace
}  // namespace weft::test

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  using weft::Fault;
  const std::size_t plan = weft::at(std::atoll(argv[1]));
  const std::size_t schedules = weft::schedule_kinds().size();
  const Fault::Kind kind = weft::fault_kinds()[plan / schedules % weft::fault_kinds().size()];
  // Messages that never come are noticed by waiting in vain, at the latest.
  const bool waits = kind == Fault::Kind::drop || kind == Fault::Kind::lose;
  weft::run_mpi([&](weft::Communicator& comm) { weft::test::run_plan(comm, plan, kind, argv[3]); },
                {.time_limit = waits ? 2.0 : 60.0});
  return 0;
}
