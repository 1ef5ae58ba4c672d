// Checked ranks whose tensors lie on a GPU: results stay the same, what differs between ranks is named, and faults of
// the transport are noticed.
#include "comm/checked.h"

#include <mutex>
#include <string>

#include <gtest/gtest.h>

#include "comm/faulty.h"
#include "comm/plain_ranks.h"
#include "device/device.h"
#include "refusal.h"
#include "run/fault_plans.h"

namespace weft::test {
namespace {

constexpr const char* kKernel = "cuda.portable";

class DeviceChecked : public testing::Test {
  void SetUp() override {
    if (device::count() == 0) GTEST_SKIP() << "no GPU";
  }
};

RanksProblem small() {
  return {.problem = Problem(Stream::from_lengths(std::vector<Index>{137, 1, 78}).padded_to(8), {.causal = true}),
          .heads_q = 4,
          .heads_k = 2,
          .dim_qk = 24,
          .dim_v = 16,
          .dtype = DType::bf16,
          .sink = true};
}

// Over ranks as threads, and by way of the host as over MPI; NCCL: tests/nccl.
TEST_F(DeviceChecked, ResultsStayTheSame) {
  const RanksProblem p = small();
  RanksInput in(p);
  const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, kRanks);
  for (const ScheduleKind kind : schedule_kinds()) {
    SCOPED_TRACE(name(kind));
    const ScheduleOptions options{.kind = kind, .head_groups = 2, .ulysses = 2, .node = 2};
    ExecutorOptions how{.kernel = kKernel, .deterministic = true};
    const RanksResult want = run_on_ranks(p, in, layouts, options, how);
    how.checked = true;
    EXPECT_TRUE(same_bytes(run_on_ranks(p, in, layouts, options, how), want));
    RanksResult staged = empty_result(p, kRanks);
    std::mutex mutex;
    run_ranks(kRanks, [&](Communicator& threads) {
      PlainRanks plain(threads);
      run_one_rank(plain, p, in, layouts, options, how, staged, mutex);
    });
    EXPECT_TRUE(same_bytes(staged, want));
  }
}

// What each rank is told if rank 1 changes its call, which must be the same.
std::string told(const std::function<void(ExecutorOptions&, RanksProblem&, RanksInput&)>& change) {
  std::vector<std::string> texts(kRanks);
  run_ranks(kRanks,
            [&](Communicator& comm) {
              RanksProblem p = small();
              RanksInput in(p);
              ExecutorOptions how{.kernel = kKernel, .checked = true};
              if (comm.rank() == 1) change(how, p, in);
              RanksResult result = empty_result(p, kRanks);
              std::mutex mutex;
              const Layouts layouts = make_layouts(LayoutKind::contiguous, p.problem, kRanks);
              texts[at(comm.rank())] = error_of(
                  [&] { run_one_rank(comm, p, in, layouts, {.kind = ScheduleKind::ring}, how, result, mutex); });
            },
            {.time_limit = 30});
  for (const std::string& t : texts) EXPECT_EQ(t, texts[0]);
  return texts[0];
}

TEST_F(DeviceChecked, WhatDiffersIsNamed) {
  EXPECT_EQ(told([](ExecutorOptions&, RanksProblem&, RanksInput&) {}), "");
  expect_parts(told([](ExecutorOptions&, RanksProblem& p, RanksInput&) {
                 p.problem = Problem(p.problem.packing(), {.causal = true, .left = 40});
               }),
               {"mask: rank 1 differs from ranks 0, 2, 3"});
  expect_parts(told([](ExecutorOptions&, RanksProblem& p, RanksInput&) { p.softcap = 20; }),
               {"attention (scale, softcap, sink, head_map): rank 1 differs from ranks 0, 2, 3"});
  expect_parts(told([](ExecutorOptions&, RanksProblem&, RanksInput& in) { in.sink[3] += 1; }),
               {"values of the sink: rank 1 differs from ranks 0, 2, 3"});
  expect_parts(told([](ExecutorOptions& how, RanksProblem&, RanksInput&) { how.kernel = "cpu"; }),
               {"where tensors lie (CPU or GPU): rank 1 differs from ranks 0, 2, 3"});
}

// A checksum depends on every byte and its place, and not on how bytes are cut into blocks.
TEST_F(DeviceChecked, ChecksumsSeeEveryByte) {
  const Place place = check::place_of(kKernel);
  constexpr Index kBytes = 3000;
  std::vector<unsigned char> host(kBytes);
  for (std::size_t i = 0; i < host.size(); ++i) host[i] = static_cast<unsigned char>(i * 37 % 251);
  void* data = device::take(place, kBytes);
  const auto sum = [&](Index rows, Index parts) {
    device::to_device(place, data, host.data(), kBytes);
    const Index bytes = kBytes / (rows * parts);
    const Block whole{data, rows, parts, bytes, parts * bytes, bytes};
    return checksum({&whole, 1}, place);
  };
  const std::uint64_t right = sum(1, 1);
  EXPECT_EQ(sum(30, 4), right);
  EXPECT_EQ(sum(1, 100), right);
  std::vector<Block> pieces;  // more than one launch takes
  for (Index at = 0; at < kBytes; at += 20) pieces.push_back({static_cast<char*>(data) + at, 1, 1, 20, 20, 20});
  EXPECT_EQ(checksum(pieces, place), right);
  // Rows and heads with gaps between them.
  const std::vector<Block> gaps{{data, 10, 3, 50, 300, 100}};
  std::vector<Block> same;
  for (Index i = 0; i < 30; ++i)
    same.push_back({static_cast<char*>(data) + i / 3 * 300 + i % 3 * 100, 1, 1, 50, 50, 50});
  EXPECT_EQ(checksum(gaps, place), checksum(same, place));
  for (const std::size_t i : std::vector<std::size_t>{0, 1, 1499, 2999}) {
    host[i] ^= 1;
    EXPECT_NE(sum(1, 1), right) << i;
    host[i] ^= 1;
  }
  std::swap(host[10], host[11]);
  EXPECT_NE(sum(1, 1), right);
  device::give_back(data);
}

TEST_F(DeviceChecked, ACorruptMessageIsNamed) {
  Subject& s = subject(ScheduleKind::ring, kKernel);
  Index named = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    const Fault fault = make_fault(Fault::Kind::corrupt, seed, kRanks, s.calls[1], 0);
    const std::string error = s.run({fault}, {.checked = true}).error;
    const std::string from = " from rank " + std::to_string(fault.rank);
    named += error.find(" received other bytes than were sent" + from) != std::string::npos ? 1 : 0;
  }
  EXPECT_GT(named, 8);  // others hit the seal itself, comparisons of the host, or calls without messages
}

TEST_F(DeviceChecked, FaultyRanksAreRightOrFail) { check_faulty_schedules(number("WEFT_FAULT_PLANS", 200), kKernel); }

TEST_F(DeviceChecked, FaultyKvBuffersAreRightOrFail) {
  check_faulty_buffers(number("WEFT_FAULT_PLANS", 200) / 4, kKernel);
}

// The tests above mean something: without checks some of the same faults are wrong answers.
TEST_F(DeviceChecked, UncheckedRanksMayBeWrong) {
  Subject& s = subject(ScheduleKind::ring, kKernel);
  Index wrong = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed)
    wrong += s.right(s.run({make_fault(Fault::Kind::corrupt, seed, kRanks, s.calls[0], 0)}, {})) ? 0 : 1;
  EXPECT_GT(wrong, 0);
}

}  // namespace
}  // namespace weft::test
