// Ranks over MPI: each rank runs this program (tools/mpirun.sh -np 3 mpi_test), and all run the same tests.
#include "weft/mpi.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <string>

#include <gtest/gtest.h>

#include "comm/letters.h"
#include "disagreements.h"
#include "prepare/kv_sequences.h"
#include "ranks.h"
#include "refusal.h"

namespace weft::test {
namespace {

Communicator* world = nullptr;

// ---- what is moved

TEST(Mpi, RandomExchanges) {
  for (std::uint64_t seed = 0; seed < 200 && !HasFailure(); ++seed) {
    Random random(seed);
    exchange_letters(*world, random_calls(random, world->ranks()), seed);
  }
}

TEST(Mpi, LongMessagesGoInPieces) {
  const std::unique_ptr<Communicator> small = mpi_world({.largest = 37});
  for (std::uint64_t seed = 0; seed < 50 && !HasFailure(); ++seed) {
    Random random(seed);
    exchange_letters(*small, random_calls(random, small->ranks()), seed);
  }
}

TEST(Mpi, DISABLED_MoreThanAnIntCounts) {  // 5 GiB on this machine: make soak
  if (world->ranks() != 2) GTEST_SKIP();
  const std::size_t count = (std::size_t{1} << 29) + 12345;  // of 4 bytes
  std::vector<std::uint32_t> numbers(count);
  if (world->rank() == 0) std::iota(numbers.begin(), numbers.end(), 7u);
  const Message message{.peer = 1 - world->rank(), .blocks = {block(numbers)}};
  if (world->rank() == 0) world->exchange({message}, {}).wait();
  if (world->rank() == 1) world->exchange({}, {message}).wait();
  std::uint32_t next = 7;
  EXPECT_TRUE(std::all_of(numbers.begin(), numbers.end(), [&](std::uint32_t x) { return x == next++; }));
}

TEST(Mpi, Collectives) {
  Communicator& c = *world;
  const Index ranks = c.ranks(), me = c.rank();
  c.reset_traffic();
  const auto count = [](Index rank) { return rank == 1 ? 0 : 50000 + rank; };  // too long to go without a receiver
  std::vector<float> mine = values(count(me), 1, me), sum(at(count(me)), std::nanf(""));
  std::vector<std::vector<float>> all, parts, to, from;
  for (Index rank = 0; rank < ranks; ++rank) {
    all.emplace_back(at(count(rank)));
    parts.push_back(values(count(rank), 2, me, rank));
    to.push_back(values(me + 2 * rank, 3, me, rank));
    from.emplace_back(at(rank + 2 * me));
  }
  Request gather = c.all_gather(block(mine), blocks(all));
  Request reduce = c.reduce_scatter(blocks(parts), block(sum));
  Request swap = c.all_to_all(blocks(to), blocks(from));
  if (me % 2 == 0) swap.wait();  // in any order
  reduce.wait();
  gather.wait();
  swap.wait();
  std::vector<float> expected = values(count(me), 2, 0, me);
  Index others = 0, sent = 0;
  for (Index rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(all[at(rank)], values(count(rank), 1, rank));
    EXPECT_EQ(from[at(rank)], values(rank + 2 * me, 3, rank, me));
    for (std::size_t i = 0; rank > 0 && i < expected.size(); ++i)
      expected[i] += value(2, rank, me, static_cast<Index>(i));
    if (rank == me) continue;
    others += count(rank) + count(me) + rank + 2 * me;
    sent += count(me) + count(rank) + me + 2 * rank;
  }
  EXPECT_EQ(sum, expected);  // added in the order of ranks: the same bits
  EXPECT_EQ(c.traffic().bytes_received, 4 * others);
  EXPECT_EQ(c.traffic().bytes_sent, 4 * sent);

  double numbers[2] = {static_cast<double>(me), 1};
  c.all_reduce(numbers, DType::f64, 2, Reduce::sum).wait();
  EXPECT_EQ(numbers[0], static_cast<double>(ranks * (ranks - 1)) / 2);
  EXPECT_EQ(numbers[1], static_cast<double>(ranks));
  float most = static_cast<float>(-me);
  c.all_reduce(&most, DType::f32, 1, Reduce::max).wait();
  EXPECT_EQ(most, 0);
}

TEST(Mpi, Rings) {
  Communicator& c = *world;
  const Index next = (c.rank() + 1) % c.ranks(), last = (c.rank() + c.ranks() - 1) % c.ranks();
  std::vector<float> held = values(30000, 4, c.rank()), coming(held.size());
  for (Index step = 1; step <= c.ranks(); ++step) {
    c.send_receive(next, block(held), last, block(coming)).wait();
    std::swap(held, coming);
    EXPECT_EQ(held, values(30000, 4, (c.rank() + c.ranks() * 2 - step) % c.ranks()));
  }
}

TEST(Mpi, Splits) {
  const Index me = world->rank(), big = Index{1} << 40;
  const std::unique_ptr<Communicator> part = world->split(me % 2 == 0 ? -7 : big, -me * big);  // not what an int holds
  EXPECT_EQ(part->name(), "mpi");
  EXPECT_EQ(part->ranks(), (world->ranks() + 1 - me % 2) / 2);
  EXPECT_EQ(part->rank(), part->ranks() - 1 - me / 2);
  double sum = static_cast<double>(me);
  part->all_reduce(&sum, DType::f64, 1, Reduce::sum).wait();
  double expected = 0;
  for (Index rank = me % 2; rank < world->ranks(); rank += 2) expected += static_cast<double>(rank);
  EXPECT_EQ(sum, expected);
  const std::unique_ptr<Communicator> alone = part->split(part->rank(), 0);
  EXPECT_EQ(alone->ranks(), 1);
}

TEST(Mpi, AnyCommunicatorOfTheCallers) {
  expect_refusal([] { mpi_world({.time_limit = 0}); }, {"time limit of 0"});
  expect_refusal([] { mpi_world({.largest = 0}); }, {"0 bytes at most", "1 to"});
  const MpiSession again;  // not the first: neither initialises nor finalises
  double one = 1;
  mpi_world()->all_reduce(&one, DType::f64, 1, Reduce::sum).wait();
  EXPECT_EQ(one, static_cast<double>(world->ranks()));
}

// ---- sides that do not agree; on a world of their own, because what is left over is lost

TEST(Mpi, SizesThatDiffer) {
  if (world->ranks() < 2) GTEST_SKIP();
  for (const Index count : {10, 100000}) {  // goes at once, and waits for its receiver
    for (const Index more : {-1, 1}) {      // the receiver expects less, more
      const std::unique_ptr<Communicator> c = mpi_world({.time_limit = 20});
      std::vector<float> sent(at(count)), received(at(count + more));
      if (c->rank() == 0) c->exchange({{1, {block(sent)}}}, {}).wait();
      if (c->rank() == 1) {
        expect_refusal([&] { c->exchange({}, {{0, {block(received)}}}).wait(); },
                       {"call 0: rank 0 sends ", std::to_string(count * 4) + " bytes to rank 1, which receives ",
                        std::to_string((count + more) * 4)});
      }
    }
  }
}

TEST(Mpi, MessagesToItselfMustAgree) {
  std::vector<float> a(3), b(4);
  const Index me = world->rank();
  expect_refusal([&] { world->exchange({{me, {block(a)}}}, {{me, {block(b)}}}).wait(); }, {"sends 12 bytes to itself"});
  expect_refusal([&] { world->exchange({}, {{me, {block(b)}}}).wait(); }, {"receives more messages from itself"});
  expect_refusal([&] { world->exchange({{me, {block(a)}}}, {}).wait(); }, {"sends more messages to itself"});
}

TEST(Mpi, WaitsNoLongerThanItsLimit) {
  if (world->ranks() < 2) GTEST_SKIP();
  const std::unique_ptr<Communicator> c = mpi_world({.time_limit = 0.2});
  std::vector<float> received(10);
  if (c->rank() == 0) {
    expect_refusal([&] { c->exchange({}, {{1, {block(received)}}}).wait(); },
                   {"rank 0 waited 0.2 seconds in call 0 for rank 1"});
  }
}

TEST(Mpi, ReceivesAreTakenBack) {
  Communicator& c = *world;
  const Index next = (c.rank() + 1) % c.ranks(), last = (c.rank() + c.ranks() - 1) % c.ranks();
  std::vector<float> sent = values(10, 1, 0), received(10, 5.0f);
  if (c.ranks() == 1) GTEST_SKIP();
  for (int i = 0; i < 20; ++i) {
    {
      const Request forgotten = c.exchange({}, {{last, {block(received)}}});
    }
    EXPECT_EQ(received, std::vector<float>(10, 5.0f));
  }
  {
    const Request forgotten = c.exchange({{next, {block(sent)}}}, {{last, {block(received)}}});
  }
  double one = 1;
  c.all_reduce(&one, DType::f64, 1, Reduce::sum).wait();  // nothing of it is left in the way
  EXPECT_EQ(one, static_cast<double>(c.ranks()));
}

// ---- the executor

// Every rank gets messages of every other one, so each sees by itself who differs and in what.
TEST(Mpi, RanksThatDisagreeAreTold) {
  if (world->ranks() < 2) GTEST_SKIP();
  for (const Disagreement& way : disagreements()) {
    SCOPED_TRACE(way.name);
    // Of more than two, one that sees another size gives up while a third still waits for it, and MPI is lost.
    const bool same_sizes = way.said == "the mask" || way.said == "the attention" || way.name == "layout";
    if (world->ranks() > 2 && !same_sizes) continue;
    const std::unique_ptr<Communicator> c = mpi_world({.time_limit = 20});
    const ScheduleKind kind = way.swapped ? ScheduleKind::all_to_all : ScheduleKind::all_gather;
    const RankTask task = task_of(way, {.kind = kind}, c->rank(), 1);
    const std::string told = error_of([&] { run_task(*c, task); });
    expect_parts(told, {way.said});
    if (c->ranks() > 2) expect_parts(told, {"rank 1 "});
  }
}

std::vector<ScheduleOptions> schedules(Index ranks) {
  std::vector<ScheduleOptions> all = {
      {.kind = ScheduleKind::all_gather}, {.kind = ScheduleKind::all_gather, .head_groups = 2},
      {.kind = ScheduleKind::ring},       {.kind = ScheduleKind::ring, .ranks_per_step = 1},
      {.kind = ScheduleKind::all_to_all}, {.kind = ScheduleKind::all_to_all, .head_groups = 2},
      {.kind = ScheduleKind::exact},      {.kind = ScheduleKind::mesh, .ranks_per_step = 1}};
  for (const Index inside : {1, 2, 3, 4})
    if (ranks % inside == 0) all.push_back({.kind = ScheduleKind::hybrid, .ulysses = inside});
  if (ranks % 2 == 0) {
    all.push_back({.kind = ScheduleKind::all_gather, .head_groups = 2, .node = 2});
    all.push_back({.kind = ScheduleKind::exact, .node = 2});
    all.push_back({.kind = ScheduleKind::ring, .node = 2});
    all.push_back({.kind = ScheduleKind::hybrid, .head_groups = 2});
  }
  return all;
}

double largest_difference(const check::Tensor& a, const check::Tensor& b) {
  const std::vector<double> x = to_f64(a.view), y = to_f64(b.view);
  double most = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (x[i] == y[i] || (std::isnan(x[i]) && std::isnan(y[i]))) continue;
    const double error = std::abs(x[i] - y[i]);
    if (!(error <= most)) most = error;  // NaN stays
  }
  return most;
}

// This rank's rows of both. Rows that no token has are NaN in both.
double difference(const Layout& layout, check::Tensor& got, check::Tensor& want) {
  check::Tensor a(got.view.dtype, layout.rows(), got.view.heads, got.view.dim),
      b(got.view.dtype, layout.rows(), got.view.heads, got.view.dim);
  layout.shard(world->rank(), got.rows(), a.rows());
  layout.shard(world->rank(), want.rows(), b.rows());
  return largest_difference(a, b);
}

TEST(Mpi, ExecutorEqualsOneRank) {
  const std::vector<Index> lengths{37, 0, 5, 64, 1};
  const Index ranks = world->ranks();
  for (const Mask& mask : {Mask{.causal = true}, Mask{.left = 7, .right = 3}}) {
    const Problem problem(Stream::from_lengths(lengths).padded_to(24), mask);  // 2 x 1, 2, 3 or 4 ranks
    const RanksProblem p{.problem = problem, .heads_q = 4, .heads_k = 2, .dim_qk = 24, .dim_v = 16, .sink = true};
    RanksInput in(p);
    RanksResult want = run_on_ranks(p, in, make_layouts(LayoutKind::contiguous, problem, 1), {});
    for (const LayoutKind kind : {LayoutKind::dual_chunk, LayoutKind::zigzag, LayoutKind::striped}) {
      const Layouts layouts = make_layouts(kind, problem, ranks);
      for (const ScheduleOptions& options : schedules(ranks)) {
        for (const bool checked : {false, true}) {
          SCOPED_TRACE(testing::Message() << name(kind) << " " << name(options.kind) << " inside " << options.ulysses);
          RanksResult got = empty_result(p, ranks);
          std::mutex mutex;
          run_one_rank(*world, p, in, layouts, options, {.checked = checked}, got, mutex);
          EXPECT_LT(difference(layouts.q, got.out, want.out), 1e-5);
          EXPECT_LT(difference(layouts.q, got.lse, want.lse), 1e-5);
          EXPECT_LT(difference(layouts.q, got.dq, want.dq), 1e-5);
          EXPECT_LT(difference(layouts.k, got.dk, want.dk), 1e-5);
          EXPECT_LT(difference(layouts.k, got.dv, want.dv), 1e-5);
          EXPECT_LT(largest_difference(got.max_logit, want.max_logit), 1e-5);
          EXPECT_LT(largest_difference(got.dsink, want.dsink), 1e-5);
          if (checked) continue;
          const Schedule s = make_schedule(problem, layouts, world->rank(), {4, 2}, options);
          const TensorShape shape{.dim_qk = 24, .dim_v = 16, .max_logit = true, .dsink = true};
          EXPECT_EQ(got.forward[at(world->rank())], traffic(s, shape, Pass::forward));
          EXPECT_EQ(got.backward[at(world->rank())], traffic(s, shape, Pass::backward));
        }
      }
    }
  }
}

// Rank 1 leaves out a layer and makes another twice: all ranks are told, and go on.
TEST(Mpi, CheckedRanksOutOfStep) {
  const Index ranks = world->ranks();
  if (ranks == 1) GTEST_SKIP() << "nobody to be out of step with";
  const bool odd = world->rank() == 1;
  const Problem problem(Stream::from_lengths(std::vector<Index>{24, 24}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, ranks);
  const Index rows = layouts.q.rows();
  std::vector<std::vector<float>> x, out(4, std::vector<float>(at(rows * 8)));
  for (Index n = 0; n < 4; ++n) x.push_back(values(rows * 8, 9, n, world->rank()));
  const auto layers = [&](Executor& executor, const std::vector<Index>& order) {
    for (const Index n : order) {
      const TensorView view = thd(x[at(n)].data(), DType::f32, rows, 1, 8);
      const TensorView to = thd(out[at(n)].data(), DType::f32, rows, 1, 8);
      executor.forward({.q = view, .k = view, .v = view, .out = to, .layer = n});
    }
  };
  const std::vector<Index> usual{0, 1, 2, 3}, skips{0, 1, 3, 3}, twice{0, 1, 1, 2};
  for (const ScheduleKind kind : {ScheduleKind::all_gather, ScheduleKind::ring, ScheduleKind::exact}) {
    Executor executor(*world, make_schedule(problem, layouts, world->rank(), {1, 1}, {.kind = kind}),
                      {.checked = true});
    layers(executor, usual);
    // Of two ranks neither is most.
    const std::string others = ranks == 2 ? "rank 0 is" : ranks == 3 ? "ranks 0, 2 are" : "ranks 0, 2, 3 are";
    expect_refusal([&] { layers(executor, odd ? skips : usual); },
                   {"rank 1 is at the forward of layer 3", others + " at the forward of layer 2"});
    expect_refusal([&] { layers(executor, odd ? twice : usual); },
                   {"rank 1 is at the forward of layer 1", others + " at the forward of layer 2"});
    layers(executor, usual);
  }
}

#ifndef WEFT_WITH_CUDA
TEST(Mpi, RefusesMemoryOfGpusInABuildWithoutThem) {
  expect_refusal([] { world->on({.kind = DeviceKind::cuda}); }, {"mpi", "without CUDA", "WEFT_CUDA=ON"});
}
#endif

// ---- the K/V buffer

TEST(Mpi, KvBufferEqualsOneRank) {
  const Setting one{.lengths = {37, 0, 5, 64, 1}, .mask = {.causal = true, .left = 20}, .micros = 6, .sink = true};
  Tensors want(one);
  run_all(one, want);
  for (const bool drop : {false, true}) {
    for (const bool ahead : {false, true}) {
      Setting s = one;
      s.ranks = world->ranks();
      s.micros = 3;
      s.drop = drop;
      s.ahead = ahead;
      const MicroSequences micros = micros_of(s);
      Tensors got(s);
      KvBuffer buffer(*world, options_of(s, micros));
      run_sequence(s, micros, buffer, *world, got);
      for (Index m = 0; m < s.micros; ++m) {
        Range rows = micros.rows(world->rank(), m);
        rows.end = min_of(rows.end, 107);  // the real tokens
        for (const auto& [a, b] : {std::pair{&got.out, &want.out},
                                   {&got.lse, &want.lse},
                                   {&got.dq, &want.dq},
                                   {&got.dk, &want.dk},
                                   {&got.dv, &want.dv}}) {
          const std::vector<double> x = to_f64(rows_of(a->view, rows)), y = to_f64(rows_of(b->view, rows));
          for (std::size_t i = 0; i < x.size(); ++i) ASSERT_NEAR(x[i], y[i], 1e-5);
        }
      }
    }
  }
}

// Rank 0 prints as usual, the others what failed.
struct Failures : testing::EmptyTestEventListener {
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed())
      std::fprintf(stderr, "rank %td: %s:%d: %s\n", world->rank(), result.file_name(), result.line_number(),
                   result.message());
  }
};

}  // namespace
}  // namespace weft::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::GTEST_FLAG(catch_exceptions) = false;  // a rank that throws ends the job: the others wait for it
  double failed = 0;
  weft::run_mpi(
      [&](weft::Communicator& c) {
        weft::test::world = &c;
        testing::TestEventListeners& listeners = testing::UnitTest::GetInstance()->listeners();
        if (c.rank() != 0) {
          delete listeners.Release(listeners.default_result_printer());
          listeners.Append(new weft::test::Failures);
        }
        failed = RUN_ALL_TESTS();
        c.all_reduce(&failed, weft::DType::f64, 1, weft::Reduce::sum).wait();
      },
      {.time_limit = 60});
  return failed == 0 ? 0 : 1;
}
