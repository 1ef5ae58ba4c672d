// Every schedule on ranks that share a GPU, forward and backward: against the dense softmax in f64, and what no bit may
// depend on.
#include "weft/executor.h"

#include <cstdlib>
#include <map>
#include <numeric>
#include <string>

#include <gtest/gtest.h>

#include "check/by_schedule.h"
#include "check/cases/random_case.h"
#include "comm/plain_ranks.h"
#include "device/device.h"
#include "exact_ranks.h"
#include "index.h"
#include "ranks.h"
#include "weft/error.h"
#include "weft/kernel.h"

namespace weft {
namespace {

using test::RanksInput;
using test::RanksProblem;
using test::RanksResult;

constexpr const char* kKernel = "cuda.portable";

TEST(DeviceExecutor, EqualsTheDefinitionOnRandomProblems) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  const char* asked = std::getenv("WEFT_GPU_PROBLEMS");
  const int problems = asked != nullptr ? std::atoi(asked) : 300;
  const char* from = std::getenv("WEFT_GPU_SEED");
  const unsigned long long first = from != nullptr ? std::strtoull(from, nullptr, 10) : 0;
  std::map<std::string, int> compared;
  for (int seed = 0; seed < problems; ++seed) {
    check::RandomChoices choices(first + static_cast<unsigned long long>(seed));
    check::Case c = check::random_case(choices, static_cast<LayoutKind>(seed % 5));
    if (c.dtype == DType::f64) c.dtype = DType::bf16;
    check::Oracle oracle(c, check::executor_arithmetic(c));
    for (const ScheduleKind kind : schedule_kinds()) {
      const Index two = std::gcd(c.ranks, Index{2});
      const ScheduleOptions options{.kind = kind, .head_groups = min_of(c.heads_k, 2), .ulysses = two, .node = two};
      const check::Tried tried = check::try_schedule(oracle, c, {.schedule = options, .kernel = kKernel});
      ASSERT_FALSE(tried.failure) << "seed " << first << " + " << seed << ": " << *tried.failure << "\n"
                                  << check::flags(c);
      if (!tried.report) continue;
      ASSERT_TRUE(tried.report->ok()) << "seed " << first << " + " << seed << " " << name(kind) << "\n"
                                      << check::flags(c);
      ++compared[std::string(name(kind))];
    }
  }
  if (problems < 100) return;
  for (const ScheduleKind kind : schedule_kinds())
    EXPECT_GT(compared[std::string(name(kind))], problems / 4) << name(kind);
}

Stream documents(std::vector<Index> lengths, Index multiple) {
  return Stream::from_lengths(lengths).padded_to(multiple);
}

RanksProblem in_bf16(const Problem& problem, Index heads_q, Index heads_k, Index width) {
  RanksProblem p{.problem = problem, .heads_q = heads_q, .heads_k = heads_k, .dim_qk = width, .dtype = DType::bf16};
  p.dim_v = width == 192 ? 128 : width;
  return p;
}

// Is the kernel not of this build or this GPU?
bool is_absent(std::string_view name, const RanksProblem& p) {
  for (const Kernel& kernel : kernels())
    if (kernel.name == name)
      return kernel
          .refusal({.pass = Pass::backward,
                    .dtype = p.dtype,
                    .dim_qk = p.dim_qk,
                    .dim_v = p.dim_v,
                    .device = DeviceKind::cuda})
          .has_value();
  return true;
}

// In sequence order a row's arithmetic does not depend on who computes it.
TEST(DeviceExecutor, AllGatherInSequenceOrderHasTheBitsOfOneRank) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  const Problem problem(documents({256, 512, 1024}, 16), {.causal = true});
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    const RanksProblem p{.problem = problem, .heads_q = 8, .heads_k = 2, .dim_qk = 128, .dim_v = 128, .dtype = dtype};
    RanksInput in(p);
    const auto run = [&](LayoutKind kind, Index ranks, Index groups) {
      return run_on_ranks(p, in, make_layouts(kind, problem, ranks),
                          {.key_order = KeyOrder::sequence, .head_groups = groups}, {.kernel = kKernel});
    };
    const RanksResult one = run(LayoutKind::dual_chunk, 1, 1);
    for (const Index ranks : {2, 4, 8}) {
      for (const LayoutKind kind : {LayoutKind::dual_chunk, LayoutKind::zigzag, LayoutKind::contiguous}) {
        for (const Index groups : {1, 2}) {
          const RanksResult many = run(kind, ranks, groups);
          SCOPED_TRACE(testing::Message() << name(dtype) << " " << name(kind) << " " << ranks << " groups " << groups);
          EXPECT_EQ(many.out.bytes, one.out.bytes);
          EXPECT_EQ(many.lse.bytes, one.lse.bytes);
          EXPECT_EQ(many.max_logit.bytes, one.max_logit.bytes);
        }
      }
    }
  }
}

// Rows long enough to be cut into parts by the heads of the problem, whatever the heads of a call.
TEST(DeviceExecutor, LongRowsHaveTheSameBitsHoweverHeadsAreShared) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  const Problem problem(documents({9000, 200}, 16), {.causal = true});
  for (const Index heads_q : {4, 32}) {
    const RanksProblem p = in_bf16(problem, heads_q, heads_q / 2, 64);
    if (is_absent("cuda.sm90", p)) GTEST_SKIP() << "not of this GPU";
    RanksInput in(p);
    const auto run = [&](Index ranks, Index groups) {
      return run_on_ranks(p, in, make_layouts(LayoutKind::dual_chunk, problem, ranks),
                          {.key_order = KeyOrder::sequence, .head_groups = groups}, {.kernel = "cuda.sm90"});
    };
    const RanksResult one = run(1, 1);
    for (const auto& [ranks, groups] : {std::pair<Index, Index>{1, heads_q / 2}, {2, 1}, {8, 2}}) {
      const RanksResult many = run(ranks, groups);
      SCOPED_TRACE(testing::Message() << heads_q << " heads, " << ranks << " ranks, groups " << groups);
      EXPECT_EQ(many.out.bytes, one.out.bytes);
      EXPECT_EQ(many.lse.bytes, one.lse.bytes);
      EXPECT_EQ(many.max_logit.bytes, one.max_logit.bytes);
    }
  }
}

std::vector<ScheduleOptions> some_of_each() {
  return {{.kind = ScheduleKind::ring},
          {.kind = ScheduleKind::ring, .ranks_per_step = 1},
          {.kind = ScheduleKind::ring, .ranks_per_step = 3},
          {.kind = ScheduleKind::ring, .node = 2},
          {.kind = ScheduleKind::all_gather, .key_order = KeyOrder::sequence},
          {.kind = ScheduleKind::all_gather, .key_order = KeyOrder::rank, .head_groups = 2},
          {.kind = ScheduleKind::all_to_all},
          {.kind = ScheduleKind::all_to_all, .head_groups = 2},
          {.kind = ScheduleKind::hybrid, .ulysses = 2, .outer = ScheduleKind::ring},
          {.kind = ScheduleKind::hybrid, .head_groups = 2, .ulysses = 2, .outer = ScheduleKind::ring},
          {.kind = ScheduleKind::hybrid, .ulysses = 2, .outer = ScheduleKind::all_gather},
          {.kind = ScheduleKind::exact, .stages = 1},
          {.kind = ScheduleKind::exact, .stages = 3},
          {.kind = ScheduleKind::exact, .stages = 3, .node = 2},
          {.kind = ScheduleKind::all_gather, .head_groups = 2, .node = 2}};
}

void expect_same_bits(const RanksResult& a, const RanksResult& b) {
  for (const auto tensor : test::kResults) EXPECT_EQ((a.*tensor).bytes, (b.*tensor).bytes);
}

// Rows between and behind documents, and rows of ranks that hold no token.
void fill_padding(const RanksProblem& p, RanksInput& in, std::byte with) {
  const Stream& stream = p.problem.packing().q();
  std::vector<bool> real(at(stream.tokens()), false);
  for (Index i = 0; i < stream.sequences(); ++i) std::fill_n(real.begin() + stream.offset(i), stream.used(i), true);
  for (check::Tensor* t : {&in.q, &in.k, &in.v, &in.dout})
    for (std::size_t row = 0; row < real.size(); ++row)
      if (!real[row])
        std::fill_n(t->bytes.begin() + static_cast<std::ptrdiff_t>(row) * t->row_bytes(), t->row_bytes(), with);
  in.unused = with;
}

TEST(DeviceExecutor, NoBitDependsOnPadding) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  const auto check_all = [](const RanksProblem& p, const std::string& kernel) {
    RanksInput nan(p), zeros(p), large(p);
    fill_padding(p, nan, std::byte{0xff});
    fill_padding(p, zeros, std::byte{0});
    fill_padding(p, large, std::byte{0x71});
    for (const LayoutKind kind : {LayoutKind::dual_chunk, LayoutKind::zigzag})
      for (const ScheduleOptions& options : some_of_each()) {
        SCOPED_TRACE(testing::Message() << kernel << " " << name(p.dtype) << " " << name(kind) << " "
                                        << weft::words(options));
        const auto run = [&](RanksInput& in) {
          return run_on_ranks(p, in, make_layouts(kind, p.problem, 4), options,
                              {.kernel = kernel, .deterministic = true});
        };
        const RanksResult want = run(zeros);
        expect_same_bits(run(nan), want);
        expect_same_bits(run(large), want);
      }
  };
  for (const Mask& mask : {Mask{.causal = true}, Mask{.left = 40, .right = 9}}) {
    const Problem problem(Stream::from_used(std::vector<Index>{0, 144, 160, 400}, std::vector<Index>{137, 1, 201}),
                          mask);
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32})
      for (const std::string kernel : {"cuda.portable", "cuda.sm90"}) {
        const RanksProblem p{
            .problem = problem, .heads_q = 4, .heads_k = 2, .dim_qk = 40, .dim_v = 24, .dtype = dtype, .sink = true};
        if (!is_absent(kernel, p)) check_all(p, kernel);
      }
  }
}

TEST(DeviceExecutor, GradientsHaveTheSameBitsOnEveryRun) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  const Problem problem(documents({300, 77, 410}, 16), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::dual_chunk, problem, 4);
  for (const std::string_view kernel : {"cuda.portable", "cuda.sm90"})
    for (const Index width : {64, 128, 192, 256}) {
      RanksProblem p = in_bf16(problem, 4, 2, width);
      p.sink = true;
      if (is_absent(kernel, p)) continue;
      RanksInput in(p);
      for (const ScheduleOptions& options : some_of_each()) {
        SCOPED_TRACE(testing::Message() << kernel << " " << width << " " << weft::words(options));
        const auto run = [&] {
          return run_on_ranks(p, in, layouts, options, {.kernel = std::string(kernel), .deterministic = true});
        };
        const RanksResult first = run();
        for (int i = 1; i < 20; ++i) expect_same_bits(run(), first);
      }
    }
}

// Sums over steps and ranks are f32 and rounded once, so more ranks do not cost accuracy, by no schedule.
TEST(DeviceExecutor, RanksInBf16AreAsExactAsOne) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  const Problem problem(documents({512, 150, 362}, 16), {.causal = true});
  for (const Index width : {64, 128, 192, 256}) {
    const RanksProblem p = in_bf16(problem, 8, 2, width);
    if (is_absent("cuda.sm90", p)) GTEST_SKIP() << "not of this GPU";
    RanksInput in(p);
    const test::Exact want(p, in);
    const auto errors = [&](Index ranks, const ScheduleOptions& options) {
      return test::errors_of(
          run_on_ranks(p, in, make_layouts(LayoutKind::dual_chunk, problem, ranks), options, {.kernel = "cuda.sm90"}),
          want);
    };
    const std::vector<double> one = errors(1, {.kind = ScheduleKind::ring});
    for (const Index ranks : {2, 8})
      for (const ScheduleOptions& options : some_of_each()) {
        SCOPED_TRACE(testing::Message() << width << " " << ranks << " " << weft::words(options));
        const std::vector<double> many = errors(ranks, options);
        for (std::size_t i = 0; i < many.size(); ++i) {
          EXPECT_LT(many[i], 1.1 * one[i]) << i;
          EXPECT_LT(many[i], i == 0 ? 4e-3 : 8e-3) << i;
        }
      }
  }
}

// Messages by way of the host, as over MPI: the same bits, and the same bytes counted.
TEST(DeviceExecutor, TransportsOfTheHostGiveTheSameBits) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  const Problem problem(documents({300, 77, 410}, 16), {.causal = true});
  const RanksProblem p{
      .problem = problem, .heads_q = 4, .heads_k = 2, .dim_qk = 64, .dim_v = 64, .dtype = DType::bf16, .sink = true};
  RanksInput in(p);
  const Layouts layouts = make_layouts(LayoutKind::dual_chunk, problem, 4);
  const ExecutorOptions how{.kernel = kKernel, .deterministic = true};
  for (const ScheduleOptions& options : some_of_each()) {
    SCOPED_TRACE(weft::words(options));
    const RanksResult want = run_on_ranks(p, in, layouts, options, how);
    RanksResult got = test::empty_result(p, 4);
    std::mutex mutex;
    run_ranks(4, [&](Communicator& threads) {
      test::PlainRanks plain(threads);
      run_one_rank(plain, p, in, layouts, options, how, got, mutex);
    });
    expect_same_bits(got, want);
    EXPECT_EQ(got.forward, want.forward);
    EXPECT_EQ(got.backward, want.backward);
  }
}

TEST(DeviceExecutor, RefusesWhatItDoesNotDo) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  run_ranks(1, [](Communicator& ranks) {
    const Place place = check::place_of(kKernel);
    EXPECT_THROW(ranks.on(place)->split(0, 0), Error);
  });
}

TEST(DeviceExecutor, RefusesTensorsOfTheOtherPlace) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  run_ranks(1, [](Communicator& ranks) {
    const Problem problem(documents({4}, 1), {});
    const Layouts layouts = make_layouts(LayoutKind::contiguous, problem, 1);
    Executor executor(ranks, make_schedule(problem, layouts, 0, {}), {.place = check::place_of(kKernel)});
    EXPECT_THROW(executor.forward(test::RankTensors<>(4, 1, 1, 1).args().forward), Error);
  });
}

}  // namespace
}  // namespace weft
