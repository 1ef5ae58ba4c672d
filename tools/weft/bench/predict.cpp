#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bench/clock.h"
#include "bench/modes.h"
#include "bench/schedule_runs.h"
#include "calibrate/calibrate.h"
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

struct Measured {
  double forward = 0, backward = 0;  // seconds, as if the gemm had taken its usual time
  double total() const { return forward + backward; }
};

// One executor, warmed up; then rounds of both passes with a gemm on all cores before each.
Measured measure(const check::Case& c, const Problem& problem, const Layouts& layouts, const RankOperands& tensors,
                 const ScheduleOptions& options, const ThreadRanks& world, Index rounds, double usual_gemm) {
  std::mutex mutex;
  std::vector<std::array<double, 2>> begin(at(rounds), {1e300, 1e300}), end(at(rounds), {0, 0});
  std::vector<double> gemm(at(rounds), 0);
  run_ranks(
      c.ranks,
      [&](Communicator& comm) {
        stay_on_core(comm.rank(), comm.ranks());
        Executor executor(comm, make_schedule(problem, layouts, comm.rank(), {c.heads_q, c.heads_k}, options),
                          {.kernel = "cpu"});
        const auto meet = [&] {
          float token = 0;
          comm.all_reduce(&token, DType::f32, 1, Reduce::sum).wait();
        };
        for (Index round = -1; round < rounds; ++round) {
          double mine = 0;
          meet();
          if (comm.rank() % ranks_a_core(c.ranks) == 0) mine = gemm_seconds(1);
          for (const Pass pass : {Pass::forward, Pass::backward}) {
            meet();
            const double start = seconds_now();
            tensors[at(comm.rank())]->run(executor, pass);
            const double stop = seconds_now();
            if (round < 0) continue;
            const std::lock_guard lock(mutex);
            const auto n = at(round);
            const std::size_t which = pass == Pass::forward ? 0 : 1;
            begin[n][which] = std::min(begin[n][which], start);
            end[n][which] = std::max(end[n][which], stop);
            gemm[n] = std::max(gemm[n], mine);
          }
        }
      },
      world);
  std::array<std::vector<double>, 2> scaled;
  for (std::size_t n = 0; n < gemm.size(); ++n)
    for (std::size_t which : {0, 1}) scaled[which].push_back((end[n][which] - begin[n][which]) * usual_gemm / gemm[n]);
  return {*std::min_element(scaled[0].begin(), scaled[0].end()), *std::min_element(scaled[1].begin(), scaled[1].end())};
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
  ThreadRanks world;
};

// Of all problems.
struct Findings {
  std::vector<double> errors = {}, chosen_errors = {}, losses = {};
  std::map<std::string, std::vector<double>> by = {};
  // Logarithms of measured times over the chosen one's.
  std::map<std::pair<Index, std::string>, std::vector<double>> fixed = {};
  std::map<std::string, Index> taken = {};  // how often each was chosen
  json runs = json::array();

  // Every candidate of a problem, predicted and measured.
  void add(Index number, const Question& q, const Asked& asked, Index rounds, double usual_gemm);
  void print(Index rounds) const;
};

void Findings::add(Index number, const Question& q, const Asked& asked, Index rounds, double usual_gemm) {
  const check::Case& c = asked.given;
  const std::vector<ScheduleOptions> tried = candidates(c);
  const std::string choice = asked.chosen(tried);
  std::map<std::string, double> times;
  double best = 1e300;
  for (std::size_t layout = 0; layout < asked.layouts.size(); ++layout) {
    const RankOperands tensors = rank_operands(c, asked.layouts[layout]);
    for (const ScheduleOptions& options : tried) {
      const double forward = simulate(asked.job(layout, options), asked.machine, Pass::forward).seconds,
                   backward = simulate(asked.job(layout, options), asked.machine, Pass::backward).seconds;
      const Measured m =
          measure(c, asked.problem, asked.layouts[layout], tensors, options, asked.world, rounds, usual_gemm);
      const double error = std::abs((forward + backward) / m.total() - 1);
      errors.push_back(error);
      for (const std::string& kind :
           {std::string(name(options.kind)), fmt::format("{} ranks", c.ranks), std::string(weft::name(c.dtype)),
            fmt::format("layout {}", weft::name(asked.kinds[layout]))})
        by[kind].push_back(error);
      by["forward alone"].push_back(std::abs(forward / m.forward - 1));
      by["backward alone"].push_back(std::abs(backward / m.backward - 1));
      by["signed, all"].push_back((forward + backward) / m.total() - 1);
      const std::string said = asked.said(asked.kinds[layout], options);
      times[said] = m.total();
      best = std::min(best, m.total());
      if (said == choice) chosen_errors.push_back(error);
      runs.push_back({{"problem", number},
                      {"flags", check::flags(c)},
                      {"ratio", q.ratio},
                      {"bandwidth", asked.world.bandwidth},
                      {"latency", asked.world.latency},
                      {"layout", weft::name(asked.kinds[layout])},
                      {"schedule", weft::words(options)},
                      {"chosen", said == choice},
                      {"forward", m.forward},
                      {"backward", m.backward},
                      {"predicted_forward", forward},
                      {"predicted_backward", backward}});
    }
  }
  const double of_chosen = times.at(choice);
  for (const auto& [which, seconds] : times) fixed[{c.ranks, which}].push_back(std::log(seconds / of_chosen));
  fixed[{c.ranks, "the best measured"}].push_back(std::log(best / of_chosen));
  ++taken[choice];
  losses.push_back(of_chosen / best - 1);
}

void Findings::print(Index rounds) const {
  const auto count = losses.size();
  const auto within = [&](double most) {
    const auto near = std::count_if(losses.begin(), losses.end(), [&](double loss) { return loss <= most; });
    return fmt::format("within {:.0f} % of the best measured in {} of {} ({:.1f} %)", 100 * most, near, count,
                       100.0 * static_cast<double>(near) / static_cast<double>(count));
  };
  fmt::print("\n{} problems, {} runs, {} rounds each, normalised by a gemm in each round\n", count, errors.size(),
             rounds);
  fmt::print("median error {:.1f} % of all runs, {:.1f} % of the chosen ones\n", 100 * median(errors),
             100 * median(chosen_errors));
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
  const Index count = flags.within("predict", 200, 1, 100000), rounds = flags.within("repeat", 7, 1, 1000);
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
      found.add(n, q, asked, rounds, calibration.gemm_seconds);
    }
  }
  set_cpu_threads(0);
  found.print(rounds);
  output.write(found.runs);
  return 0;
}

}  // namespace weft::tool
