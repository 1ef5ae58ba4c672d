#include <algorithm>
#include <cstdio>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bench/case.h"
#include "bench/modes.h"
#include "bench/schedule_runs.h"
#include "check/by_schedule.h"
#include "flags/auto_choice.h"
#include "flags/memory_check.h"
#include "flags/schedule_flags.h"
#include "terminal/file_output.h"
#include "terminal/json_file.h"
#include "terminal/numbers.h"
#include "terminal/words.h"
#include "weft/error.h"
#include "weft/kernel.h"
#include "weft/support.h"

namespace weft::tool {
namespace {

constexpr Defaults kBenchDefaults = {"8:2", "128", "f32"};

// A line of the table: a schedule, a pass and a link, with the runs of all rounds.
struct Line {
  ScheduleTask task;
  Pass pass = Pass::forward;
  double link = 0;  // time of the exchange over that of the compute; 0: as fast as memory
  std::vector<ScheduleRun> runs = {};

  double seconds() const {
    std::vector<double> all;
    for (const ScheduleRun& r : runs) all.push_back(r.seconds);
    std::nth_element(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2), all.end());
    return all[all.size() / 2];
  }
};

std::vector<double> links_of(const Flags& flags) {
  std::vector<double> links;
  const std::string links_text = flags.text("links", "0");
  for (const std::string_view part : split(links_text, ',')) {
    links.push_back(real_number("--links", part, "0,0.5,1,2"));
    if (!(links.back() >= 0 && links.back() <= 1000))
      throw Error(fmt::format("--links {}", part), "use ratios of exchange to compute from 0 (memory) to 1000");
  }
  return links;
}

struct Bench {
  check::Case given;
  Problem problem;
  Layouts layouts;
  RankTensors tensors;
  std::string kernel;

  ScheduleRun run(const Line& line, const ThreadRanks& world, Trace* trace) {
    return run_schedule(given, problem, layouts, tensors, line.task, line.pass, kernel, world, trace);
  }
};

// Seconds of compute and of exchange if nothing overlapped; `first`: of the exchange before the first step, which
// nothing can overlap.
struct Ideal {
  double compute = 0, exchange = 0, first = 0;

  double best() const { return std::max(compute, exchange) + first; }
  double overlapped(double seconds) const {
    const double most = std::min(compute, exchange);
    return most > 0 ? std::clamp((compute + exchange - seconds) / most, 0.0, 1.0) : 0;
  }
};

Ideal ideal_of(const Line& line, const Line& base) {
  Ideal ideal{.compute = base.seconds()};
  const ScheduleRun& run = line.runs.front();
  if (run.traffic.bytes_received == 0 || line.link == 0) return ideal;
  ideal.exchange = line.link * ideal.compute;
  ideal.first = ideal.exchange * static_cast<double>(run.first_bytes) / static_cast<double>(run.traffic.bytes_received);
  return ideal;
}

// The trace has the last round, on links as fast as memory.
void run_lines(Bench& bench, std::vector<Line>& lines, Index rounds, Trace* trace) {
  for (Index round = -1; round < rounds; ++round) {  // the first warms up and sizes the links
    const Line* base = nullptr;
    for (Line& line : lines) {
      if (line.link == 0) base = &line;
      ThreadRanks world;
      if (line.link > 0 && base->runs.front().traffic.bytes_received > 0)
        world.bandwidth =
            static_cast<double>(base->runs.front().traffic.bytes_received) / (line.link * base->seconds());
      ScheduleRun run = bench.run(line, world, line.link == 0 && round + 1 == rounds ? trace : nullptr);
      if (round == 0) line.runs.clear();
      line.runs.push_back(run);
    }
  }
}

nlohmann::json print_line(const Line& line, const Line& base, double flops) {
  const double seconds = line.seconds(), waiting = line.runs.back().waiting;
  const ScheduleRun& run = line.runs.back();
  const Ideal ideal = ideal_of(line, base);
  const bool slowed = ideal.exchange > 0;
  fmt::print("{:<22}{:<10}{:>7}{:>10.2f}{:>10.1f}{:>12}{:>12}{:>9.0f}%{:>12.2f}{:>12.2f}\n", line.task.name,
             name(line.pass), line.link == 0 ? "memory" : fmt::format("{:g}", line.link), seconds * 1e3,
             flops / seconds * 1e-9, slowed ? fmt::format("{:.0f}%", 100 * ideal.best() / seconds) : "-",
             slowed ? fmt::format("{:.0f}%", 100 * ideal.overlapped(seconds)) : "-", 100 * waiting / run.seconds,
             static_cast<double>(run.traffic.bytes_received) / 0x1p20,
             static_cast<double>(run.workspace_bytes) / 0x1p20);
  return {{"schedule", line.task.name},
          {"pass", name(line.pass)},
          {"link", line.link},
          {"seconds", seconds},
          {"gflops", flops / seconds * 1e-9},
          {"efficiency", slowed ? nlohmann::json(ideal.best() / seconds) : nlohmann::json()},
          {"bytes_received", run.traffic.bytes_received},
          {"bytes_sent", run.traffic.bytes_sent},
          {"workspace_bytes", run.workspace_bytes}};
}

}  // namespace

int bench_schedules(const Flags& flags) {
  for (const char* other : {"cases", "list", "peer", "threads"})
    flags.exclude("schedule", {other}, "schedules are compared with each other, on one problem");
  AutoProblem set = auto_problem(flags, kBenchDefaults);
  const check::Case& c = set.given;
  const Problem problem = check::problem_of(c);
  const Layouts layouts = check::layouts_of(c, problem);
  if (c.ranks > kMaxThreadRanks)
    throw Error(fmt::format("--ranks {}", c.ranks),
                fmt::format("ranks are threads here; use up to {}", kMaxThreadRanks));
  const std::vector<std::string> left_out = leave_out_impossible(flags, c, problem, layouts, set.schedules);
  for (const ScheduleOptions& options : set.schedules) require_support(check::use_of(c, layouts, options));
  const Index rounds = flags.within("repeat", 5, 1, 1000);
  std::vector<double> links = links_of(flags);
  if (std::find(links.begin(), links.end(), 0.0) == links.end()) links.insert(links.begin(), 0.0);
  std::sort(links.begin(), links.end());
  JsonOutput output(flags.find("json"));
  FileOutput output_trace("--trace", flags.find("trace"));
  check_memory("the ranks' tensors and their gradients take", tensor_bytes(c, problem, true));
  Bench bench{c, problem, layouts, RankTensors(c, layouts), flags.text("kernel", "cpu")};

  fmt::print("{}\n{}, kernel {}, ranks are threads, {} rounds\n\n", problem_words(c, problem), attention_words(c),
             find_kernel(bench.kernel).name, rounds);
  if (!set.why.empty()) fmt::print("{}\n\n", set.why);
  fmt::print("{:<22}{:<10}{:>7}{:>10}{:>10}{:>12}{:>12}{:>10}{:>12}{:>12}\n", "schedule", "pass", "link", "ms",
             "GFLOP/s", "efficiency", "overlapped", "waiting", "MiB in", "work MiB");
  nlohmann::json all = nlohmann::json::array();
  Trace trace;
  for (const ScheduleOptions& options : set.schedules) {
    const ScheduleTask task{weft::words(options), options};
    std::vector<Line> lines;
    for (const Pass pass : {Pass::forward, Pass::backward})  // the backward reads what the forward wrote
      for (const double link : links) lines.push_back({task, pass, link});
    run_lines(bench, lines, rounds, output_trace ? &trace : nullptr);
    for (const Line& line : lines) {
      const std::vector<Pass> asked = passes_of(flags);
      if (std::find(asked.begin(), asked.end(), line.pass) == asked.end()) continue;
      const auto base =
          std::find_if(lines.begin(), lines.end(), [&](const Line& l) { return l.pass == line.pass && l.link == 0; });
      BenchTask work{.name = "", .problem = c, .pass = line.pass};
      all.push_back(print_line(line, *base, useful_flops(work)));
      std::fflush(stdout);
    }
  }
  for (const std::string& reason : left_out) fmt::print("Skipped {}\n", reason);
  output.write(all);
  if (output_trace) output_trace.write(trace.json());
  return 0;
}

}  // namespace weft::tool
