// Schedules as values: names, and what make_schedule refuses. What they compute: by_schedule_test, executor_test.
#include "weft/schedule.h"

#include <set>

#include <gtest/gtest.h>

#include "index.h"
#include "refusal.h"
#include "schedule/description.h"
#include "weft/choose.h"
#include "weft/simulate.h"

namespace weft {
namespace {

TEST(Schedule, NamesGoBothWays) {
  for (const KeyOrder order : {KeyOrder::automatic, KeyOrder::rank, KeyOrder::sequence})
    EXPECT_EQ(key_order(name(order)), order) << name(order);
  for (const ScheduleKind kind : schedule_kinds()) EXPECT_EQ(schedule_kind(name(kind)), kind) << name(kind);
}

TEST(Schedule, Refusals) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{64}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 2);
  for (const ScheduleKind kind : schedule_kinds())
    for (const Index rank : {-1, 2})
      expect_refusal([&] { make_schedule(problem, layouts, rank, {2, 2}, {.kind = kind}); },
                     {"rank " + std::to_string(rank) + " of 2", "ranks count from 0"});
  for (const Index head : {-1, 2}) {
    const std::vector<Index> map{0, head};
    expect_refusal([&] { make_schedule(problem, layouts, 0, {2, 2, map}); },
                   {"names K/V head " + std::to_string(head) + " of 2"});
  }
  expect_refusal([&] { make_schedule(problem, layouts, 0, {2, 2}, {.kind = ScheduleKind::ring, .ranks_per_step = 0}); },
                 {"ranks_per_step = 0", "at least 1"});
  expect_refusal([&] { make_schedule(problem, layouts, 0, {Index{1} << 40, 1}); },
                 {"heads 1099511627776:1", "at most"});
}

// It holds all keys: nothing is copied into a buffer, and no gradients are brought home.
TEST(Schedule, OneRankMovesNothing) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{40, 24}), {.causal = true});
  for (const LayoutKind layout : {LayoutKind::zigzag, LayoutKind::striped, LayoutKind::balanced, LayoutKind::placed}) {
    for (const ScheduleKind kind : schedule_kinds()) {
      ScheduleOptions options{.kind = kind};
      if (kind == ScheduleKind::hybrid) options.ulysses = 1;
      const Schedule s = make_schedule(problem, make_layouts(layout, problem, 1), 0, {2, 2}, options);
      EXPECT_FALSE(s.swap.has_value()) << name(kind);
      ASSERT_EQ(s.steps.size(), 1U) << name(kind);
      EXPECT_FALSE(s.steps[0].move.has_value()) << name(kind);
    }
  }
}

// Every query head is attended by one rank of a group, in one head group, with its own K/V head; what a step is about
// are the heads of its group.
TEST(Schedule, HeadGroupsHoldEveryHeadOnce) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{40, 24}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 4);
  const std::vector<Index> map = {2, 0, 2, 1, 2, 0, 1};
  for (const auto& [q, k] : {std::pair<Index, Index>{8, 8}, {8, 2}, {12, 3}, {3, 3}, {7, 3}}) {
    const Heads heads{q, k, q == 7 ? std::span<const Index>(map) : std::span<const Index>()};
    for (const ScheduleOptions& options :
         {ScheduleOptions{.kind = ScheduleKind::all_to_all, .head_groups = 3},
          {.kind = ScheduleKind::hybrid, .head_groups = 2, .ulysses = 2},
          {.kind = ScheduleKind::hybrid, .head_groups = 2, .ulysses = 2, .outer = ScheduleKind::all_gather}}) {
      SCOPED_TRACE(testing::Message() << q << ":" << k << " " << words(options));
      std::vector<Index> times(at(q), 0);
      for (Index rank = 0; rank < 4; ++rank) {
        const Schedule s = make_schedule(problem, layouts, rank, heads, options);
        ASSERT_EQ(static_cast<Index>(s.swap->head_groups.size()), options.head_groups);
        const auto me = at(rank - s.swap->group.begin);
        Index last = -1;
        for (const Step& step : s.steps) {
          const HeadGroup& group = s.swap->head_groups[at(step.head_group)];
          EXPECT_EQ(step.heads_q.size(), group.q[me].size());
          EXPECT_EQ(step.heads_k.size(), group.k[me].size());
          if (group.q[me].size() > 0) {
            EXPECT_EQ(step.heads_q.begin + s.swap->heads_q[me].begin, group.q[me].begin);
            EXPECT_EQ(step.heads_k.begin + s.swap->heads_k[me].begin, group.k[me].begin);
          }
          ASSERT_GE(step.head_group, last);
          const bool first = step.head_group > last;
          last = step.head_group;
          for (Index h = group.q[me].begin; h < group.q[me].end && first; ++h) {
            ++times[at(h)];
            const Index uses = heads.map.empty() ? h / (q / k) : map[at(h)];
            EXPECT_TRUE(group.k[me].begin <= uses && uses < group.k[me].end) << "head " << h;
          }
        }
      }
      for (const Index n : times) EXPECT_EQ(n, 4 / make_schedule(problem, layouts, 0, heads, options).ulysses());
    }
  }
}

// Whatever the kind, and in every place that takes options.
TEST(Schedule, RefusesAbsurdOptions) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{64}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 2);
  const Machine& machine = machine_preset("h100-400g");
  const TensorShape shape{.dtype = DType::bf16, .dim_qk = 64, .dim_v = 64};
  for (const ScheduleKind kind : schedule_kinds()) {
    for (Index ScheduleOptions::* option :
         {&ScheduleOptions::stages, &ScheduleOptions::ranks_per_step, &ScheduleOptions::head_groups,
          &ScheduleOptions::ulysses, &ScheduleOptions::node}) {
      for (const Index value : {Index{0}, Index{-1}, Index{1} << 31, Index{1} << 62}) {
        ScheduleOptions options{.kind = kind};
        options.*option = value;
        const std::string said = std::to_string(value);
        expect_refusal([&] { make_schedule(problem, layouts, 0, {2, 2}, options); }, {said, "use at"});
        expect_refusal([&] { simulate({problem, layouts, 2, 2, options, shape}, machine, Pass::forward); },
                       {said, "use at"});
        expect_refusal(
            [&] {
              choose_schedule({.problem = problem, .heads_q = 2, .heads_k = 2, .shape = shape}, layouts, machine,
                              {.schedules = {options}});
            },
            {said, "use at"});
      }
    }
  }
  const Schedule s = make_schedule(problem, layouts, 0, {2, 2});
  for (const Index dim : {Index{-1}, Index{1} << 31, Index{1} << 62})
    expect_refusal([&] { traffic(s, {.dim_qk = 4, .dim_v = dim}, Pass::forward); }, {std::to_string(dim)});
}

Index rows_between(const std::vector<PeerRows>& all, Index peer) {
  Index rows = 0;
  for (const PeerRows& p : all)
    for (const Range& r : p.rows) rows += p.peer == peer ? r.size() : 0;
  return rows;
}

// Who holds whose keys is followed through the messages. Whatever ranks_per_step is, each rank meets each other once,
// what one sends is what the other expects, and all keys' gradients come home.
TEST(Schedule, RingsMeetEverybodyOnce) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{300, 70, 41}), {.causal = true});
  for (const Index ranks : {1, 2, 3, 5, 8}) {
    const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, ranks);
    const Index rows = layouts.k.rows();
    for (const Index ranks_per_step : {1, 2, 3, 4, 7, 100}) {
      std::vector<Schedule> all;
      for (Index r = 0; r < ranks; ++r)
        all.push_back(
            make_schedule(problem, layouts, r, {2, 1}, {.kind = ScheduleKind::ring, .ranks_per_step = ranks_per_step}));
      const auto of = [&](Index rank) -> const Schedule& { return all[at(rank)]; };
      std::vector<std::vector<Index>> held(all.size()), met(all.size());  // whose keys, in the buffer's order
      std::vector<Index> home(all.size(), 0);                             // rows of gradients
      for (std::size_t n = 0; n < of(0).steps.size(); ++n) {
        const std::vector<std::vector<Index>> before = held;
        for (Index r = 0; r < ranks; ++r) {
          std::vector<Index>& mine = held[at(r)];
          mine.clear();
          if (n == 0) mine = {r};
          const std::optional<Move>& move = of(r).steps[n].move;
          ASSERT_EQ(move.has_value(), n > 0);
          for (Index peer = 0; peer < ranks && move; ++peer) {
            EXPECT_EQ(rows_between(move->sends, peer), rows_between(of(peer).steps[n].move->receives, r));
            EXPECT_EQ(rows_between(move->home, peer), rows_between(of(peer).steps[n].move->back, r));
          }
          for (std::size_t p = 0; move && p < move->receives.size(); ++p) {
            const PeerRows& from = move->receives[p];
            EXPECT_EQ(from.rows.front().begin, static_cast<Index>(mine.size()) * rows);
            for (Index i = 0; i < from.rows.front().size() / rows; ++i) mine.push_back(before[at(from.peer)][at(i)]);
          }
          EXPECT_EQ(of(r).steps[n].key_rows, static_cast<Index>(mine.size()) * rows);
          for (const Index whose : mine) met[at(r)].push_back(whose);
          for (std::size_t i = 0; move && i < move->home.size(); ++i) {
            const PeerRows& to = move->home[i];
            EXPECT_EQ(mine[at(to.rows.front().begin / rows)], to.peer);
            home[at(to.peer)] += rows;
          }
        }
      }
      for (Index r = 0; r < ranks; ++r) {
        std::vector<Index> everybody(all.size());
        for (Index d = 0; d < ranks; ++d) everybody[at(d)] = (r - d + ranks) % ranks;
        EXPECT_EQ(met[at(r)], everybody);
        EXPECT_EQ(home[at(r)], min_of(ranks_per_step, ranks - 1) * rows);
        // K and V of all other ranks come once; gradients go as often, the own rank's never.
        const TensorShape shape{.dtype = DType::bf16, .dim_qk = 16, .dim_v = 8};
        const Traffic forward = traffic(of(r), shape, Pass::forward), backward = traffic(of(r), shape, Pass::backward);
        const Index kv = (ranks - 1) * rows * 24 * size_of(DType::bf16), f32 = (ranks - 1) * rows * 24 * 4;
        EXPECT_EQ(forward.bytes_received, kv);
        EXPECT_EQ(backward.bytes_received, kv + f32);
        EXPECT_EQ(backward.bytes_sent, kv + f32);
      }
    }
  }
}

// Each rank attends the queries of its group against the keys of its place in the groups: forward bytes are those of
// the formula in docs/schedules.md, with one side 1 those of a ring, with the other 1 no keys move at all.
TEST(Schedule, MeshesMoveWhatTheirFormulaSays) {
  constexpr Index kTokens = 960, kHeadsQ = 6, kHeadsK = 2, kDim = 16;
  const Problem problem(Stream::from_lengths(std::vector<Index>{kTokens}), {.causal = true});
  const TensorShape shape{.dtype = DType::bf16, .dim_qk = kDim, .dim_v = kDim};
  for (const auto& [a, b] : {std::pair<Index, Index>{1, 8}, {2, 4}, {4, 2}, {8, 1}, {3, 2}, {2, 3}}) {
    const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, a * b);
    const Index rows = layouts.k.rows(), u = rows * kHeadsK * kDim * size_of(DType::bf16), g = kHeadsQ / kHeadsK;
    for (Index rank = 0; rank < a * b; ++rank) {
      const Schedule s =
          make_schedule(problem, layouts, rank, {kHeadsQ, kHeadsK}, {.kind = ScheduleKind::mesh, .query_ranks = a});
      const Index forward = traffic(s, shape, Pass::forward).bytes_received;
      EXPECT_EQ(forward, (3 * g * (a - 1) + 2 * (b - 1)) * u + 8 * rows * kHeadsQ * (a - 1)) << a << "x" << b;
      // Q, dO and O there with the LSE, f32 dQ back; K and V again and their gradients.
      const Index backward = traffic(s, shape, Pass::backward).bytes_received;
      EXPECT_EQ(backward, (5 * g * (a - 1) + 6 * (b - 1)) * u + 4 * rows * kHeadsQ * (a - 1)) << a << "x" << b;
      EXPECT_EQ(static_cast<Index>(s.query_moves.size()), a - 1);
      EXPECT_EQ(s.query_rows(), a * rows);
      for (const Step& step : s.steps) EXPECT_TRUE(b > 1 || !step.move);
    }
  }
}

TEST(Schedule, MeshesChooseTheirSide) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{64 * 64}), {.causal = true});
  const auto side = [&](Index ranks, const Heads& heads) {
    return make_schedule(problem, make_layouts(LayoutKind::zigzag, problem, ranks), 0, heads,
                         {.kind = ScheduleKind::mesh})
        .query_ranks;
  };
  EXPECT_EQ(side(1, {8, 1}), 1);
  EXPECT_EQ(side(7, {8, 1}), 7);
  EXPECT_EQ(side(64, {64, 8}), 2);
  EXPECT_EQ(side(64, {8, 8}), 8);
  EXPECT_EQ(side(16, {2, 2}), 4);
  expect_refusal(
      [&] {
        make_schedule(problem, make_layouts(LayoutKind::zigzag, problem, 8), 0, {2, 2},
                      {.kind = ScheduleKind::mesh, .query_ranks = 3});
      },
      {"query_ranks = 3 do not divide 8 ranks", "a side of the mesh that divides them, or 0"});
  expect_refusal(
      [&] {
        make_schedule(problem, make_layouts(LayoutKind::zigzag, problem, 8), 0, {2, 2},
                      {.kind = ScheduleKind::mesh, .query_ranks = -1});
      },
      {"query_ranks = -1", "at least 0"});
}

TEST(ScheduleKind, HasTheNamesOfOtherFrameworksToo) {
  EXPECT_EQ(schedule_kind("p2p"), ScheduleKind::ring);
  EXPECT_EQ(schedule_kind("a2a"), ScheduleKind::all_to_all);
  EXPECT_EQ(schedule_kind("ulysses"), ScheduleKind::all_to_all);
  EXPECT_EQ(schedule_kind("a2a+p2p"), ScheduleKind::hybrid);
  EXPECT_EQ(schedule_kind("usp"), ScheduleKind::hybrid);
  for (const ScheduleKind kind : schedule_kinds()) EXPECT_EQ(schedule_kind(name(kind)), kind);
  EXPECT_THROW(schedule_kind("p2p+a2a"), Error);
}

TEST(ScheduleKind, HasThePlaceOfItsNameInTheRegistry) {
  EXPECT_EQ(name(ScheduleKind::all_gather), "all_gather");
  EXPECT_EQ(name(ScheduleKind::ring), "ring");
  EXPECT_EQ(name(ScheduleKind::all_to_all), "all_to_all");
  EXPECT_EQ(name(ScheduleKind::hybrid), "hybrid");
  EXPECT_EQ(name(ScheduleKind::exact), "exact");
  EXPECT_EQ(name(ScheduleKind::mesh), "mesh");
  expect_refusal([] { (void)name(static_cast<ScheduleKind>(200)); }, {"no schedule 200"});
}

// Each option can be set by name, is said in words by the schedules that use it, and read back.
TEST(ScheduleOption, TableAndFieldsAgree) {
  std::set<std::string_view> owned;
  for (const schedule::Definition& d : schedule::registry()) {
    for (const std::string_view option : d.options) {
      EXPECT_EQ(schedule_option(option).name, option);  // Error if there is none
      owned.insert(option);
    }
  }
  EXPECT_EQ(owned.size(), schedule_options().size());
  for (const ScheduleOption& option : schedule_options()) {
    EXPECT_FALSE(option.help.empty());
    const std::string value = option.whole != nullptr ? "7" : std::string(option.names().front());
    for (const ScheduleKind kind : schedule_kinds()) {
      ScheduleOptions options{.kind = kind};
      option.set(options,
                 option.whole != nullptr || option.value({}) != value ? value : std::string(option.names().back()));
      EXPECT_FALSE(option.is_default(options)) << option.name;
      EXPECT_EQ(words(options).find(std::string(option.name) + "=" + option.value(options)) != std::string::npos,
                uses(options, option.name))
          << words(options);
      EXPECT_EQ(words({.kind = kind}), name(kind));
    }
    expect_refusal(
        [&] {
          ScheduleOptions o;
          option.set(o, "many");
        },
        {"many"});
  }
  expect_refusal([] { (void)schedule_option("abreast"); }, {"no option 'abreast'", "ranks_per_step"});
  EXPECT_EQ(words({.kind = ScheduleKind::hybrid, .ulysses = 8, .outer = ScheduleKind::all_gather}),
            "hybrid outer=all_gather ulysses=8");
}

}  // namespace
}  // namespace weft
