// Rows that enter a node once: bytes of each level, counted from the law by brute force.
#include <gtest/gtest.h>

#include "check/definition.h"
#include "check/moves.h"
#include "index.h"
#include "refusal.h"
#include "weft/schedule.h"

namespace weft {
namespace {

constexpr Index kNode = 4, kTwoNodes = 8;

struct Question {
  explicit Question(check::Case given) : placed(std::move(given)) {}
  check::Case placed;
  Problem problem = check::problem_of(placed);
  Layouts layouts = check::layouts_of(placed, problem);

  std::vector<Schedule> schedules(const ScheduleOptions& options) const {
    std::vector<Schedule> all;
    for (Index r = 0; r < placed.ranks; ++r) all.push_back(make_schedule(problem, layouts, r, {2, 1}, options));
    return all;
  }
  // Rows of K and V that a rank of another node sees, once for each such node.
  Index foreign_rows(Index node) const {
    const check::Definition law(placed);
    Index rows = 0;
    for (Index owner = 0; owner < placed.ranks; ++owner)
      for (const Index k : layouts.k.tokens(owner))
        for (Index n = 0; n < placed.ranks / node; ++n) {
          if (k == kNoToken || n == owner / node) continue;
          bool seen = false;
          for (Index r = n * node; r < (n + 1) * node; ++r)
            for (const Index q : layouts.q.tokens(r)) seen = seen || (q != kNoToken && law.visible(q, k));
          rows += seen ? 1 : 0;
        }
    return rows;
  }
};

std::vector<Question> questions() {
  std::vector<Question> all;
  const std::vector<Index> offsets = {0, 37, 37, 140, 192};
  for (const Mask& mask : {Mask{.causal = true}, Mask{.causal = true, .left = 9}, Mask{}, Mask{.left = 5, .right = 4}})
    for (const LayoutKind layout : {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped})
      all.emplace_back(check::Case{.q = {.cu_seqlens = offsets}, .mask = mask, .layout = layout, .ranks = kTwoNodes});
  return all;
}

constexpr TensorShape kShape{.dtype = DType::bf16, .dim_qk = 24, .dim_v = 16};
constexpr Index kKvBytes = 40 * 2, kGradientBytes = 40 * 4;  // of a row

Traffic sum(const std::vector<Schedule>& all, Pass pass, Index node = 0) {
  Traffic total;
  for (const Schedule& s : all) total += traffic(s, kShape, pass, node);
  return total;
}

TEST(TwoHops, ExactMovesDistinctRowsBetweenNodes) {
  for (const Question& question : questions()) {
    const Index rows = question.foreign_rows(kNode);
    for (const Index stages : {1, 2, 3, 8}) {
      const auto all = question.schedules({.kind = ScheduleKind::exact, .stages = stages, .node = kNode});
      const Traffic forward = sum(all, Pass::forward), backward = sum(all, Pass::backward);
      EXPECT_EQ(forward.bytes_sent_between, rows * kKvBytes);
      EXPECT_EQ(forward.bytes_received_between, rows * kKvBytes);
      EXPECT_EQ(backward.bytes_sent_between, rows * (kKvBytes + kGradientBytes));
      EXPECT_EQ(backward.bytes_received_between, rows * (kKvBytes + kGradientBytes));
      EXPECT_EQ(forward.bytes_sent, forward.bytes_received);
      EXPECT_EQ(backward.messages_sent, backward.messages_received);
    }
  }
}

TEST(TwoHops, AllGatherMovesAFourthBetweenNodes) {
  for (const Question& question : questions()) {
    for (const KeyOrder order : {KeyOrder::rank, KeyOrder::automatic}) {
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        const Traffic flat = sum(question.schedules({.key_order = order}), pass, kNode);
        const Traffic hops = sum(question.schedules({.key_order = order, .node = kNode}), pass);
        EXPECT_EQ(hops.bytes_sent_between * kNode, flat.bytes_sent_between);
        EXPECT_EQ(hops.bytes_received_between * kNode, flat.bytes_received_between);
        EXPECT_GT(hops.bytes_sent_between, 0);
        // Every rank still gets every row once, by whichever hop.
        EXPECT_EQ(hops.bytes_received, flat.bytes_received);
      }
    }
  }
}

// A ring over nodes moves what a gather moves, node by node.
TEST(TwoHops, RingOverNodes) {
  for (const Question& question : questions()) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const auto all = question.schedules({.kind = ScheduleKind::ring, .node = 2});
      ASSERT_EQ(all.front().steps.size(), 4U);
      const Traffic gathered = sum(question.schedules({.key_order = KeyOrder::rank, .node = 2}), pass);
      const Traffic got = sum(all, pass);
      EXPECT_EQ(got.bytes_received, gathered.bytes_received);
      EXPECT_EQ(got.bytes_sent_between, gathered.bytes_sent_between);
      EXPECT_EQ(got.bytes_received_between, gathered.bytes_received_between);
    }
  }
}

// Message by message: no row comes into a node twice, and a schedule that lets one do so is noticed.
TEST(TwoHops, NoRowCrossesTwice) {
  for (const Question& question : questions()) {
    for (const ScheduleOptions& options : {ScheduleOptions{.kind = ScheduleKind::exact, .node = kNode},
                                           ScheduleOptions{.kind = ScheduleKind::exact, .stages = 1, .node = 2},
                                           ScheduleOptions{.kind = ScheduleKind::ring, .node = kNode},
                                           ScheduleOptions{.kind = ScheduleKind::ring, .node = 2},
                                           ScheduleOptions{.key_order = KeyOrder::rank, .node = kNode}}) {
      const auto entered = [&](const std::vector<Schedule>& all) {
        check::Moves moves(all);
        std::string fault;
        for (std::size_t n = 0; n < all.front().steps.size(); ++n) moves.step(n, fault);
        EXPECT_EQ(fault, "") << words(options);
        return *std::max_element(moves.entered().begin(), moves.entered().end());
      };
      std::vector<Schedule> all = question.schedules(options);
      EXPECT_LE(entered(all), 1) << words(options);
      for (Schedule& s : all) s.steps.push_back(s.steps.back());
      EXPECT_EQ(entered(all), 2) << words(options);
    }
  }
}

TEST(TwoHops, CountsLevelsOfAnySchedule) {
  const Question question = questions().front();
  for (const ScheduleKind kind : schedule_kinds()) {
    const auto all = question.schedules({.kind = kind});
    const Traffic one = sum(all, Pass::backward), two = sum(all, Pass::backward, kNode);
    EXPECT_EQ(one.bytes_sent_between, 0);
    EXPECT_EQ(one.bytes_sent, two.bytes_sent);
    EXPECT_EQ(two.bytes_sent_between, two.bytes_received_between);
    EXPECT_LE(two.bytes_sent_between, two.bytes_sent);
    EXPECT_GT(two.bytes_sent_between, 0) << name(kind);
  }
  expect_refusal([&] { sum(question.schedules({}), Pass::forward, 3); }, {"nodes of 3", "8 ranks"});
}

TEST(TwoHops, Refusals) {
  const Question question = questions().front();
  for (const ScheduleKind kind : {ScheduleKind::all_gather, ScheduleKind::ring, ScheduleKind::exact})
    for (const Index node : {3, 16})
      expect_refusal([&] { question.schedules({.kind = kind, .node = node}); },
                     {"nodes of " + std::to_string(node), "8 ranks", "divides"});
  expect_refusal(
      [&] {
        question.schedules({.kind = ScheduleKind::hybrid, .ulysses = 4, .outer = ScheduleKind::all_gather, .node = 3});
      },
      {"ulysses = 4", "nodes of 3"});
  // A schedule ignores an option that it does not have.
  EXPECT_NO_THROW(question.schedules({.kind = ScheduleKind::all_to_all, .node = 3}));
}

// With one node there is one hop, and nothing crosses.
TEST(TwoHops, OneNodeIsOneHop) {
  const Question question = questions().front();
  for (const ScheduleKind kind : {ScheduleKind::all_gather, ScheduleKind::exact}) {
    const auto all = question.schedules({.kind = kind, .node = kTwoNodes});
    for (const Step& step : all.front().steps) EXPECT_FALSE(step.move && step.move->relay);
    EXPECT_EQ(sum(all, Pass::backward).bytes_sent_between, 0);
  }
}

}  // namespace
}  // namespace weft
