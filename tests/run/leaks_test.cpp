// After a thousand forwards and backwards on four ranks as much memory is held as after a hundred, and under
// AddressSanitizer nothing is out of reach.
#include <gtest/gtest.h>
#include <malloc.h>

#include "rank_tensors.h"
#include "ranks.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
extern "C" std::size_t __sanitizer_get_current_allocated_bytes();  // g++ leaves its header out
#endif

namespace weft::test {
namespace {

// Threads come and go, and the allocator keeps a little for them; 64 bytes a pass would show.
constexpr std::size_t kLittle = 64'000;

std::size_t held() {
#ifdef __SANITIZE_ADDRESS__
  return __sanitizer_get_current_allocated_bytes();
#else
  return mallinfo2().uordblks;
#endif
}

TEST(Leaks, AThousandPassesOnFourRanks) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{17, 5, 10}), {.causal = true});
  const RanksProblem p{.problem = problem, .heads_q = 4, .heads_k = 2, .dim_qk = 4, .dim_v = 4, .sink = true};
  RanksInput input(p);
  const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, 4);
  const std::span<const ScheduleKind> kinds = schedule_kinds();
  const auto passes = [&](Index count) {
    for (Index i = 0; i < count; ++i)
      run_on_ranks(p, input, layouts, {.kind = kinds[at(i) % kinds.size()]}, {.checked = i % 2 == 1});
  };
  passes(100);
  const std::size_t before = held();
  passes(1000);
  EXPECT_LT(held(), before + kLittle);
#ifdef __SANITIZE_ADDRESS__
  EXPECT_EQ(__lsan_do_recoverable_leak_check(), 0);
#endif
}

// One executor a rank and schedule, called again and again.
TEST(Leaks, AThousandCallsOfExecutors) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{17, 5, 10}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 4);
  for (const ScheduleKind kind : schedule_kinds()) {
    std::size_t before = 0, after = 0;
    run_ranks(4, [&](Communicator& comm) {
      const RankTensors<> tensors(layouts.q.rows(), 4, 4, static_cast<unsigned>(comm.rank()));
      Executor executor(comm, make_schedule(problem, layouts, comm.rank(), {4, 4}, {.kind = kind}));
      const auto meet = [&] {
        float token = 0;
        comm.all_reduce(&token, DType::f32, 1, Reduce::sum).wait();
      };
      for (Index i = 0; i < 220; ++i) {
        tensors.run(executor);
        if (i != 19 && i != 219) continue;
        meet();
        if (comm.rank() == 0) (i == 19 ? before : after) = held();
        meet();
      }
    });
    EXPECT_LT(after, before + kLittle) << name(kind);
  }
}

}  // namespace
}  // namespace weft::test
