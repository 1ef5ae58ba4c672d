#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <random>

#include <fmt/format.h>
#include <malloc.h>
#include <nlohmann/json.hpp>

#include "bench/clock.h"
#include "bench/modes.h"
#include "bench/predict_rounds.h"
#include "bench/schedule_runs.h"
#include "calibrate/calibrate.h"
#include "calibrate/reference.h"
#include "flags/lengths.h"
#include "index.h"
#include "terminal/json_file.h"
#include "terminal/progress.h"
#include "weft/choose.h"
#include "weft/error.h"
#include "weft/simulate.h"

namespace weft::tool {
namespace {

using nlohmann::json;

struct Question {
  check::Case given;
  double ratio = 0;  // of the time that gathered keys take to that of computing
};

// A random problem of some milliseconds. Documents are drawn too, unless they are given.
Question drawn(std::mt19937_64& engine, const std::vector<Index>& documents) {
  const auto pick = [&](std::initializer_list<Index> from) { return *(from.begin() + engine() % from.size()); };
  const auto uniform = [&] { return static_cast<double>(engine() >> 11) * 0x1p-53; };
  Question q;
  check::Case& c = q.given;
  c.ranks = pick({2, 4, 8});
  const Index tokens = pick({768, 1024, 1536, 2048});
  Index left = tokens;
  const double median = std::exp(std::log(40.0) + uniform() * std::log(static_cast<double>(tokens) / 40));
  for (const Index n : documents) c.q.cu_seqlens.push_back(c.q.cu_seqlens.back() + n);
  while (left > 0 && documents.empty()) {
    const double length = median * std::exp(2 * (uniform() + uniform() - 1));
    const Index n = std::clamp<Index>(std::llround(length), 1, left);
    c.q.cu_seqlens.push_back(c.q.cu_seqlens.back() + n);
    left -= n;
  }
  c.mask.causal = engine() % 4 != 0;
  if (engine() % 3 == 0) c.mask.left = pick({32, 128, 512});
  const Index heads = pick({0, 1, 2, 3});
  constexpr Index kHeads[][2] = {{4, 2}, {4, 4}, {8, 2}, {2, 2}};
  c.heads_q = kHeads[heads][0];
  c.heads_k = kHeads[heads][1];
  c.dim_qk = c.dim_v = pick({64, 128});
  c.dtype = engine() % 3 == 0 ? DType::bf16 : DType::f32;
  const LayoutKind layouts[] = {LayoutKind::zigzag, LayoutKind::contiguous, LayoutKind::balanced, LayoutKind::striped,
                                LayoutKind::placed};
  c.layout = layouts[engine() % std::size(layouts)];
  c.seed = engine();
  q.ratio = std::exp(std::log(0.05) + uniform() * std::log(3 / 0.05));
  return q;
}

std::vector<ScheduleOptions> candidates(const check::Case& c) {
  std::vector<ScheduleOptions> all = {{.kind = ScheduleKind::exact, .stages = 1},
                                      {.kind = ScheduleKind::ring},
                                      {.kind = ScheduleKind::all_gather},
                                      {.kind = ScheduleKind::all_gather, .head_groups = 2},
                                      {.kind = ScheduleKind::exact, .head_groups = 2}};
  if (c.ranks <= c.heads_q) all.push_back({.kind = ScheduleKind::all_to_all});
  if (c.ranks > 2) all.push_back({.kind = ScheduleKind::exact});
  if (c.ranks > 2) all.push_back({.kind = ScheduleKind::ring, .ranks_per_step = 1});
  if (c.ranks > 2) all.push_back({.kind = ScheduleKind::hybrid, .ulysses = 2, .outer = ScheduleKind::ring});
  for (const Index side : {2, 4})
    if (c.ranks >= side) all.push_back({.kind = ScheduleKind::mesh, .query_ranks = side});
  return all;
}

// A question with the links it is asked on, and the machine that predicts for them.
struct Asked {
  Asked(const Question& q, const Machine& calibrated, double latency)
      : given(q.given),
        problem(check::problem_of(given)),
        kinds(given.layout == LayoutKind::placed ? std::vector{given.layout}
                                                 : std::vector{given.layout, LayoutKind::placed}),
        shape{.dtype = given.dtype, .dim_qk = given.dim_qk, .dim_v = given.dim_v},
        machine(calibrated) {
    machine.processor_ranks = ranks_a_core(given.ranks);
    machine.processor_kernels = 1;
    for (const LayoutKind kind : kinds) layouts.push_back(make_layouts(kind, problem, given.ranks));
    const Timeline gathered = simulate(job(0, {.kind = ScheduleKind::all_gather}), machine, Pass::forward);
    world = {.bandwidth = static_cast<double>(gathered.bytes_in()) / (q.ratio * gathered.ideal), .latency = latency};
    machine.levels[0].bandwidth = world.bandwidth;
    machine.levels[0].latency += world.latency;
  }

  // The links stay as they are.
  void slow_processors(double times) {
    machine = slowed(machine, times);
    slower = times;
  }

  Job job(std::size_t layout, const ScheduleOptions& options) const {
    return {problem, layouts[layout], given.heads_q, given.heads_k, options, shape};
  }
  // Which schedule on which layout, in words that are the same for all drawn layouts.
  std::string said(LayoutKind layout, const ScheduleOptions& options) const {
    return fmt::format("{}, {}", weft::words(options), layout == LayoutKind::placed ? "placed" : "drawn layout");
  }
  // What a user's `auto` would be among these, on any of the layouts.
  std::string chosen(const std::vector<ScheduleOptions>& among) const {
    const Layer layer{.problem = problem, .heads_q = given.heads_q, .heads_k = given.heads_k, .shape = shape};
    const BatchChoice choice =
        choose({&layer, 1}, given.ranks, machine, {.memory_bytes = 0, .schedules = among, .layouts = kinds});
    return said(choice.layout, choice.layers.front().schedule());
  }

  check::Case given;
  Problem problem;
  std::vector<LayoutKind> kinds;  // the drawn one, and placed
  std::vector<Layouts> layouts = {};
  TensorShape shape;
  Machine machine;
  double slower = 1;  // than when the machine was calibrated
  ThreadRanks world;
};

// The median of a pass, or of both, over rounds begin, begin + step, and so on.
double middle(const std::vector<Measured>& rounds, double (*of)(const Measured&), std::size_t begin = 0,
              std::size_t step = 1) {
  std::vector<double> seconds;
  for (std::size_t n = begin; n < rounds.size(); n += step) seconds.push_back(of(rounds[n]));
  return median(std::move(seconds));
}
double both(const Measured& m) { return m.total(); }

// What the chosen candidate takes over the best measured one, less 1. The best of many that are measured once is often
// merely the luckiest, so it is found in half of the rounds and compared, round by round, in the other half; both ways.
double loss_of(std::size_t chosen, const std::vector<std::vector<Measured>>& measured) {
  double sum = 0;
  for (std::size_t half = 0; half < 2; ++half) {
    std::size_t best = 0;
    for (std::size_t n = 1; n < measured.size(); ++n)
      if (middle(measured[n], both, half, 2) < middle(measured[best], both, half, 2)) best = n;
    std::vector<double> ratios;
    for (std::size_t round = 1 - half; round < measured[chosen].size(); round += 2)
      ratios.push_back(measured[chosen][round].total() / measured[best][round].total());
    sum += median(std::move(ratios)) - 1;
  }
  return sum / 2;
}

// Of all problems.
struct Findings {
  std::vector<double> errors = {}, chosen_errors = {}, losses = {};
  std::vector<double> swings = {};  // of each run: one half of the rounds over the other
  std::map<std::string, std::vector<double>> by = {};
  // Logarithms of measured times over the chosen one's.
  std::map<std::pair<Index, std::string>, std::vector<double>> fixed = {};
  std::map<std::string, Index> taken = {};  // how often each was chosen
  json runs = json::array();

  // Every candidate of a problem, predicted and measured.
  void add(Index number, const Question& q, Asked asked, Index rounds, const KernelTimes& usual);
  void print(Index rounds) const;

 private:
  double add_run(Index number, const Question& q, const Asked& asked, std::size_t layout,
                 const ScheduleOptions& options, bool chosen, const std::vector<Measured>& rounds);
};

// Its measured seconds.
double Findings::add_run(Index number, const Question& q, const Asked& asked, std::size_t layout,
                         const ScheduleOptions& options, bool chosen, const std::vector<Measured>& rounds) {
  const check::Case& c = asked.given;
  const double forward = simulate(asked.job(layout, options), asked.machine, Pass::forward).seconds,
               backward = simulate(asked.job(layout, options), asked.machine, Pass::backward).seconds;
  const double seconds = middle(rounds, both);
  const Measured m = {middle(rounds, [](const Measured& r) { return r.forward; }),
                      middle(rounds, [](const Measured& r) { return r.backward; })};
  const double error = std::abs((forward + backward) / seconds - 1);
  errors.push_back(error);
  for (const std::string& kind :
       {std::string(name(options.kind)), fmt::format("{} ranks", c.ranks), std::string(weft::name(c.dtype)),
        fmt::format("layout {}", weft::name(asked.kinds[layout]))})
    by[kind].push_back(error);
  by["forward alone"].push_back(std::abs(forward / m.forward - 1));
  by["backward alone"].push_back(std::abs(backward / m.backward - 1));
  by["signed, all"].push_back((forward + backward) / seconds - 1);
  if (chosen) chosen_errors.push_back(error);
  swings.push_back(std::abs(middle(rounds, both, 0, 2) / middle(rounds, both, 1, 2) - 1));
  json each = json::array();
  for (const Measured& r : rounds) each.push_back({r.forward, r.backward});
  runs.push_back({{"problem", number},
                  {"flags", check::flags(c)},
                  {"ratio", q.ratio},
                  {"slower", asked.slower},
                  {"bandwidth", asked.world.bandwidth},
                  {"latency", asked.world.latency},
                  {"layout", weft::name(asked.kinds[layout])},
                  {"schedule", weft::words(options)},
                  {"chosen", chosen},
                  {"forward", m.forward},
                  {"backward", m.backward},
                  {"rounds", each},
                  {"predicted_forward", forward},
                  {"predicted_backward", backward}});
  return seconds;
}

void Findings::add(Index number, const Question& q, Asked asked, Index rounds, const KernelTimes& usual) {
  const check::Case& c = asked.given;
  const std::vector<ScheduleOptions> tried = candidates(c);
  std::vector<RankOperands> tensors;
  for (const Layouts& layouts : asked.layouts) tensors.push_back(rank_operands(c, layouts));
  std::vector<Candidate> all;
  std::vector<std::size_t> layout_of;
  for (std::size_t layout = 0; layout < asked.layouts.size(); ++layout)
    for (const ScheduleOptions& options : tried) {
      all.push_back({&asked.layouts[layout], &tensors[layout], options});
      layout_of.push_back(layout);
    }
  const MeasuredCandidates found = measure_in_turn(c, asked.problem, all, asked.world, rounds);
  const std::vector<std::vector<Measured>>& measured = found.rounds;
  // Clocks change from minute to minute, and links do not: what is predicted is for the clock of these rounds.
  asked.slow_processors(found.reference / ReferenceCalls::usual_seconds(usual, c.dtype, c.dim_qk));
  const std::string choice = asked.chosen(tried);
  std::vector<std::pair<std::string, double>> times;
  std::optional<std::size_t> chosen;
  for (std::size_t n = 0; n < all.size(); ++n) {
    const std::string said = asked.said(asked.kinds[layout_of[n]], all[n].options);
    if (said == choice) chosen = n;
    times.emplace_back(said, add_run(number, q, asked, layout_of[n], all[n].options, said == choice, measured[n]));
  }
  if (!chosen) throw Error(fmt::format("the choice {} is not among what was measured", choice), "report this");
  for (const auto& [which, seconds] : times)
    fixed[{c.ranks, which}].push_back(std::log(seconds / times[*chosen].second));
  losses.push_back(loss_of(*chosen, measured));
  fixed[{c.ranks, "the best measured"}].push_back(-std::log1p(losses.back()));
  ++taken[choice];
}

void Findings::print(Index rounds) const {
  const auto count = losses.size();
  const auto within = [&](double most) {
    const auto near = std::count_if(losses.begin(), losses.end(), [&](double loss) { return loss <= most; });
    return fmt::format("within {:.0f} % of the best measured in {} of {} ({:.1f} %)", 100 * most, near, count,
                       100.0 * static_cast<double>(near) / static_cast<double>(count));
  };
  fmt::print(
      "\n{} problems, {} runs, {} rounds of all candidates in turn, each over a reference call of the same round\n",
      count, errors.size(), rounds);
  fmt::print(
      "median error {:.1f} % of all runs, {:.1f} % of the chosen ones; one half of the rounds differs from the "
      "other by {:.1f} % in the median\n",
      100 * median(errors), 100 * median(chosen_errors), 100 * median(swings));
  for (const auto& [what, of] : by)
    fmt::print("  {:<16}{:>6} runs, median {:+.1f} %\n", what, of.size(), 100 * median(of));
  fmt::print("the choice (choose) is {},\n  {}, median loss {:.1f} %, largest {:.1f} %\n", within(0.05), within(0.1),
             100 * median(losses), 100 * *std::max_element(losses.begin(), losses.end()));
  fmt::print("chosen:");
  for (const auto& [which, times] : taken)
    fmt::print("{} {} x {}", which == taken.begin()->first ? "" : ";", times, which);
  fmt::print("\n");
  fmt::print("measured time of each fixed choice over that of the chosen one, geometric mean:\n");
  for (const auto& [key, logs] : fixed) {
    double sum = 0;
    for (const double x : logs) sum += x;
    fmt::print("  {} ranks  {:<52}{:>6.3f}  ({} problems)\n", key.first, key.second,
               std::exp(sum / static_cast<double>(logs.size())), logs.size());
  }
}

}  // namespace

int bench_predict(const Flags& flags) {
  // Memory that is freed stays with the process: faults of pages that come anew with each call would be measured, and
  // nothing predicts them.
  constexpr int kLargest = 32 << 20;  // what glibc takes
  mallopt(M_MMAP_THRESHOLD, kLargest);
  mallopt(M_TRIM_THRESHOLD, 16 * kLargest);
  const Index count = flags.within("predict", 200, 1, 100000), rounds = flags.within("repeat", 8, 2, 1000);
  JsonOutput output(flags.find("json"));
  const Calibration calibration =
      calibrate({.dtypes = {DType::f32, DType::bf16}, .dims = {64, 128}, .kernel = "cpu", .rounds = 5, .show = true});
  set_cpu_threads(1);
  std::mt19937_64 engine(seed_of(flags));
  Findings found;
  {
    Progress progress(count, "problems");
    for (Index n = 0; n < count; ++n) {
      progress.show(n, 0);
      std::vector<Index> documents;
      if (const std::string* docs = flags.find("docs"))
        documents = parse_lengths("--docs", *docs, seed_of(flags) + static_cast<unsigned long long>(n));
      const Question q = drawn(engine, documents);
      const Asked asked(q, calibration.machine, 20e-6 * static_cast<double>(engine() % 10));
      found.add(n, q, asked, rounds, calibration.times);
    }
  }
  set_cpu_threads(0);
  found.print(rounds);
  output.write(found.runs);
  return 0;
}

}  // namespace weft::tool
