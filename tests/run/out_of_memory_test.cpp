// Memory runs out at each allocation in turn: an error every time, nothing left behind, nobody left waiting, and the
// next call is right. The program's own operator new fails when it is told to.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <new>

#include <gtest/gtest.h>

#include "kernel/kernel_problem.h"
#include "rank_tensors.h"
#include "ranks.h"
#include "weft/error.h"
#include "weft/plan.h"
#include "weft/prepare.h"

namespace {

std::atomic<long> left{-1};        // allocations until one fails; below 0: none does
std::atomic<bool> lasting{false};  // .. and so do all after it
std::atomic<bool> failed{false};
std::atomic<long> living{0};  // allocations that were not given back

void* allocate(std::size_t size, std::size_t align) {
  if (left.load(std::memory_order_relaxed) >= 0) {
    if (left.fetch_sub(1) <= 0) {
      failed = true;
      left = lasting ? 0 : -1;
      throw std::bad_alloc();
    }
  }
  const std::size_t rounded = (size + align - 1) / align * align;
  void* data = align <= alignof(std::max_align_t) ? std::malloc(size == 0 ? 1 : size)
                                                  : std::aligned_alloc(align, rounded == 0 ? align : rounded);
  if (data == nullptr) throw std::bad_alloc();
  living.fetch_add(1, std::memory_order_relaxed);
  return data;
}

void give_back(void* data) noexcept {
  if (data == nullptr) return;
  living.fetch_sub(1, std::memory_order_relaxed);
  std::free(data);
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size, 1); }
void* operator new[](std::size_t size) { return allocate(size, 1); }
void* operator new(std::size_t size, std::align_val_t align) { return allocate(size, static_cast<std::size_t>(align)); }
void* operator new[](std::size_t size, std::align_val_t align) {
  return allocate(size, static_cast<std::size_t>(align));
}
void operator delete(void* data) noexcept { give_back(data); }
void operator delete[](void* data) noexcept { give_back(data); }
void operator delete(void* data, std::size_t) noexcept { give_back(data); }
void operator delete[](void* data, std::size_t) noexcept { give_back(data); }
void operator delete(void* data, std::align_val_t) noexcept { give_back(data); }
void operator delete[](void* data, std::align_val_t) noexcept { give_back(data); }
void operator delete(void* data, std::size_t, std::align_val_t) noexcept { give_back(data); }
void operator delete[](void* data, std::size_t, std::align_val_t) noexcept { give_back(data); }

namespace weft::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr long kStride = kSanitized ? 23 : 1;  // sanitizers are slow, and what they see is not about one number

// Runs `call` with the n-th allocation failing, for n = 0, 1, .. until it has none left to fail; between them it is run
// as usual and `right` asked. Returns how many failed.
template <class Call, class Right>
long each_in_turn(const char* what, bool all_after, Call&& call, Right&& right, double seconds = 5) {
  call();
  EXPECT_TRUE(right()) << what;
  call();
  const long before = living;
  for (long n = 0;; n += kStride) {
    const Clock::time_point begin = Clock::now();
    bool threw = false;
    failed = false;
    lasting = all_after;
    left = n;
    try {
      call();
    } catch (const std::bad_alloc&) {
      threw = true;
    } catch (const Error&) {  // a rank's, which says what befell another
      threw = true;
    }
    left = -1;
    if (!failed) return n;
    EXPECT_TRUE(threw) << what << ": allocation " << n << " failed and nobody said so";
    EXPECT_LT(std::chrono::duration<double>(Clock::now() - begin).count(), seconds) << what << ": allocation " << n;
    call();
    EXPECT_TRUE(right()) << what << ": wrong after allocation " << n << " had failed";
    EXPECT_EQ(living, before) << what << ": left behind by allocation " << n;
    if (testing::Test::HasFailure()) return n;
  }
}

class OutOfMemory : public testing::TestWithParam<bool> {};
std::string once_or_not(const testing::TestParamInfo<bool>& of) { return of.param ? "ForAWhile" : "Once"; }
INSTANTIATE_TEST_SUITE_P(Fails, OutOfMemory, testing::Values(false, true), once_or_not);

TEST_P(OutOfMemory, Plans) {
  std::vector<Slice> slices;
  const long n = each_in_turn(
      "make_plan", GetParam(),
      [&] {
        const Problem problem(Stream::from_lengths(std::vector<Index>{37, 5, 22}), {.causal = true});
        const Layouts layouts = make_layouts(LayoutKind::balanced, problem, 3);
        slices = make_plan(problem, layouts.q.runs(1), layouts.k.rank_order()).slices;
      },
      [&] { return !slices.empty(); });
  EXPECT_GT(n, 10);
}

TEST_P(OutOfMemory, Schedules) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{37, 5, 22}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 4);
  for (const ScheduleKind kind : schedule_kinds()) {
    std::size_t steps = 0;
    const long n = each_in_turn(
        std::string(name(kind)).c_str(), GetParam(),
        [&] { steps = make_schedule(problem, layouts, 2, {4, 2}, {.kind = kind}).steps.size(); },
        [&] { return steps > 0; });
    EXPECT_GT(n, 10);
  }
}

TEST_P(OutOfMemory, Packer) {
  const std::vector<Index> lengths = {37, 5, 22, 64, 8, 8, 100};
  Index packs = 0;
  EXPECT_GT(each_in_turn(
                "pack_documents", GetParam(),
                [&] {
                  const Packs p = pack_documents(lengths, {.budget = 128, .multiple = 8});
                  packs = p.report.packs;
                  const MicroSequences micro(p.stream(0), {.ranks = 2, .micros = 2});
                  packs += micro.window(1, 1).lengths.empty() ? 0 : 1;
                },
                [&] { return packs >= 3; }),
            10);
}

TEST_P(OutOfMemory, Kernels) {
  set_cpu_threads(1);
  for (const KernelParam& param : kernel_params()) {
    const KernelRequest request{.pass = Pass::backward, .dtype = param.dtype, .dim_qk = 16, .dim_v = 16};
    if (find_kernel(param.kernel).refusal(request)) continue;
    const KernelProblem problem = make_problem({.tq = 40, .tk = 70, .hq = 2, .dqk = 12, .dv = 20, .dtype = param.dtype},
                                               {{0, 40, 0, 70, -kUnlimited, 9}}, 3);
    const Outputs want(problem.p), got(problem.p);
    want.run(problem, param.kernel, Pass::backward);
    const std::string what = param.kernel + " " + std::string(name(param.dtype));
    each_in_turn(
        what.c_str(), GetParam(), [&] { got.run(problem, param.kernel, Pass::backward); },
        [&] {
          return bits(got.forward.out) == bits(want.forward.out) && bits(got.backward.dq) == bits(want.backward.dq) &&
                 bits(got.backward.dk) == bits(want.backward.dk) && bits(got.backward.dv) == bits(want.backward.dv);
        });
  }
  set_cpu_threads(0);
}

// A problem worth several threads: each has its own memory, and any of them may get none.
TEST_P(OutOfMemory, KernelsOnThreads) {
  set_cpu_threads(4);
  const KernelProblem problem =
      make_problem({.tq = 90, .tk = 300, .hq = 4, .dqk = 65, .dv = 130, .dtype = DType::f32}, {{0, 90, 0, 300}}, 3);
  const Outputs want(problem.p), got(problem.p);
  want.run(problem, "cpu", Pass::backward);
  const long n = each_in_turn(
      "cpu", GetParam(), [&] { got.run(problem, "cpu", Pass::backward); },
      [&] { return bits(got.backward.dk) == bits(want.backward.dk); });
  EXPECT_GT(n, 3);
  set_cpu_threads(0);
}

// Whichever rank it befalls, run_ranks comes back with an error, and the next world of ranks is right.
TEST_P(OutOfMemory, TwoRanksEnd) {
  set_cpu_threads(1);
  const Problem problem(Stream::from_lengths(std::vector<Index>{17, 5, 10}), {.causal = true});
  const RanksProblem p{.problem = problem, .heads_q = 2, .heads_k = 2, .dim_qk = 4, .dim_v = 4, .sink = true};
  RanksInput input{p};
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 2);
  for (const ScheduleKind kind : schedule_kinds()) {
    for (const bool checked : {false, true}) {
      const auto run = [&] { return run_on_ranks(p, input, layouts, {.kind = kind}, {.checked = checked}); };
      const RanksResult want = run();
      std::optional<RanksResult> got;
      const long n = each_in_turn(
          std::string(name(kind)).c_str(), GetParam(),
          [&] {
            got.reset();
            got.emplace(run());
          },
          [&] { return same_bytes(*got, want); });
      EXPECT_GT(n, 50);
      std::printf("%s%s: %ld allocations\n", std::string(name(kind)).c_str(), checked ? ", checked" : "", n);
      if (HasFailure()) return;
    }
  }
  set_cpu_threads(0);
}

// One executor, used again after each failure.
TEST_P(OutOfMemory, AnExecutorIsUsedAgain) {
  set_cpu_threads(1);
  const Problem problem(Stream::from_lengths(std::vector<Index>{17, 5, 10}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::contiguous, problem, 1);
  const RankTensors<> t(32, 2, 4, 4);
  for (const ScheduleKind kind : schedule_kinds()) {
    run_ranks(1, [&](Communicator& comm) {
      Executor executor(comm, make_schedule(problem, layouts, 0, {2, 2}, {.kind = kind, .ulysses = 1}));
      const auto call = [&] { t.run(executor); };
      call();
      const std::vector<std::byte> first_out = t.out.bytes, first_dk = t.dk.bytes;
      each_in_turn(std::string(name(kind)).c_str(), GetParam(), call,
                   [&] { return t.out.bytes == first_out && t.dk.bytes == first_dk; });
    });
  }
  set_cpu_threads(0);
}

}  // namespace
}  // namespace weft::test
