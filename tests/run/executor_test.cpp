// The executor on ranks that are threads: bits, errors against the reference, bytes, workspaces, refusals.
#include <atomic>
#include <cmath>
#include <deque>
#include <thread>

#include <gtest/gtest.h>

#include "exact_ranks.h"
#include "index.h"
#include "ranks.h"
#include "refusal.h"
#include "sanitized.h"

namespace weft::test {
namespace {

const std::vector<Index> kRanks = kSanitized ? std::vector<Index>{4} : std::vector<Index>{1, 2, 3, 4, 8};

Stream documents(std::vector<Index> lengths, Index multiple = 1) {
  return Stream::from_lengths(lengths).padded_to(multiple);
}

std::vector<ScheduleOptions> all_schedules(Index heads_k, bool sequence_order, Index ranks) {
  std::vector<ScheduleOptions> all = {{.kind = ScheduleKind::ring},
                                      {.kind = ScheduleKind::ring, .ranks_per_step = 1},
                                      {.kind = ScheduleKind::ring, .ranks_per_step = 3},
                                      {.kind = ScheduleKind::ring, .ranks_per_step = 100},
                                      {.kind = ScheduleKind::all_gather, .key_order = KeyOrder::rank},
                                      {.kind = ScheduleKind::all_to_all},
                                      {.kind = ScheduleKind::exact},
                                      {.kind = ScheduleKind::exact, .stages = 1}};
  for (const Index inside : {1, 2, 3, 4}) {
    if (ranks % inside != 0 || inside > ranks) continue;
    for (const ScheduleKind across : {ScheduleKind::ring, ScheduleKind::all_gather})
      all.push_back({.kind = ScheduleKind::hybrid, .ulysses = inside, .outer = across});
    all.push_back({.kind = ScheduleKind::hybrid, .ulysses = inside, .ranks_per_step = 1});
  }
  for (const Index side : {1, 2, 3, 4})
    if (ranks % side == 0) all.push_back({.kind = ScheduleKind::mesh, .query_ranks = side});
  all.push_back({.kind = ScheduleKind::mesh, .ranks_per_step = 1, .query_ranks = ranks % 2 == 0 ? 2 : 1});
  for (const Index node : {2, 4}) {
    if (ranks % node != 0) continue;
    for (const Index stages : {1, 2, 4}) all.push_back({.kind = ScheduleKind::exact, .stages = stages, .node = node});
    all.push_back({.kind = ScheduleKind::all_gather, .key_order = KeyOrder::rank, .node = node});
    if (heads_k > 1)
      for (const ScheduleKind kind : {ScheduleKind::all_gather, ScheduleKind::exact})
        all.push_back({.kind = kind, .head_groups = 2, .node = node});
    all.push_back({.kind = ScheduleKind::ring, .node = node});
    for (const ScheduleKind across : {ScheduleKind::ring, ScheduleKind::all_gather})
      if (node == 4) all.push_back({.kind = ScheduleKind::hybrid, .ulysses = 2, .outer = across, .node = node});
  }
  if (sequence_order) all.push_back({.kind = ScheduleKind::all_gather, .key_order = KeyOrder::sequence});
  if (heads_k > 1) {
    all.push_back({.kind = ScheduleKind::all_gather, .head_groups = 2});
    all.push_back({.kind = ScheduleKind::exact, .head_groups = 2});
    all.push_back({.kind = ScheduleKind::all_to_all, .head_groups = 2});
    if (ranks % 2 == 0) all.push_back({.kind = ScheduleKind::hybrid, .head_groups = 2});
  }
  return all;
}

// Every schedule and layout on several numbers of ranks.
void expect_the_reference(const std::vector<Problem>& problems) {
  for (const Problem& problem : problems) {
    const RanksProblem p{
        .problem = problem, .heads_q = 4, .heads_k = 2, .dim_qk = 24, .dim_v = 16, .softcap = 3, .sink = true};
    RanksInput in(p);
    const Exact want(p, in);
    for (const Index ranks : kRanks) {
      for (const LayoutKind kind : {LayoutKind::contiguous, LayoutKind::dual_chunk, LayoutKind::zigzag,
                                    LayoutKind::striped, LayoutKind::balanced, LayoutKind::placed}) {
        if (kind == LayoutKind::dual_chunk && ranks == 3) continue;  // documents are padded to 16
        if (kind == LayoutKind::balanced && !problem.packing().self()) continue;
        const Layouts layouts = make_layouts(kind, problem, ranks);
        for (const ScheduleOptions& options : all_schedules(2, kind != LayoutKind::striped || ranks == 1, ranks)) {
          SCOPED_TRACE(testing::Message() << name(kind) << " " << ranks << " ranks " << name(options.kind) << " "
                                          << name(options.key_order) << " groups " << options.head_groups << " inside "
                                          << options.ulysses << " across " << name(options.outer) << " node "
                                          << options.node << " stages " << options.stages);
          const RanksResult r = run_on_ranks(p, in, layouts, options);
          EXPECT_LT(worst_error(r, want, true), 2e-6);
          for (Index rank = 0; rank < ranks; ++rank) {
            const Schedule s = make_schedule(problem, layouts, rank, {4, 2}, options);
            const TensorShape shape{.dim_qk = 24, .dim_v = 16, .max_logit = true, .dsink = true};
            EXPECT_EQ(r.forward[at(rank)], traffic(s, shape, Pass::forward));
            EXPECT_EQ(r.backward[at(rank)], traffic(s, shape, Pass::backward));
          }
        }
      }
    }
  }
}

TEST(Executor, EqualsTheReference) {
  expect_the_reference({Problem(documents({37, 0, 5, 64, 1}, 16), {.causal = true})});
}
TEST(Executor, EqualsTheReferenceWithOtherMasks) {
  expect_the_reference({
      Problem(documents({37, 0, 5, 64, 1}, 16), {.left = 7, .right = 3}),
      Problem(documents({40, 9, 55}, 16), {.causal = true, .chunk = 11}),
      Problem(Packing(documents({20, 33, 4}, 16), documents({31, 12, 40}, 16)),
              {.causal = true, .align = Align::bottom_right}),
      Problem(documents({90, 22}, 16), {.slices = std::vector<Slice>{{0, 30, 10, 60, -5, 20}, {30, 90, 0, 40}}}),
  });
}

// Known to go wrong elsewhere: a window to the right that ends in the other half of a short document.
TEST(Executor, WindowToTheRightOverTwoRanks) {
  if (kSanitized) GTEST_SKIP() << "numbers, not paths";
  const Problem problem(documents({4096, 400}), {.left = 512, .right = 512});
  const RanksProblem p{.problem = problem, .heads_q = 1, .heads_k = 1};
  RanksInput in(p);
  const Exact want(p, in);
  for (const LayoutKind kind : {LayoutKind::dual_chunk, LayoutKind::zigzag, LayoutKind::contiguous}) {
    for (const ScheduleOptions& options : all_schedules(1, true, 2)) {
      const RanksResult r = run_on_ranks(p, in, make_layouts(kind, problem, 2), options);
      EXPECT_LT(worst_error(r, want, false), 2e-6) << name(kind) << " " << name(options.kind);
    }
  }
}

TEST(Executor, AllGatherInSequenceOrderHasTheSameBitsOnAnyRanks) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Problem problem(documents({300, 77, 1, 0, 410}, 16), {.causal = true});
    const RanksProblem p{
        .problem = problem, .heads_q = 4, .heads_k = 2, .dim_qk = 32, .dim_v = 32, .dtype = dtype, .sink = true};
    RanksInput in(p);
    const RanksResult one =
        run_on_ranks(p, in, make_layouts(LayoutKind::zigzag, problem, 1), {.key_order = KeyOrder::sequence});
    for (const Index ranks : {2, 4, 8}) {
      for (const LayoutKind kind : {LayoutKind::dual_chunk, LayoutKind::zigzag, LayoutKind::contiguous}) {
        for (const auto& [groups, node] : {std::pair<Index, Index>{1, 1}, {2, 1}, {1, 2}, {2, 2}}) {
          const RanksResult r = run_on_ranks(p, in, make_layouts(kind, problem, ranks),
                                             {.key_order = KeyOrder::sequence, .head_groups = groups, .node = node});
          EXPECT_EQ(r.out.bytes, one.out.bytes) << name(dtype) << " " << name(kind) << " " << ranks;
          EXPECT_EQ(r.lse.bytes, one.lse.bytes) << name(dtype) << " " << name(kind) << " " << ranks;
          EXPECT_EQ(r.max_logit.bytes, one.max_logit.bytes);
        }
      }
    }
  }
}

TEST(Executor, GradientsHaveTheSameBitsOnEveryRun) {
  const Problem problem(documents({300, 77, 410}, 16), {.causal = true});
  const RanksProblem p{.problem = problem, .heads_q = 4, .heads_k = 2, .dim_qk = 32, .dim_v = 32, .sink = true};
  RanksInput in(p);
  for (const ScheduleOptions& options : all_schedules(2, true, 4)) {
    const auto run = [&] {
      return run_on_ranks(p, in, make_layouts(LayoutKind::dual_chunk, problem, 4), options, {.deterministic = true});
    };
    const RanksResult first = run();
    for (int i = 0; i < (kSanitized ? 1 : 10); ++i) EXPECT_TRUE(same_bytes(run(), first)) << name(options.kind);
  }
}

// Threads of one process with executors of their own, each in the midst of the others' calls.
TEST(Executor, ThreadsThatMixTheirCallsHaveTheBitsOfOne) {
  struct Kind {
    Kind(const RanksProblem& problem, Index ranks, const ScheduleOptions& how)
        : p(problem),
          layouts(make_layouts(LayoutKind::dual_chunk, p.problem, ranks)),
          options(how),
          in(p),
          wanted(run()) {}
    RanksResult run() { return run_on_ranks(p, in, layouts, options); }

    RanksProblem p;
    Layouts layouts;
    ScheduleOptions options;
    RanksInput in;
    RanksResult wanted;
  };
  std::deque<Kind> kinds;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    const Problem problem(documents({30, 7, 41}, 4), {.causal = dtype != DType::f16});
    for (const ScheduleKind schedule : schedule_kinds())
      for (const Index ranks : {1, 2})
        kinds.emplace_back(
            RanksProblem{.problem = problem, .heads_q = 4, .heads_k = 2, .dtype = dtype, .sink = ranks == 2}, ranks,
            ScheduleOptions{.kind = schedule, .ulysses = ranks});
  }
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (std::size_t t = 0; t < 8; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = 0; i < (kSanitized ? kinds.size() : 8 * kinds.size()); ++i) {
        Kind& kind = kinds[(i * (2 * t + 1) + t) % kinds.size()];
        wrong += same_bytes(kind.run(), kind.wanted) ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

// Sums over steps and ranks are f32 and rounded once, so more ranks do not cost accuracy.
TEST(Executor, RingInBf16IsAsExactAsOneRank) {
  if (kSanitized) GTEST_SKIP() << "numbers, not paths";
  const Problem problem(documents({1024, 300, 724}, 16), {.causal = true});
  const RanksProblem p{.problem = problem, .heads_q = 4, .heads_k = 2, .dim_qk = 64, .dim_v = 64, .dtype = DType::bf16};
  RanksInput in(p);
  const Exact want(p, in);
  const auto errors = [&](Index ranks) {
    return errors_of(
        run_on_ranks(p, in, make_layouts(LayoutKind::dual_chunk, problem, ranks), {.kind = ScheduleKind::ring}), want);
  };
  const std::vector<double> one = errors(1), eight = errors(8);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_LT(eight[i], 1.1 * one[i]) << i;
}

TEST(Executor, KeepsItsWorkspacesAndTellsWhatItDid) {
  const Problem problem(documents({64, 64}, 8), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::dual_chunk, problem, 4);
  run_ranks(4, [&](Communicator& comm) {
    std::vector<StepEvent> events;
    Executor executor(comm, make_schedule(problem, layouts, comm.rank(), {2, 2}, {.kind = ScheduleKind::ring}),
                      {.observer = [&](const StepEvent& e) { events.push_back(e); }});
    EXPECT_EQ(executor.workspace_bytes(), 0);
    std::vector<float> x(at(layouts.q.rows() * 2 * 8), 1.0F), out(x);
    const auto view = thd(x.data(), DType::f32, layouts.q.rows(), 2, 8);
    Index held = 0;
    for (int i = 0; i < 3; ++i) {
      events.clear();
      executor.forward({.q = view, .k = view, .v = view, .out = thd(out.data(), DType::f32, layouts.q.rows(), 2, 8)});
      EXPECT_TRUE(i == 0 || executor.workspace_bytes() == held);
      held = executor.workspace_bytes();
      EXPECT_GT(held, 0);
      Index waits = 0, computes = 0;
      for (const StepEvent& e : events) {
        (e.kind == StepEvent::Kind::wait ? waits : computes) += 1;
        EXPECT_EQ(e.steps, 3);  // the own keys, two ranks', the last one's
        EXPECT_LE(e.begin, e.end);
      }
      EXPECT_EQ(waits, 3);
      EXPECT_EQ(computes, 3);
    }
    for (const float y : out) EXPECT_NEAR(y, 1.0F, 1e-6F);
  });
}

// Fewer heads than ranks, heads that do not divide, and a head map: nothing is refused, gradients included.
TEST(Executor, AnyHeadsOnAnyRanks) {
  const Problem problem(documents({37, 0, 5, 64, 1}, 16), {.causal = true});
  struct Shape {
    Index heads_q, heads_k, ranks;
  };
  const std::vector<Shape> shapes = {{3, 1, 4}, {8, 2, 8}, {12, 2, 8}, {3, 3, 4}, {1, 1, 8}, {6, 3, 4}};
  for (const Shape& shape : std::span(shapes).first(kSanitized ? 1 : shapes.size())) {
    const RanksProblem p{.problem = problem, .heads_q = shape.heads_q, .heads_k = shape.heads_k, .sink = true};
    RanksInput in(p);
    const Exact want(p, in);
    for (const ScheduleOptions& options : all_schedules(shape.heads_k, true, shape.ranks)) {
      const RanksResult r = run_on_ranks(p, in, make_layouts(LayoutKind::zigzag, problem, shape.ranks), options);
      EXPECT_LT(worst_error(r, want, true), 2e-6)
          << shape.heads_q << ":" << shape.heads_k << " on " << shape.ranks << " " << name(options.kind);
    }
  }
}

// A window moves a halo; documents that lie on one rank move nothing.
TEST(Executor, ExactMovesWhatIsSeen) {
  const auto bytes = [](const Problem& problem, LayoutKind layout, Index ranks, ScheduleKind kind) {
    const Layouts layouts = make_layouts(layout, problem, ranks);
    Index total = 0;
    for (Index rank = 0; rank < ranks; ++rank)
      total += traffic(make_schedule(problem, layouts, rank, {1, 1}, {.kind = kind}), {.dim_qk = 64, .dim_v = 64},
                       Pass::forward)
                   .bytes_received;
    return static_cast<double>(total);
  };
  for (const LayoutKind layout : {LayoutKind::contiguous, LayoutKind::dual_chunk}) {
    const Problem left(documents({65536}), {.causal = true, .left = 512}),
        both(documents({65536}), {.left = 512, .right = 512});
    EXPECT_LT(bytes(left, layout, 8, ScheduleKind::exact), 0.02 * bytes(left, layout, 8, ScheduleKind::all_gather))
        << name(layout);
    EXPECT_LT(bytes(both, layout, 8, ScheduleKind::exact), 0.04 * bytes(both, layout, 8, ScheduleKind::all_gather))
        << name(layout);
  }
  const Problem own(documents(std::vector<Index>(8, 1024)), {.causal = true});
  EXPECT_EQ(bytes(own, LayoutKind::contiguous, 8, ScheduleKind::exact), 0);
}

TEST(Executor, RefusesWithTheValuesAndTheWayOut) {
  const Problem problem(documents({64}), {.causal = true}), other(documents({65}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 2);
  const Layouts striped = make_layouts(LayoutKind::striped, problem, 2);
  expect_refusal([&] { make_schedule(problem, layouts, 0, {3, 2}); }, {"3 query heads over 2"});
  expect_refusal([&] { make_schedule(problem, layouts, 0, {2, 2}, {.head_groups = 3}); }, {"head_groups 3"});
  expect_refusal(
      [&] { make_schedule(problem, layouts, 0, {4, 2}, {.kind = ScheduleKind::all_to_all, .head_groups = 5}); },
      {"head_groups 5 with 4 query heads", "from 1 to 4"});
  expect_refusal([&] { make_schedule(problem, layouts, 0, {4, 2}, {.kind = ScheduleKind::hybrid, .head_groups = 3}); },
                 {"head_groups 3 with 2 K/V heads", "from 1 to 2"});
  expect_refusal([&] { make_schedule(problem, striped, 0, {1, 1}, {.key_order = KeyOrder::sequence}); },
                 {"KeyOrder::rank"});
  expect_refusal([&] { make_schedule(other, layouts, 0, {1, 1}); }, {"same packing"});
  run_ranks(2, [&](Communicator& comm) {
    const auto schedule_of = [&](Index rank) { return make_schedule(problem, layouts, rank, {1, 1}); };
    expect_refusal([&] { Executor(comm, schedule_of(1 - comm.rank())); }, {"the communicator"});
    expect_refusal([&] { Executor(comm, schedule_of(comm.rank()), {.kernel = "fast"}); }, {"no kernel 'fast'"});
    Executor executor(comm, schedule_of(comm.rank()));
    const auto call = [&](Index rows, Index heads) {
      executor.forward(RankTensors<>(rows, heads, 8, 1).args().forward);
    };
    expect_refusal([&] { call(31, 1); }, {"q has 31 rows"});
    expect_refusal([&] { call(32, 2); }, {"q has 2 heads"});
    call(32, 1);  // usable after all that
  });
}

TEST(Checked, RightResultsStayRight) {
  const Problem problem(documents({37, 0, 5, 64, 1}, 16), {.causal = true});
  const RanksProblem p{.problem = problem, .heads_q = 4, .heads_k = 2, .dim_qk = 24, .dim_v = 16, .sink = true};
  RanksInput in(p);
  const Exact want(p, in);
  for (const ScheduleOptions& options : all_schedules(2, true, 4)) {
    const Layouts layouts = make_layouts(LayoutKind::dual_chunk, problem, 4);
    const RanksResult plain = run_on_ranks(p, in, layouts, options);
    const RanksResult r = run_on_ranks(p, in, layouts, options, {.checked = true});
    EXPECT_LT(worst_error(r, want, true), 2e-6);
    EXPECT_EQ(r.dk.bytes, plain.dk.bytes);
    EXPECT_GT(r.forward[0].bytes_sent, plain.forward[0].bytes_sent);  // and without it nothing is paid
  }
}

// Every rank gets the same words.
TEST(Checked, NamesTheRanksThatDiffer) {
  const auto problem_of = [](bool odd) { return Problem(documents({odd ? 60 : 64, 64}, 8), {.causal = true}); };
  const auto mask_of = [](bool odd) { return Problem(documents({64, 64}, 8), {.causal = true, .left = odd ? 3 : 4}); };
  std::vector<std::string> texts(4);
  const auto differ = [&](const std::function<void(Communicator&)>& body) {
    run_ranks(4, [&](Communicator& comm) { texts[at(comm.rank())] = error_of([&] { body(comm); }); });
    for (const std::string& t : texts) EXPECT_EQ(t, texts[0]);
    return texts[0];
  };
  const auto make = [](Communicator& comm, const Problem& problem, const Heads& heads, const ScheduleOptions& options) {
    const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, comm.ranks());
    return Executor(comm, make_schedule(problem, layouts, comm.rank(), heads, options), {.checked = true});
  };
  EXPECT_EQ(differ([&](Communicator& comm) { make(comm, problem_of(comm.rank() == 2), {2, 2}, {}); }),
            "packing: rank 2 differs from ranks 0, 1, 3; give every rank the same problem, options and arguments");
  EXPECT_EQ(differ([&](Communicator& comm) { make(comm, mask_of(comm.rank() % 2 == 1), {2, 2}, {}); }).substr(0, 46),
            "mask: ranks 1, 3 differ from ranks 0, 2; give ");
  EXPECT_EQ(
      differ([&](Communicator& comm) { make(comm, mask_of(false), {comm.rank() == 0 ? 4 : 2, 2}, {}); }).substr(0, 40),
      "heads: rank 0 differs from ranks 1, 2, 3");
  EXPECT_EQ(differ([&](Communicator& comm) {
              make(comm, mask_of(false), {2, 2}, {.head_groups = comm.rank() == 3 ? 2 : 1});
            }).substr(0, 43),
            "schedule: rank 3 differs from ranks 0, 1, 2");
  EXPECT_EQ(differ([&](Communicator& comm) {
              Executor executor = make(comm, mask_of(false), {2, 2}, {});
              const RankTensors<> t(32, 2, 8, 1);
              ExecutorForwardArgs args = t.args().forward;
              args.attention.scale = comm.rank() == 1 ? 0.5 : 0.25;
              executor.forward(args);
            }).substr(0, 40),
            "attention (scale, softcap, sink, head_ma");
}

// The observer is called from inside: whoever calls the executor there, from another thread or this one, is refused.
TEST(Executor, ACallInsideAnotherIsRefused) {
  const Problem problem(documents({64}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::contiguous, problem, 1);
  run_ranks(1, [&](Communicator& comm) {
    const RankTensors<> t(64, 2, 8, 1);
    const ExecutorForwardArgs args = t.args().forward;
    std::unique_ptr<Executor> executor;
    std::vector<std::string> errors;
    const auto again = [&] { errors.push_back(error_of([&] { executor->forward(args); })); };
    const auto observer = [&](const StepEvent&) {
      again();
      std::thread(again).join();
    };
    executor = std::make_unique<Executor>(comm, make_schedule(problem, layouts, 0, {2, 2}),
                                          ExecutorOptions{.observer = observer});
    executor->forward(args);
    executor->forward(args);  // the refused ones left nothing behind
    ASSERT_GE(errors.size(), 4u);
    for (const std::string& e : errors)
      expect_parts(e, {"a call of this executor began while another one", "executor of its own"});
  });
}

// Four threads on one executor, in bf16, where sums of dK and dV lie in its workspace: each call is the only one in it,
// and has the single thread's bits, or is refused.
TEST(Executor, BelongsToOneThreadAtATime) {
  const Problem problem(documents({100, 540}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::contiguous, problem, 1);
  for (const ScheduleKind kind : {ScheduleKind::all_gather, ScheduleKind::ring}) {
    run_ranks(1, [&](Communicator& comm) {
      Executor executor(comm, make_schedule(problem, layouts, 0, {2, 2}, {.kind = kind}));
      using One = RankTensors<>;
      std::deque<One> alone, mine;
      for (unsigned n = 0; n < 4; ++n) {
        mine.emplace_back(640, 2, 16, n, DType::bf16);
        alone.emplace_back(640, 2, 16, n, DType::bf16).run(executor);
      }
      std::atomic<int> right = 0, wrong = 0, refused = 0;
      std::vector<std::thread> threads;
      for (std::size_t n = 0; n < 4; ++n)
        threads.emplace_back([&, n] {
          for (int i = 0; i < (kSanitized ? 5 : 40); ++i) {
            if (!error_of([&] { mine[n].run(executor); }).empty()) {
              refused += 1;
              continue;
            }
            bool same = true;
            for (const auto tensor : {&One::out, &One::dq, &One::dk, &One::dv})
              same = same && (mine[n].*tensor).bytes == (alone[n].*tensor).bytes;
            (same ? right : wrong) += 1;
          }
        });
      for (std::thread& thread : threads) thread.join();
      EXPECT_EQ(wrong, 0) << name(kind);
      EXPECT_EQ(right + refused, kSanitized ? 20 : 160);
    });
  }
}

TEST(Executor, ARankThatThrowsEndsTheOthers) {
  const Problem problem(documents({64, 64}, 8), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::dual_chunk, problem, 4);
  for (const ScheduleKind kind : schedule_kinds()) {
    const std::string what = error_of([&] {
      run_ranks(4, [&](Communicator& comm) {
        Executor executor(comm, make_schedule(problem, layouts, comm.rank(), {4, 4}, {.kind = kind}),
                          {.observer = [&](const StepEvent&) {
                            if (comm.rank() == 2) throw Error("this rank has had enough", "leave it alone");
                          }});
        const RankTensors<> t(layouts.q.rows(), 4, 8, 1);
        for (int i = 0; i < 100; ++i) executor.forward(t.args().forward);
      });
    });
    EXPECT_EQ(what, "rank 2: this rank has had enough; leave it alone") << name(kind);
  }
}

}  // namespace
}  // namespace weft::test
