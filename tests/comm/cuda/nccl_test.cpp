// NCCL with the one rank that a single GPU allows: what a rank sends to itself, packed, unpacked and added.
#ifdef WEFT_WITH_NCCL
#include <vector>

#include <gtest/gtest.h>

#include "comm/cuda/transports.h"
#include "comm/plain_ranks.h"
#include "device/device.h"
#include "ranks.h"

namespace weft {
namespace {

TEST(Nccl, OneRankSendsToItself) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  const Place place{.kind = DeviceKind::cuda, .device = 0, .stream = device::thread_stream()};
  run_ranks(1, [&](Communicator& ranks) {
    test::PlainRanks plain(ranks);
    const auto on = plain.on(place);
    ASSERT_EQ(on->name(), "nccl");
    on->use(place.stream);
    const auto memory = device::make_memory(place);
    std::vector<float> values{1, 2, 3, 4, 5, 6, 7, 8}, got(8, 100.0F);
    auto* from = static_cast<float*>(memory->allocate(32));
    auto* to = static_cast<float*>(memory->allocate(32));
    device::to_device(place, from, values.data(), 32);
    device::to_device(place, to, got.data(), 32);
    const Block strided{.data = from, .rows = 2, .parts = 1, .bytes = 8, .row_stride = 16};  // 1 2 5 6
    const Block whole{.data = to, .rows = 1, .bytes = 16}, rest{.data = to + 4, .rows = 1, .bytes = 16};
    on->exchange({{0, {strided}}}, {{0, {whole}}}).wait();
    on->exchange({{0, {strided}}}, {{.peer = 0, .blocks = {rest}, .combine = Message::Combine::add}}).wait();
    const device::HostCopy copy{got.data(), to, 32};
    device::to_host(place, {&copy, 1});
    EXPECT_EQ(got, (std::vector<float>{1, 2, 5, 6, 101, 102, 105, 106}));
    memory->deallocate(from, 32);
    memory->deallocate(to, 32);
  });
}

// Ranks that are no threads, each with a GPU of its own, go over NCCL.
TEST(Nccl, OneRankThroughTheExecutor) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  const Problem problem(Stream::from_lengths(std::vector<Index>{100, 30, 70}), {.causal = true});
  const test::RanksProblem p{
      .problem = problem, .heads_q = 4, .heads_k = 2, .dim_qk = 64, .dim_v = 64, .dtype = DType::bf16, .sink = true};
  test::RanksInput in(p);
  const Layouts layouts = make_layouts(LayoutKind::contiguous, problem, 1);
  const ExecutorOptions how{.kernel = "cuda.portable", .deterministic = true};
  for (const ScheduleKind kind : schedule_kinds()) {
    const ScheduleOptions options{.kind = kind, .ulysses = 1};
    const test::RanksResult want = run_on_ranks(p, in, layouts, options, how);
    test::RanksResult got = test::empty_result(p, 1);
    std::mutex mutex;
    run_ranks(1, [&](Communicator& threads) {
      test::PlainRanks plain(threads);
      EXPECT_EQ(plain.on(check::place_of(how.kernel))->name(), "nccl");
      run_one_rank(plain, p, in, layouts, options, how, got, mutex);
    });
    EXPECT_TRUE(same_bytes(got, want)) << name(kind);
  }
}

}  // namespace
}  // namespace weft
#endif
