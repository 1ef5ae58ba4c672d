// The simulator: the same numbers from schedules at hand and from a job, the executor's bytes and workspaces, and what
// must hold whatever the numbers are.
#include "weft/simulate.h"

#include <mutex>

#include <gtest/gtest.h>

#include "check/cases/case.h"
#include "check/cases/random_case.h"
#include "cost/engine.h"
#include "cost/patterns.h"
#include "index.h"
#include "rank_tensors.h"
#include "refusal.h"
#include "weft/error.h"
#include "weft/support.h"

namespace weft::test {
namespace {

// Two levels, everything costs something.
Machine machine() {
  Machine m{.name = "test"};
  for (const Pass pass : {Pass::forward, Pass::backward})
    for (const DType dtype : kDTypes)
      m.kernels.push_back({.pass = pass,
                           .dtype = dtype,
                           .dim = 8,
                           .flops = 1e9,
                           .tile_q = 6,
                           .tile_k = 4,
                           .tile_seconds = 1e-7,
                           .row_seconds = 1e-8,
                           .call_seconds = 1e-6,
                           .units = 2});
  m.levels = {
      {.name = "near", .ranks = 2, .bandwidth = 1e9, .latency = 1e-6, .message_seconds = 1e-7, .interference = 0.1},
      {.name = "far", .ranks = 0, .bandwidth = 1e8, .latency = 3e-6, .uplink = 1.5e8, .interference = 0.2}};
  m.row_bandwidth = 1e9;
  m.row_seconds = 1e-7;
  return m;
}

std::vector<ScheduleOptions> schedules(check::Choices& c, const check::Case& p) {
  const Index groups = c.pick(1, p.heads_k), ranks_per_step = c.pick(1, 5);
  std::vector<ScheduleOptions> all = {{.kind = ScheduleKind::all_gather, .head_groups = groups},
                                      {.kind = ScheduleKind::all_gather, .key_order = KeyOrder::rank},
                                      {.kind = ScheduleKind::ring, .ranks_per_step = ranks_per_step},
                                      {.kind = ScheduleKind::all_to_all},
                                      {.kind = ScheduleKind::all_to_all, .head_groups = c.pick(1, p.heads_q)},
                                      {.kind = ScheduleKind::exact, .stages = c.pick(1, 5)},
                                      {.kind = ScheduleKind::exact, .head_groups = groups}};
  for (Index ulysses = 1; ulysses <= p.ranks; ++ulysses) {
    if (p.ranks % ulysses != 0) continue;
    for (const Index each : {Index{1}, p.heads_k})
      all.push_back({.kind = ScheduleKind::hybrid,
                     .head_groups = each,
                     .ulysses = ulysses,
                     .outer = ScheduleKind::ring,
                     .ranks_per_step = ranks_per_step});
    all.push_back(
        {.kind = ScheduleKind::hybrid, .head_groups = groups, .ulysses = ulysses, .outer = ScheduleKind::all_gather});
    const Index node = ulysses;  // any divisor of the ranks
    all.push_back({.kind = ScheduleKind::mesh, .ranks_per_step = ranks_per_step, .query_ranks = node});
    if (node == 1) continue;
    all.push_back({.kind = ScheduleKind::all_gather, .head_groups = groups, .node = node});
    all.push_back({.kind = ScheduleKind::exact, .stages = c.pick(1, 5), .node = node});
    all.push_back({.kind = ScheduleKind::exact, .head_groups = groups, .node = node});
    all.push_back({.kind = ScheduleKind::ring, .node = node});
    for (const ScheduleKind outer : {ScheduleKind::ring, ScheduleKind::all_gather})
      if (node == 4) all.push_back({.kind = ScheduleKind::hybrid, .ulysses = 2, .outer = outer, .node = node});
  }
  return all;
}

struct Question {
  explicit Question(unsigned long long seed) : choices(seed), given(check::random_case(choices)) {
    if (given.dtype == DType::f64) given.dtype = DType::f32;
    problem.emplace(check::problem_of(given));
    layouts.emplace(check::layouts_of(given, *problem));
    shape = {.dtype = given.dtype, .dim_qk = given.dim_qk, .dim_v = given.dim_v};
    shape.max_logit = choices.one_in(2);
    shape.dsink = choices.one_in(2);
  }
  Job job(const ScheduleOptions& options) const {
    return {*problem, *layouts, given.heads_q, given.heads_k, options, shape};
  }
  // Those that are not refused.
  std::optional<std::vector<Schedule>> made(const ScheduleOptions& options) const {
    std::vector<Schedule> all;
    try {
      for (Index r = 0; r < given.ranks; ++r)
        all.push_back(make_schedule(*problem, *layouts, r, {given.heads_q, given.heads_k}, options));
    } catch (const Error&) {
      return {};
    }
    return all;
  }

  check::RandomChoices choices;
  check::Case given;
  std::optional<Problem> problem;
  std::optional<Layouts> layouts;
  TensorShape shape;
};

Job job_of(const Problem& problem, const Layouts& layouts, const ScheduleOptions& options) {
  return {problem, layouts, 2, 1, options, {.dtype = DType::f32, .dim_qk = 8, .dim_v = 8}};
}

constexpr unsigned long long kQuestions = 150;
constexpr Pass kPasses[] = {Pass::forward, Pass::backward};

// Both passes of every schedule on random questions; what make_schedule refuses, the simulator refuses too. Returns how
// many passes there were.
template <class Body>
Index each_pass(unsigned long long first, unsigned long long count, const Body& body) {
  Index passes = 0;
  for (unsigned long long seed = first; seed < first + count; ++seed) {
    Question q(seed);
    for (const ScheduleOptions& options : schedules(q.choices, q.given)) {
      const auto made = q.made(options);
      if (!made) {
        EXPECT_THROW(simulate(q.job(options), machine(), Pass::forward), Error) << seed;
        continue;
      }
      SCOPED_TRACE(check::flags(q.given) + " " + words(options));
      for (const Pass pass : kPasses) {
        body(q, options, *made, pass);
        ++passes;
      }
      if (testing::Test::HasFailure()) return passes;
    }
  }
  return passes;
}

// Calls what with K and V that move, and, where the schedule can, with a source in their place.
template <class Body>
void with_and_without_source(Question& q, const ScheduleOptions& options, const Body& body) {
  constexpr Index kWidth = 5;
  for (const auto& [source, keeps] : {std::pair<Index, bool>{0, false}, {kWidth, false}, {kWidth, true}}) {
    if (source > 0 && refusal({.schedule = options.kind, .source = true})) continue;
    q.shape.source = source;
    q.shape.keeps_expanded = keeps;
    SCOPED_TRACE(testing::Message() << "source " << source << (keeps ? ", kept" : ""));
    body();
  }
  q.shape.source = 0;
  q.shape.keeps_expanded = false;
}

TEST(Simulate, JobAndSchedulesAgree) {
  const Machine m = machine();
  const auto agree = [&](Question& q, const ScheduleOptions& options, const std::vector<Schedule>& made, Pass pass) {
    const Timeline a = simulate(q.job(options), m, pass), b = simulate(made, q.shape, m, pass);
    EXPECT_NEAR(a.seconds, b.seconds, 1e-6 * b.seconds);
    EXPECT_NEAR(a.ideal, b.ideal, 1e-9 * b.ideal);
    EXPECT_EQ(a.memory.tensors, b.memory.tensors);
    EXPECT_EQ(a.memory.workspace, b.memory.workspace);
    for (std::size_t r = 0; r < a.ranks.size(); ++r) {
      EXPECT_NEAR(a.ranks[r].compute, b.ranks[r].compute, 1e-6 * b.ranks[r].compute) << "rank " << r;
      EXPECT_EQ(a.ranks[r].bytes_in, b.ranks[r].bytes_in) << "rank " << r;
      EXPECT_EQ(a.ranks[r].bytes_out, b.ranks[r].bytes_out) << "rank " << r;
      EXPECT_EQ(a.ranks[r].pairs, b.ranks[r].pairs) << "rank " << r;
    }
  };
  const auto both = [&](Question& q, const ScheduleOptions& options, const std::vector<Schedule>& made, Pass pass) {
    with_and_without_source(q, options, [&] { agree(q, options, made, pass); });
  };
  EXPECT_GT(each_pass(0, kQuestions, both), 1000);
}

// Four ranks of 24 rows, all of which see all: each makes K and V of four steps.
TEST(Simulate, KeysOfASourceThatAreKeptTakeMemoryAndSaveAProduct) {
  constexpr Index kRanks = 4, kRows = 24, kWidth = 5, kHeadsK = 1, kDims = 8 + 8;
  Machine m = machine();
  for (Level& level : m.levels) level.interference = 0;
  const Problem problem(Stream::from_lengths(std::vector<Index>{kRanks * kRows}), {});
  Job job = job_of(problem, make_layouts(LayoutKind::contiguous, problem, kRanks),
                   {.kind = ScheduleKind::ring, .ranks_per_step = 1});
  job.shape.source = kWidth;
  for (const Pass pass : kPasses) {
    job.shape.keeps_expanded = false;
    const Timeline again = simulate(job, m, pass);
    job.shape.keeps_expanded = true;
    const Timeline kept = simulate(job, m, pass);
    constexpr Index kStep = kRows * kHeadsK * kDims;  // numbers of K and V
    EXPECT_EQ(kept.memory.tensors - again.memory.tensors, (kRanks - 1) * kStep * 4);
    EXPECT_EQ(kept.memory.workspace, again.memory.workspace);
    const double product = 2.0 * kWidth * static_cast<double>(kStep) / 1e9;
    for (std::size_t r = 0; r < kRanks; ++r) {
      EXPECT_NEAR(again.ranks[r].compute - kept.ranks[r].compute, pass == Pass::forward ? 0 : kRanks * product,
                  1e-3 * product);
      EXPECT_EQ(kept.ranks[r].bytes_in, again.ranks[r].bytes_in);
    }
  }
}

TEST(Simulate, BytesAreThoseOfTraffic) {
  const Machine m = machine();
  each_pass(1000, kQuestions, [&](Question& q, const ScheduleOptions& options, const auto& made, Pass pass) {
    with_and_without_source(q, options, [&] {
      const Timeline t = simulate(q.job(options), m, pass);
      for (std::size_t r = 0; r < made.size(); ++r) {
        const Traffic want = traffic(made[r], q.shape, pass);
        EXPECT_EQ(t.ranks[r].bytes_in, want.bytes_received);
        EXPECT_EQ(t.ranks[r].bytes_out, want.bytes_sent);
      }
    });
  });
}

TEST(Simulate, BytesAndWorkspacesAreTheExecutors) {
  const Machine m = machine();
  each_pass(2000, 40, [&](Question& q, const ScheduleOptions& options, const auto& made, Pass pass) {
    q.shape.dsink = q.shape.max_logit = false;
    q.shape.lse = DType::f32;
    const Timeline t = simulate(q.job(options), m, pass);
    std::mutex mutex;
    Index workspace = 0;
    run_ranks(q.given.ranks, [&](Communicator& comm) {
      const check::Case& c = q.given;
      const RankTensors<> tensors(
          {q.layouts->q.rows(), q.layouts->k.rows(), c.heads_q, c.heads_k, c.dim_qk, c.dim_v, c.dtype});
      Executor executor(comm, made[at(comm.rank())]);
      comm.reset_traffic();
      if (pass == Pass::forward)
        executor.forward(tensors.args().forward);
      else
        executor.backward(tensors.args().backward);
      const RankMemory mine = rank_memory(executor.schedule(), q.shape, pass);
      const std::lock_guard lock(mutex);
      workspace = max_of(workspace, executor.workspace_bytes());
      EXPECT_EQ(mine.workspace, executor.workspace_bytes());
      const RankTimes& times = t.ranks[at(comm.rank())];
      EXPECT_EQ(times.bytes_in, comm.traffic().bytes_received);
      EXPECT_EQ(times.bytes_out, comm.traffic().bytes_sent);
    });
    EXPECT_EQ(t.memory.workspace, workspace);
  });
}

TEST(Simulate, NeverBelowIdealAndBandwidthHelps) {
  const Machine slow = machine();
  Machine fast = slow;
  for (Level& l : fast.levels) {
    l.bandwidth *= 3;
    l.uplink *= 3;
  }
  Machine free = slow;
  for (Level& l : free.levels) l = {.name = l.name, .ranks = l.ranks};
  each_pass(3000, kQuestions, [&](Question& q, const ScheduleOptions& options, const auto&, Pass pass) {
    const Timeline a = simulate(q.job(options), slow, pass), b = simulate(q.job(options), fast, pass),
                   c = simulate(q.job(options), free, pass);
    EXPECT_GE(a.seconds, a.ideal);
    EXPECT_LE(b.seconds, a.seconds * (1 + 1e-9));
    EXPECT_LE(c.seconds, b.seconds * (1 + 1e-9));
    for (const RankTimes& r : a.ranks) {
      EXPECT_LE(r.overlapped, r.exchange * (1 + 1e-9));
      EXPECT_NEAR(r.compute + r.rows + r.waiting, a.seconds, 1e-6 * a.seconds);
    }
  });
}

TEST(Simulate, OneRankIsTheKernel) {
  Machine m = machine();
  m.row_bandwidth = m.row_seconds = 0;
  const std::vector<Index> lengths = {30, 5, 17};
  const Problem problem(Stream::from_lengths(lengths), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 1);
  const TensorShape shape{.dtype = DType::bf16, .dim_qk = 8, .dim_v = 8};
  for (const ScheduleKind kind : schedule_kinds()) {
    for (const Pass pass : kPasses) {
      const ScheduleOptions options{.kind = kind, .ulysses = 1};
      const Schedule s = make_schedule(problem, layouts, 0, {4, 2}, options);
      const KernelRate& rate = kernel_rate(m, pass, shape);
      const double want = kernel_seconds(tile_work(s.plans[0].slices, 4, 2, rate), rate, shape);
      EXPECT_NEAR(simulate({problem, layouts, 4, 2, options, shape}, m, pass).seconds, want, 1e-6 * want) << name(kind);
    }
  }
}

TEST(Simulate, BothEnginesAgree) {
  const Machine m = machine();
  each_pass(4000, kQuestions, [&](Question& q, const ScheduleOptions& options, const auto&, Pass pass) {
    if (options.kind == ScheduleKind::exact) return;  // late senders are in one of them alone
    const cost::Outline outline = cost::outline_of(q.job(options), m, pass);
    Timeline a, b;
    cost::Record first(outline, {}, a), second(outline, {}, b);
    cost::run_in_step(outline, m, pass, {}, first);
    cost::run_shared(outline, m, pass, {}, second);
    EXPECT_NEAR(a.seconds, b.seconds, 1e-6 * a.seconds);
    for (std::size_t r = 0; r < a.ranks.size(); ++r) {
      EXPECT_NEAR(a.ranks[r].compute, b.ranks[r].compute, 1e-6 * a.seconds);
      EXPECT_NEAR(a.ranks[r].overlapped, b.ranks[r].overlapped, 1e-6 * a.seconds);
    }
  });
}

TEST(Simulate, RanksThatShareAProcessorSlowEachOther) {
  Machine m = machine();
  m.levels = {{.name = "all"}};
  m.row_bandwidth = m.row_seconds = 0;
  m.kernels[0].units = 1;
  const std::vector<Index> lengths(8, 64);
  const Problem problem(Stream::from_lengths(lengths), {});
  const Layouts layouts = make_layouts(LayoutKind::contiguous, problem, 8);
  const Job job = job_of(problem, layouts, {.kind = ScheduleKind::exact});
  const double alone = simulate(job, m, Pass::forward).seconds;
  m.processor_ranks = 0;
  m.processor_kernels = 2;
  EXPECT_NEAR(simulate(job, m, Pass::forward).seconds, 4 * alone, 1e-6 * alone);
}

// A clock of thousands of seconds and pieces of microseconds: what is left of one may not move the clock any more.
TEST(Simulate, ALongTimeOnSharedProcessorsEnds) {
  Machine m = machine();
  for (KernelRate& rate : m.kernels) rate.flops = 3e2;
  m.processor_ranks = 0;
  m.processor_kernels = 2;
  m.copy_bandwidth = 1e9;
  m.copy_seconds = 1e-7;
  m.exchange_seconds = 1e-6;
  const std::vector<Index> lengths = {1500, 250, 2346};
  const Problem problem(Stream::from_lengths(lengths), {.causal = true});
  for (const ScheduleKind kind : {ScheduleKind::exact, ScheduleKind::ring, ScheduleKind::all_gather}) {
    const Job job = job_of(problem, make_layouts(LayoutKind::zigzag, problem, 4), {.kind = kind});
    EXPECT_GT(simulate(job, m, Pass::forward).seconds, 1e4);
  }
}

TEST(Simulate, RefusesWhatTheScheduleRefuses) {
  const std::vector<Index> lengths = {100};
  const Problem problem(Stream::from_lengths(lengths), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 4);
  for (const ScheduleOptions& options : {ScheduleOptions{.kind = ScheduleKind::exact, .stages = 0},
                                         {.kind = ScheduleKind::ring, .ranks_per_step = 0},
                                         {.kind = ScheduleKind::hybrid, .ranks_per_step = -1}}) {
    const Job job = job_of(problem, layouts, options);
    EXPECT_THROW(simulate(job, machine(), Pass::forward), Error);
  }
}

TEST(Simulate, TooManyMessagesAreRefused) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{1 << 16}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::contiguous, problem, 4096);
  const ScheduleOptions options{.kind = ScheduleKind::ring, .ranks_per_step = 4096};
  const Job job{problem, layouts, 1, 1, options, {.dtype = DType::bf16, .dim_qk = 8, .dim_v = 8}};
  expect_refusal([&] { (void)simulate(job, machine(), Pass::forward); },
                 {"4096 ranks", "ranks_per_step=4096", "up to 2048 ranks_per_step"});
}

TEST(Simulate, ManyRanksAreSampledAndStillRight) {
  const std::vector<Index> lengths(40, 1024);
  const Problem problem(Stream::from_lengths(lengths), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::striped, problem, 1024);
  const Job job{problem, layouts, 8, 1, {.kind = ScheduleKind::ring}, {.dtype = DType::bf16, .dim_qk = 8, .dim_v = 8}};
  const Timeline t = simulate(job, machine(), Pass::forward);
  EXPECT_LT(t.planned, 1024);
  double pairs = 0;
  for (const RankTimes& r : t.ranks) pairs += static_cast<double>(r.pairs);
  EXPECT_NEAR(pairs, 8.0 * static_cast<double>(problem.visible_pairs()), 0.01 * pairs);
}

// Messages of a planned rank and its neighbours, as a few spans and as a list of all of them.
TEST(Simulate, SpansAreTheirMessages) {
  const Machine m = machine();
  check::RandomChoices c(7);
  for (int round = 0; round < 200; ++round) {
    const Index ranks = c.pick(2, 23), repeat = c.pick(1, 7);
    const bool back = c.one_in(2);
    auto spans = std::make_shared<std::vector<cost::Span>>();
    std::vector<cost::Patterns::Sent> messages;
    for (Index first = 0; first < ranks; first += repeat) {
      for (Index distance = 1; distance < ranks; ++distance) {
        if (c.one_in(2)) continue;
        const double rows = static_cast<double>(c.pick(1, 100));
        spans->push_back({static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(distance), rows});
        for (Index to = first; to < min_of(ranks, first + repeat); ++to) {
          const Index from = floor_mod(to - distance, ranks);
          messages.push_back({back ? to : from, back ? from : to, rows * 24});
        }
      }
    }
    const cost::Patterns make(m, ranks);
    const cost::Pattern patterns[] = {make.spans(spans, repeat, 24, back), make.listed(messages, back, true)};
    Timeline t[2];
    for (int n = 0; n < 2; ++n) {
      cost::Outline o;
      o.ranks = ranks;
      o.pairs.assign(at(ranks), 1);
      o.patterns = {patterns[n]};
      o.steps.resize(3);
      o.set_head_groups(1);
      for (std::size_t step = 0; step < 3; ++step) {
        o.steps[step].kv = 0;
        for (Index r = 0; r < ranks; ++r)
          o.steps[step].work.push_back({.rank = static_cast<std::uint32_t>(r),
                                        .seconds = 1e-6F * static_cast<float>((r * 7 + round) % 5),
                                        .rows = 0,
                                        .pairs = 1});
      }
      for (const bool progress : {true, false}) {
        Machine with = m;
        with.progress = progress;
        cost::Record record(o, {}, t[n]);
        cost::run_in_step(o, with, Pass::forward, {}, record);
      }
      Machine sharing = m;
      sharing.processor_ranks = 2;
      cost::Record record(o, {}, t[n]);
      cost::run_shared(o, sharing, Pass::forward, {}, record);
    }
    ASSERT_EQ(t[0].seconds, t[1].seconds) << round;
    for (std::size_t r = 0; r < t[0].ranks.size(); ++r) {
      ASSERT_EQ(t[0].ranks[r].end, t[1].ranks[r].end) << round;
      ASSERT_EQ(t[0].ranks[r].exchange, t[1].ranks[r].exchange) << round;
      ASSERT_EQ(t[0].ranks[r].bytes_in, t[1].ranks[r].bytes_in) << round;
      ASSERT_EQ(t[0].ranks[r].bytes_out, t[1].ranks[r].bytes_out) << round;
      ASSERT_EQ(patterns[0].loads[r].copied, patterns[1].loads[r].copied) << round;
      ASSERT_EQ(patterns[0].loads[r].messages, patterns[1].loads[r].messages) << round;
    }
  }
}

// On links whose exchanges take `ratio` times as long as the compute: the part of them that costs no time.
double hidden(const Problem& problem, Index heads_k, Index head_groups, Pass pass, double ratio) {
  Machine m = machine();
  m.levels = {{.name = "all"}};
  m.row_bandwidth = m.row_seconds = 0;
  for (KernelRate& rate : m.kernels) rate.flops = 1e12;
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 8);
  const TensorShape shape{.dtype = DType::bf16, .dim_qk = 128, .dim_v = 128};
  const ScheduleOptions options{.kind = ScheduleKind::all_to_all, .head_groups = head_groups};
  const Job job{problem, layouts, 64, heads_k, options, shape};
  const Timeline free = simulate(job, m, pass);
  m.levels[0].bandwidth = static_cast<double>(free.bytes_in()) / (ratio * free.seconds);
  return 1 - (simulate(job, m, pass).seconds - free.seconds) / (ratio * free.seconds);
}

TEST(Simulate, HeadGroupsHideSwaps) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{8192, 24576}), {.causal = true});
  for (const Index heads_k : {64, 8}) {
    for (const Pass pass : kPasses) {
      for (const double ratio : {0.5, 1.0}) {
        SCOPED_TRACE(testing::Message() << "64:" << heads_k << ", ratio " << ratio);
        EXPECT_LT(hidden(problem, heads_k, 1, pass, ratio), 0.1);
        EXPECT_GE(hidden(problem, heads_k, 8, pass, ratio), 0.7);
      }
    }
  }
}

TEST(Simulate, DetailsAreEventsOfTheRank) {
  const std::vector<Index> lengths = {100, 28};
  const Problem problem(Stream::from_lengths(lengths), {.causal = true});
  const Job job = job_of(problem, make_layouts(LayoutKind::zigzag, problem, 4), {.kind = ScheduleKind::ring});
  const Timeline t = simulate(job, machine(), Pass::backward, {.detail = {3, 1, 3}});
  ASSERT_EQ(t.detail.size(), 2U);
  EXPECT_EQ(t.detail[0].rank, 3);
  Index bytes = 0;
  double last = 0;
  for (const TimelineEvent& e : t.detail[0].events) {
    EXPECT_LE(last, e.begin);
    EXPECT_LE(e.begin, e.end);
    last = e.begin;
    bytes += e.bytes_in;
  }
  EXPECT_EQ(bytes, t.ranks[3].bytes_in);
  EXPECT_THROW(simulate(job, machine(), Pass::forward, {.detail = {4}}), Error);
}

}  // namespace
}  // namespace weft::test
