// Choices: near the simulator's, within memory, the same on all ranks, in words.
#include "weft/choose.h"

#include <algorithm>
#include <cfenv>
#include <locale>
#include <mutex>
#include <set>

#include <gtest/gtest.h>

#include "check/cases/random_case.h"
#include "cost/sketch.h"
#include "refusal.h"
#include "sanitized.h"
#include "weft/communicator.h"
#include "weft/error.h"
#include "weft/simulate.h"

namespace weft::test {
namespace {

Layer layer(const std::vector<Index>& lengths, Mask mask = {.causal = true}) {
  return {.problem = Problem(Stream::from_lengths(lengths), std::move(mask)),
          .heads_q = 32,
          .heads_k = 8,
          .shape = {.dtype = DType::bf16, .dim_qk = 128, .dim_v = 128}};
}

// Documents of all lengths, drawn by the seed.
std::vector<Index> documents(unsigned seed, Index tokens) {
  check::RandomChoices choices(seed);
  std::vector<Index> lengths;
  while (tokens > 0) {
    lengths.push_back(min_of(tokens, choices.pick(1, Index{1} << choices.pick(6, 15))));
    tokens -= lengths.back();
  }
  return lengths;
}

TEST(Choose, SketchesAreNearTheSimulator) {
  const Machine& m = machine_preset("h100-400g");
  std::vector<double> errors;
  for (unsigned seed = 0; seed < 12; ++seed) {
    const Index ranks = seed % 3 == 0 ? 8 : seed % 3 == 1 ? 24 : 64;
    const Layer l = layer(documents(seed, 4096 * ranks), {.causal = true, .left = seed % 2 == 0 ? -1 : 1024});
    const LayoutKind kinds[] = {LayoutKind::zigzag, LayoutKind::contiguous, LayoutKind::balanced};
    const Layouts layouts = make_layouts(kinds[seed / 4 % 3], l.problem, ranks);
    const cost::Sketch sketch(l, layouts, m);
    for (const ScheduleOptions& o : usual_schedules(m, ranks, l.heads_q, l.heads_k)) {
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        const cost::Sketch::Result got = sketch.estimate(o, pass);
        const Timeline want = simulate({l.problem, layouts, l.heads_q, l.heads_k, o, l.shape}, m, pass);
        errors.push_back(std::abs(got.seconds / want.seconds - 1));
        EXPECT_LT(errors.back(), 0.5) << seed << " " << words(o);
        EXPECT_LE(sketch.at_least(o, pass), want.seconds * 1.001) << seed << " " << words(o);
        EXPECT_NEAR(static_cast<double>(got.memory), static_cast<double>(want.memory.total()),
                    0.25 * static_cast<double>(want.memory.total()))
            << seed << " " << words(o);
      }
    }
  }
  std::sort(errors.begin(), errors.end());
  EXPECT_LT(errors[errors.size() / 2], 0.03);
  EXPECT_LT(errors[errors.size() * 9 / 10], 0.15);
}

TEST(Choose, TheBestOfAll) {
  const Machine& m = machine_preset("h100-400g");
  for (unsigned seed = 20; seed < 26; ++seed) {
    const Layer l = layer(documents(seed, 65536));
    const Layouts layouts = make_layouts(LayoutKind::zigzag, l.problem, 16);
    const ScheduleChoice c = choose_schedule(l, layouts, m);
    double best = 1e300, chosen = 0;
    for (std::size_t n = 0; n < c.candidates.size(); ++n) {
      double seconds = 0;
      for (const Pass pass : {Pass::forward, Pass::backward})
        seconds +=
            simulate({l.problem, layouts, l.heads_q, l.heads_k, c.candidates[n].schedule, l.shape}, m, pass).seconds;
      best = std::min(best, seconds);
      if (n == c.chosen) chosen = seconds;
    }
    EXPECT_LE(chosen, 1.1 * best) << c.why();
  }
}

double simulated(const Layer& l, const Layouts& layouts, const ScheduleOptions& o, const Machine& m, Pass pass) {
  return simulate({l.problem, layouts, l.heads_q, l.heads_k, o, l.shape}, m, pass).seconds;
}

// One number: what is said of the choice is what the simulator says of it, and no other that was simulated is faster.
TEST(Choose, TimesAreTheSimulators) {
  const Machine& m = machine_preset("h100-400g");
  for (unsigned seed = 40; seed < 52; ++seed) {
    const Index ranks = seed % 2 == 0 ? 16 : 64;
    Layer l = layer(documents(seed, 8192 * ranks), {.causal = true, .left = seed % 3 == 0 ? 2048 : -1});
    l.heads_q = 64;
    const BatchChoice batch = choose({&l, 1}, ranks, m, {.simulated_slices = 10'000'000});
    const Layouts layouts = make_layouts(batch.layout, l.problem, ranks);
    const ScheduleChoice& c = batch.layers[0];
    ASSERT_TRUE(batch.simulated && c.best().simulated);
    EXPECT_EQ(batch.seconds, c.best().seconds());
    EXPECT_EQ(c.best().forward, simulated(l, layouts, c.schedule(), m, Pass::forward));
    EXPECT_EQ(c.best().backward, simulated(l, layouts, c.schedule(), m, Pass::backward));
    for (const Candidate& other : c.candidates) {
      if (!other.simulated) continue;
      EXPECT_GE(other.seconds(), c.best().seconds() * (1 - 1e-5)) << c.why();
      EXPECT_EQ(other.backward, simulated(l, layouts, other.schedule, m, Pass::backward));
    }
    const ScheduleChoice again = choose_schedule(l, layouts, m, {.simulated_slices = 10'000'000});
    EXPECT_EQ(again.why(), c.why());
  }
}

// Problems of all kinds: the time, the bytes and the words of a choice are those of simulate() of the same choice, what
// the estimate puts within 15 % of it was simulated too, and memory counts.
TEST(Choose, KeepsItsWord) {
  constexpr Index kHeads[][2] = {{8, 8}, {32, 8}, {64, 8}, {16, 1}, {24, 4}};
  const char* const machines[] = {"h100-400g", "a100-200g", "gb200-nvl72"};
  Index tight = 0;
  for (unsigned seed = 0; seed < 200; ++seed) {
    check::RandomChoices choices(1000 + seed);
    const Machine& m = machine_preset(machines[choices.pick(0, 2)]);
    const Index ranks = choices.pick(2, 16), heads = choices.pick(0, 4);
    Layer l = layer(documents(seed, choices.pick(32, 512) * ranks),
                    {.causal = choices.one_in(2), .left = choices.one_in(3) ? choices.pick(16, 1024) : -1});
    l.heads_q = kHeads[heads][0];
    l.heads_k = kHeads[heads][1];
    l.backward = !choices.one_in(5);
    ChooseOptions options{.simulated_slices = 10'000'000};
    BatchChoice batch = choose({&l, 1}, ranks, m, options);
    if (choices.one_in(4)) {  // less than it would take
      options.memory_bytes = 0.999 * static_cast<double>(batch.layers[0].best().memory);
      try {
        batch = choose({&l, 1}, ranks, m, options);
        ++tight;
      } catch (const Error&) {
        continue;  // nothing fits
      }
      EXPECT_LE(static_cast<double>(batch.layers[0].best().memory), options.memory_bytes);
    }
    SCOPED_TRACE(testing::Message() << seed << ": " << ranks << " ranks, " << batch.why());
    const ScheduleChoice& c = batch.layers[0];
    const Layouts layouts = make_layouts(batch.layout, l.problem, ranks);
    const Job job{l.problem, layouts, l.heads_q, l.heads_k, c.schedule(), l.shape};
    const Timeline forward = simulate(job, m, Pass::forward);
    const Timeline backward = l.backward ? simulate(job, m, Pass::backward) : Timeline{};
    ASSERT_TRUE(batch.simulated && c.best().simulated);
    EXPECT_EQ(c.best().forward, forward.seconds);
    EXPECT_EQ(c.best().backward, backward.seconds);
    EXPECT_EQ(c.best().memory, max_of(forward.memory.total(), backward.memory.total()));
    EXPECT_EQ(batch.seconds, c.best().seconds());
    EXPECT_EQ(c.left_out, 0U);
    for (const Candidate& other : c.candidates) {
      if (!other.usable()) continue;
      EXPECT_GE(other.seconds(), c.best().seconds() * (other.simulated ? 1 - 1e-5 : 1.15)) << words(other.schedule);
    }
  }
  EXPECT_GT(tight, 10);
}

// What near candidates the budget does not allow is said, and the answer is the best of those that it does.
TEST(Choose, ABudgetThatEndsIsSaid) {
  const Machine& m = machine_preset("h100-400g");
  const Layer l = layer({1 << 17});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, l.problem, 8);
  const ScheduleChoice all = choose_schedule(l, layouts, m, {.simulated_slices = 10'000'000});
  ASSERT_EQ(all.left_out, 0U);
  const auto count = [](const ScheduleChoice& c) {
    return std::count_if(c.candidates.begin(), c.candidates.end(), [](const Candidate& x) { return x.simulated; });
  };
  ASSERT_GT(count(all), 1) << all.why();
  Index ended = 0;
  for (Index budget = 64; budget < 200'000; budget *= 2) {
    const ScheduleChoice c = choose_schedule(l, layouts, m, {.simulated_slices = budget});
    if (!c.best().simulated) {
      EXPECT_NE(c.why().find("too many to simulate"), std::string::npos) << c.why();
      EXPECT_EQ(count(c), 0);
      continue;
    }
    EXPECT_LE(count(c), count(all));
    if (c.left_out == 0) continue;
    ++ended;
    EXPECT_LT(count(c), count(all));
    EXPECT_NE(c.why().find("not simulated: simulated_slices = " + std::to_string(budget)), std::string::npos)
        << c.why();
  }
  EXPECT_GT(ended, 0);
}

TEST(Choose, TooManySlicesAreEstimatedAndThatIsSaid) {
  const Machine& m = machine_preset("h100-400g");
  const Layer l = layer(documents(3, 65536));
  const BatchChoice c = choose({&l, 1}, 16, m, {.simulated_slices = 10});
  EXPECT_FALSE(c.simulated || c.layers[0].best().simulated);
  EXPECT_NE(c.why().find("estimated from a few ranks"), std::string::npos) << c.why();
  const BatchChoice whole = choose({&l, 1}, 16, m);
  EXPECT_TRUE(whole.simulated);
  EXPECT_EQ(whole.layers[0].why().find("estimated"), std::string::npos) << whole.why();
}

TEST(Choose, LayersAreCountedInWords) {
  const Machine& m = machine_preset("h100-400g");
  Layer l = layer({65536});
  EXPECT_EQ(choose({&l, 1}, 8, m).why().find("for all"), std::string::npos);
  l.count = 3;
  EXPECT_NE(choose({&l, 1}, 8, m).why().find("for all 3 layers"), std::string::npos);
}

TEST(Choose, WindowsChooseDifferently) {
  const Machine& m = machine_preset("h100-400g");
  const std::vector<Layer> layers = {layer({1 << 19}), layer({1 << 19}, {.causal = true, .left = 512})};
  const BatchChoice c = choose(layers, 64, m);
  ASSERT_EQ(c.layers.size(), 2U);
  EXPECT_EQ(c.layers[1].schedule().kind, ScheduleKind::exact);
  EXPECT_NE(c.layers[0].schedule().kind, ScheduleKind::exact);
  EXPECT_NE(c.why().find("layout "), std::string::npos);
  EXPECT_NE(c.why().find("layer 1: exact"), std::string::npos);
}

// What ranks may have of their own and must not matter: memory, threads and what was asked before; where numbers came
// from; how the processor rounds (ranks may compute with other instructions); how people write numbers there.
struct Rank {
  Index number = 0;
  Machine machine = {};
  bool first_schedules_last = false;
};

struct Commas : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

// Of many problems, on ranks that have made all of it by themselves. `planted` changes what a rank must not change.
std::string answers_of(Rank rank, void (*planted)(Rank&)) {
  constexpr Index kRanks = 6;
  constexpr int kRounding[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
  std::string said;
  for (const char* name : fewer_if_sanitized<const char*>({"h100-400g", "a100-200g", "gb200-nvl72"}, 1)) {
    rank.machine = machine_preset(name);
    if (rank.number % 2 == 1) rank.machine = machine_from_json(to_json(rank.machine));
    if (planted != nullptr) planted(rank);
    std::fesetround(kRounding[rank.number % 4]);
    for (unsigned seed = 0; seed < 12; ++seed) {
      for (unsigned before = 0; before < static_cast<unsigned>(rank.number); ++before) {
        const Layer other = layer(documents(100 + before, 3000));
        choose({&other, 1}, kRanks, rank.machine);
      }
      // Equal documents among them: candidates that take as long as each other.
      const std::vector<Index> equal(kRanks, 512 << seed / 3), lengths = seed % 3 == 0 ? equal : documents(seed, 40000);
      const Layer l = layer(lengths, {.causal = true, .left = seed % 2 == 0 ? -1 : 700});
      ChooseOptions options{
          .memory_bytes = 0, .schedules = usual_schedules(rank.machine, kRanks, l.heads_q, l.heads_k), .layouts = {}};
      if (rank.first_schedules_last) std::reverse(options.schedules.begin(), options.schedules.end());
      const BatchChoice choice = choose({&l, 1}, kRanks, rank.machine, options);
      said += std::string(weft::name(choice.layout)) + ", " + words(choice.layers[0].schedule()) + "\n";
    }
  }
  std::fesetround(FE_TONEAREST);
  return said;
}

std::set<std::string> all_answers(void (*planted)(Rank&)) {
  std::mutex mutex;
  std::set<std::string> answers;
  run_ranks(6, [&](Communicator& comm) {
    const std::string mine = answers_of({.number = comm.rank()}, planted);
    const std::lock_guard lock(mutex);
    answers.insert(mine);
  });
  return answers;
}

TEST(Choose, TheSameOnAllRanks) {
  std::set<std::string> answers = all_answers(nullptr);
  EXPECT_EQ(answers.size(), 1U);
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Commas));
  answers.merge(all_answers(nullptr));
  std::locale::global(before);
  EXPECT_EQ(answers.size(), 1U) << "by how numbers are written";
}

TEST(Choose, WhatDependsOnARankIsSeen) {
  const auto faster_links = [](Rank& r) { r.machine.levels[0].bandwidth *= 1 + 0.2 * static_cast<double>(r.number); };
  const auto own_latency = [](Rank& r) { r.machine.levels[0].latency += 30e-6 * static_cast<double>(r.number); };
  const auto other_order = [](Rank& r) { r.first_schedules_last = r.number == 4; };
  EXPECT_GT(all_answers(faster_links).size(), 1U);
  EXPECT_GT(all_answers(own_latency).size(), 1U);
  EXPECT_GT(all_answers(other_order).size(), 1U);
}

TEST(Choose, MemoryIsABudget) {
  const Machine& m = machine_preset("h100-400g");
  const Layer l = layer({131072});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, l.problem, 8);
  const ScheduleChoice free = choose_schedule(l, layouts, m);
  Index least = free.best().memory;
  for (const Candidate& c : free.candidates)
    if (!c.at_least) least = min_of(least, c.memory);
  ASSERT_LT(least, free.best().memory);
  const ScheduleChoice tight = choose_schedule(l, layouts, m, {.memory_bytes = static_cast<double>(least)});
  EXPECT_LE(tight.best().memory, least);
  EXPECT_NE(tight.why().find("need more than"), std::string::npos);
  expect_refusal([&] { choose_schedule(l, layouts, m, {.memory_bytes = 1000}); }, {"the least needs"});
}

TEST(Choose, RanksThatShareAProcessor) {
  Layer l = layer({300, 200, 12});
  l.shape.dtype = DType::f32;
  const BatchChoice c = choose({&l, 1}, 4, machine_preset("cpu"));
  EXPECT_GT(c.seconds, 0);
}

TEST(Choose, RefusesOptionsThatNoScheduleHas) {
  const Layer l = layer({4000, 96});
  for (const char* machine : {"h100-400g", "cpu"}) {
    for (const auto& [options, says] :
         {std::pair{ScheduleOptions{.kind = ScheduleKind::exact, .stages = 0}, "stages = 0"},
          {ScheduleOptions{.kind = ScheduleKind::exact, .stages = -3}, "stages = -3"},
          {ScheduleOptions{.kind = ScheduleKind::ring, .ranks_per_step = 0}, "ranks_per_step = 0"},
          {ScheduleOptions{.kind = ScheduleKind::all_gather, .head_groups = 0}, "head_groups = 0"},
          {ScheduleOptions{.kind = ScheduleKind::hybrid, .ulysses = 0}, "ulysses = 0"}}) {
      const ChooseOptions given{.memory_bytes = 0, .schedules = {options}, .layouts = {}};
      const Layouts layouts = make_layouts(LayoutKind::zigzag, l.problem, 4);
      expect_refusal([&] { (void)choose_schedule(l, layouts, machine_preset(machine), given); }, {says, "use "});
      expect_refusal([&] { (void)choose({&l, 1}, 4, machine_preset(machine), given); }, {says, "use "});
    }
  }
}

TEST(Choose, RefusesWhatIsNoBatch) {
  const Machine& m = machine_preset("cpu");
  EXPECT_THROW(choose({}, 4, m), Error);
  const std::vector<Layer> different = {layer({100}), layer({99})};
  EXPECT_THROW(choose(different, 4, m), Error);
  const Layer one = layer({100});
  EXPECT_THROW(choose({&one, 1}, 0, m), Error);
  EXPECT_THROW(choose({&one, 1}, 4, m, {.memory_bytes = -5}), Error);
  Layer less = one;
  less.count = -1;
  EXPECT_THROW(choose({&less, 1}, 4, m), Error);
}

}  // namespace
}  // namespace weft::test
