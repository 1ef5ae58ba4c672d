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
#include "terminal/columns.h"
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
  RankOperands tensors;
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

const std::vector<Column> kColumns = {{"schedule", "/schedule", -22},
                                      {"pass", "/pass", -10},
                                      {"link", "/link_words", 7},
                                      {"ms", "/seconds", 10, 2, 1e3},
                                      {"GFLOP/s", "/gflops", 10, 1},
                                      {"efficiency", "/efficiency", 12, 0, 100, "%"},
                                      {"overlapped", "/overlapped", 12, 0, 100, "%"},
                                      {"waiting", "/waiting", 10, 0, 100, "%"},
                                      {"MiB in", "/bytes_received", 12, 2, 0x1p-20},
                                      {"work MiB", "/workspace_bytes", 12, 2, 0x1p-20}};

nlohmann::json record_of(const Line& line, const Line& base, double flops) {
  const double seconds = line.seconds();
  const ScheduleRun& run = line.runs.back();
  const Ideal ideal = ideal_of(line, base);
  nlohmann::json record = {{"schedule", line.task.name},
                           {"pass", name(line.pass)},
                           {"link", line.link},
                           {"link_words", line.link == 0 ? "memory" : fmt::format("{:g}", line.link)},
                           {"seconds", seconds},
                           {"gflops", flops / seconds * 1e-9},
                           {"efficiency", nullptr},
                           {"overlapped", nullptr},
                           {"waiting", run.waiting / run.seconds},
                           {"bytes_received", run.traffic.bytes_received},
                           {"bytes_sent", run.traffic.bytes_sent},
                           {"workspace_bytes", run.workspace_bytes}};
  if (ideal.exchange > 0) {
    record["efficiency"] = ideal.best() / seconds;
    record["overlapped"] = ideal.overlapped(seconds);
  }
  return record;
}

}  // namespace

int bench_schedules(const Flags& flags) {
  flags.exclude("schedule", {"cases", "list", "peer", "threads"},
                "schedules are compared with each other, on one problem");
  AutoProblem set = auto_problem(flags, kBenchDefaults);
  const check::Case& c = set.given;
  const Problem problem = check::problem_of(c);
  const Layouts layouts = check::layouts_of(c, problem);
  check_thread_ranks(c.ranks);
  const std::vector<std::string> left_out = leave_out_impossible(flags, c, problem, layouts, set.schedules);
  for (const ScheduleOptions& options : set.schedules) require_support(check::use_of(c, layouts, options));
  const Index rounds = flags.within("repeat", 5, 1, 1000);
  std::vector<double> links = links_of(flags);
  if (std::find(links.begin(), links.end(), 0.0) == links.end()) links.insert(links.begin(), 0.0);
  std::sort(links.begin(), links.end());
  JsonOutput output(flags.find("json"));
  FileOutput output_trace("--trace", flags.find("trace"));
  check_memory("the ranks' tensors and their gradients take", tensor_bytes(c, problem, true));
  Bench bench{c, problem, layouts, rank_operands(c, layouts), flags.text("kernel", "cpu")};

  fmt::print("{}\n{}, kernel {}, ranks are threads, {} rounds\n\n", problem_words(c, problem), attention_words(c),
             find_kernel(bench.kernel).name, rounds);
  if (!set.why.empty()) fmt::print("{}\n\n", set.why);
  fmt::print("{}", head_of(kColumns));
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
      all.push_back(record_of(line, *base, useful_flops(work)));
      fmt::print("{}\n", line_of(kColumns, all.back()));
      std::fflush(stdout);
    }
  }
  for (const std::string& reason : left_out) fmt::print("Skipped {}\n", reason);
  output.write(all);
  if (output_trace) output_trace.write(trace.json());
  return 0;
}

}  // namespace weft::tool
