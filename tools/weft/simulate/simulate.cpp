// weft simulate: schedules and layouts on a machine that need not be there.
#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "bench/case.h"
#include "draw/simulation.h"
#include "flags/machine_flag.h"
#include "flags/schedule_flags.h"
#include "index.h"
#include "terminal/file_output.h"
#include "terminal/json_file.h"
#include "terminal/numbers.h"
#include "terminal/progress.h"
#include "terminal/words.h"
#include "verbs.h"
#include "weft/choose.h"
#include "weft/error.h"
#include "weft/trace.h"

namespace weft::tool {
namespace {

using draw::Simulation;
using nlohmann::json;

constexpr Index kMostRanks = 16384, kMostLines = 4096;
constexpr Defaults kSimulateDefaults = {"64:8", "128", "bf16"};

// The values of a flag that a sweep goes through; one value if the flag is not given.
std::vector<std::string> values_of(const Flags& flags, std::string_view flag, std::string_view otherwise,
                                   char separator) {
  std::vector<std::string> values;
  const std::string given = flags.text(flag, otherwise);
  for (const std::string_view part : split(given, separator)) {
    if (part.empty() && flags.given(flag))
      throw Error(fmt::format("--{}: an empty part in '{}'", flag, *flags.find(flag)), "leave it out");
    values.emplace_back(part);
  }
  return values;
}

std::vector<std::string> layout_names(const Flags& flags) {
  std::vector<std::string> all = {"contiguous", "zigzag", "striped", "balanced"};
  const std::string given = flags.text("layout", kDefaultLayout);
  return given == "all" ? all : list_of("--layout", given, all);
}

// A sweep goes over heads: groups of heads are limited to the K/V heads there are.
ScheduleOptions fitted_to(ScheduleOptions options, const check::Case& c) {
  options.head_groups = min_of(options.head_groups, c.heads_k);
  return options;
}

// What all lines of the table have in common.
std::string heading_of(const check::Case& c, bool windows, bool heads) {
  Mask mask = c.mask;
  if (windows) mask.left = mask.right = -1;
  return fmt::format("{}, {}", mask_words(mask),
                     heads ? fmt::format("dim {}:{}, {}", c.dim_qk, c.dim_v, weft::name(c.dtype)) : attention_words(c));
}

// One problem of a sweep, as the flags give its parts.
struct Asked {
  std::string ranks, docs, window, heads, layout;
};

class Sweep {
 public:
  Sweep(const Flags& flags, Machine machine) : flags_(flags), machine_(std::move(machine)), passes_(passes_of(flags)) {
    options_.simulated_slices = 3'000'000;  // of the simulations behind one choice: some seconds
    if (flags.given("memory")) options_.memory_bytes = real_size("--memory", *flags.find("memory"), "8e9");
    if (options_.memory_bytes < 0) throw Error("--memory below 0", "give bytes, e.g. 8e9");
    const AskedSchedules asked = asked_schedules(flags, flags.text("schedule", "all"));
    fixed_ = asked.given;
    automatic_ = asked.automatic;
  }

  std::size_t lines_of_problem() const { return fixed_.size() + (automatic_ ? 1 : 0); }
  const Machine& machine() const { return machine_; }
  const std::vector<Simulation>& lines() const { return lines_; }
  std::string trace_json() const { return trace_.json(); }

  // All schedules of one problem; `progress` is called before each. Returns the problem.
  template <class Progress>
  check::Case add(const Asked& asked, Progress&& progress) {
    const bool any_layout = asked.layout == "auto";
    Flags one = flags_.with("ranks", asked.ranks)
                    .with("heads", asked.heads)
                    .with("layout", any_layout ? "zigzag" : asked.layout);
    if (!flags_.given("cu-seqlens")) one = one.with("docs", asked.docs);
    if (!asked.window.empty()) one = one.with("window", asked.window);
    if (!flags_.given("mask") && !flags_.given("slices")) one = one.with("mask", "causal");
    const check::Case c = case_of(one, kSimulateDefaults);
    const Problem problem = check::problem_of(c);
    const Simulation base{.ranks = c.ranks,
                          .docs = asked.docs,
                          .window = asked.window,
                          .heads = fmt::format("{}:{}", c.heads_q, c.heads_k),
                          .layout = c.layout,
                          .tokens = problem.packing().q().tokens(),
                          .documents = problem.packing().sequences(),
                          .heads_q = c.heads_q};
    for (const ScheduleOptions& options : fixed_) {
      progress();
      const ScheduleOptions schedule = fitted_to(options, c);
      if (any_layout)
        add_chosen(c, problem, asked.layout, base, {schedule});
      else
        add_fixed(c, problem, base, schedule);
    }
    progress();
    if (automatic_) add_chosen(c, problem, asked.layout, base, {});
    return c;
  }

 private:
  // Ranks of which a trace has the events, evenly spaced.
  static std::vector<Index> traced(Index ranks) {
    std::vector<Index> some(at(min_of(ranks, 64)));
    for (std::size_t i = 0; i < some.size(); ++i)
      some[i] = static_cast<Index>(i) * ranks / static_cast<Index>(some.size());
    return some;
  }

  static TensorShape shape(const check::Case& c) { return {.dtype = c.dtype, .dim_qk = c.dim_qk, .dim_v = c.dim_v}; }

  void run(Simulation& line, const check::Case& c, const Problem& problem, const Layouts& layouts) {
    const Job job{problem, layouts, c.heads_q, c.heads_k, line.schedule, shape(c)};
    const double pairs = static_cast<double>(problem.visible_pairs()) * static_cast<double>(c.heads_q);
    for (const Pass pass : passes_) {
      Timeline t = weft::simulate(job, machine_, pass, {.detail = {0}, .busiest = true});
      line.flops += pairs * static_cast<double>(flops_per_pair(pass, c.dim_qk, c.dim_v));
      if (flags_.given("trace")) {
        const double begin = line.seconds();  // the backward follows the forward
        trace_.add(weft::simulate(job, machine_, pass, {.detail = traced(c.ranks)}),
                   fmt::format("{}. {}, {} ranks", lines_.size() + 1, line.name(), c.ranks), begin);
      }
      (pass == Pass::forward ? line.forward : line.backward) = std::move(t);
    }
  }

  void add_fixed(const check::Case& c, const Problem& problem, Simulation line, const ScheduleOptions& schedule) {
    line.schedule = schedule;
    line.asked = line.name();
    try {
      run(line, c, problem, check::layouts_of(c, problem));
    } catch (const Error& e) {
      line.refused = e.what();
    }
    lines_.push_back(std::move(line));
  }

  // A layout, a schedule or both chosen for the problem; `schedules`: among these, or all if there are none.
  void add_chosen(const check::Case& c, const Problem& problem, const std::string& layout, Simulation line,
                  std::vector<ScheduleOptions> schedules) {
    line.chosen = true;
    line.asked = fmt::format("{}, {}", schedules.empty() ? "auto" : weft::words(schedules.front()),
                             layout == "auto" ? "auto layout" : layout);
    const Layer layer{.problem = problem,
                      .heads_q = c.heads_q,
                      .heads_k = c.heads_k,
                      .shape = shape(c),
                      .count = 1,
                      .backward = passes_.back() == Pass::backward};
    ChooseOptions options = options_;
    options.schedules = std::move(schedules);
    try {
      if (layout != "auto") options.layouts = {layout_kind(layout)};
      const BatchChoice choice = choose({&layer, 1}, c.ranks, machine_, options);
      line.layout = choice.layout;
      line.schedule = choice.layers[0].schedule();
      line.why = layout == "auto" ? choice.why() : choice.layers[0].why();
      run(line, c, problem, make_layouts(line.layout, problem, c.ranks));
    } catch (const Error& e) {
      line.refused = e.what();
    }
    lines_.push_back(std::move(line));
  }

  const Flags& flags_;
  Machine machine_;
  std::vector<Pass> passes_;
  ChooseOptions options_ = {};
  std::vector<ScheduleOptions> fixed_;
  bool automatic_ = false;
  std::vector<Simulation> lines_;
  Trace trace_;
};

void print_lines(const std::vector<Simulation>& lines, bool windows, bool heads) {
  fmt::print("{:>6} {:>10} {:>9} ", "ranks", "tokens", "documents");
  if (windows) fmt::print("{:<12} ", "window");
  if (heads) fmt::print("{:<7} ", "heads");
  fmt::print("{:<11}{:<40}{:>10}{:>10}{:>9}{:>11}{:>11}{:>10}{:>10}{:>10}\n", "layout", "schedule", "fwd ms", "bwd ms",
             "TFLOP/s", "efficiency", "overlapped", "imbalance", "MiB in", "memory");
  for (const Simulation& l : lines) {
    fmt::print("{:>6} {:>10} {:>9} ", l.ranks, l.tokens, l.documents);
    if (windows) fmt::print("{:<12} ", l.window.empty() ? "-" : l.window);
    if (heads) fmt::print("{:<7} ", l.heads);
    fmt::print("{:<11}{:<40}", weft::name(l.layout), (l.chosen ? "auto: " : "") + weft::words(l.schedule));
    if (!l.refused.empty()) {
      fmt::print("  {}\n", l.refused);
      continue;
    }
    const auto ms = [](const std::optional<Timeline>& t) {
      return t ? fmt::format("{:.3f}", t->seconds * 1e3) : std::string("-");
    };
    const Simulation::Totals both = l.totals();
    fmt::print("{:>10}{:>10}{:>9.1f}{:>10.0f}%{:>11}{:>10.2f}{:>10.1f}{:>10}\n", ms(l.forward), ms(l.backward),
               l.flops / l.seconds() / static_cast<double>(l.ranks) * 1e-12, 100 * l.efficiency(),
               both.exchange > 0 ? fmt::format("{:.0f}%", 100 * both.overlapped / both.exchange) : "-", both.imbalance,
               static_cast<double>(both.bytes_in) / 0x1p20, bytes_text(l.memory()));
  }
  std::set<std::string> told;
  for (const Simulation& l : lines)
    if (!l.why.empty() && told.insert(l.why).second) fmt::print("\nauto, {} ranks: {}\n", l.ranks, l.why);
}

json to_json(const Timeline& t) {
  double compute = 0, waiting = 0;
  for (const RankTimes& r : t.ranks) {
    compute = std::max(compute, r.compute);
    waiting = std::max(waiting, r.waiting);
  }
  json out = {{"seconds", t.seconds},
              {"ideal", t.ideal},
              {"efficiency", t.efficiency()},
              {"overlap", t.overlap()},
              {"imbalance", t.straggling()},
              {"slowest", t.slowest()},
              {"longest_compute", compute},
              {"longest_waiting", waiting},
              {"bytes_in", t.bytes_in()},
              {"memory_bytes", t.memory.total()},
              {"workspace_bytes", t.memory.workspace},
              {"planned_ranks", t.planned},
              {"timelines", json::array()}};
  for (const RankTimeline& rank : t.detail) {
    json events = json::array();
    constexpr std::size_t kMost = 1000;
    for (std::size_t n = 0; n < std::min(kMost, rank.events.size()); ++n) {
      const TimelineEvent& e = rank.events[n];
      events.push_back({{"kind", weft::name(e.kind)},
                        {"name", e.name},
                        {"step", e.step},
                        {"begin", e.begin},
                        {"end", e.end},
                        {"pairs", e.pairs},
                        {"bytes_in", e.bytes_in},
                        {"bytes_out", e.bytes_out}});
    }
    out["timelines"].push_back(
        {{"rank", rank.rank}, {"events", std::move(events)}, {"events_total", rank.events.size()}});
  }
  return out;
}

json to_json(const Simulation& l) {
  json out = {{"ranks", l.ranks},
              {"tokens", l.tokens},
              {"documents", l.documents},
              {"window", l.window},
              {"heads", l.heads},
              {"layout", weft::name(l.layout)},
              {"schedule", weft::words(l.schedule)},
              {"auto", l.chosen}};
  if (!l.refused.empty()) out["refused"] = l.refused;
  if (!l.why.empty()) out["why"] = l.why;
  if (l.forward) out["forward"] = to_json(*l.forward);
  if (l.backward) out["backward"] = to_json(*l.backward);
  if (l.seconds() > 0) out["tflops_per_rank"] = l.flops / l.seconds() / static_cast<double>(l.ranks) * 1e-12;
  return out;
}

int list_machines() {
  for (const Machine& m : machine_presets()) {
    fmt::print("{:<14}{}\n", m.name, m.about);
    for (const Level& l : m.levels)
      fmt::print("    {:<14}{:>8.0f} GB/s  {:>5.0f} us  {}\n", l.name, l.bandwidth * 1e-9, l.latency * 1e6, l.source);
    const std::set<std::string> sources = [&] {
      std::set<std::string> all;
      for (const KernelRate& k : m.kernels) all.insert(k.source);
      return all;
    }();
    for (const std::string& s : sources) fmt::print("    kernels: {}\n", s);
    fmt::print("    memory: {}\n", m.source);
  }
  return 0;
}

}  // namespace

std::vector<FlagSpec> simulate_flags() {
  return with_schedule_options(
      {{"machine", "NAME", "a preset (--machines lists them), or a machine file; h100-400g if not given"},
       {"machines", "", "say which machines there are, and where their numbers come from"},
       {"pass", "NAME", "both (default), forward or backward"},
       {"schedule", "LIST", "all (default), or auto, all_gather, ring, .., with the options below"},
       {"memory", "BYTES", "auto: what a rank has for one layer, 8e9 or 8G; the machine's if not given"},
       {"html", "FILE", "write a page with plots"},
       {"trace", "FILE", "write the timelines of up to 64 ranks for ui.perfetto.dev or chrome://tracing"}});
}

int simulate(const Flags& flags) {
  if (flags.given("machines")) return list_machines();
  Sweep sweep(flags, machine_of(flags, "h100-400g"));
  const std::vector<std::string> layouts = layout_names(flags), windows = values_of(flags, "window", "", '/'),
                                 documents = values_of(flags, "docs", "published:tokens=1048576", '/'),
                                 heads = values_of(flags, "heads", kSimulateDefaults.heads, ','),
                                 ranks = values_of(flags, "ranks", "8", ',');
  const std::size_t all =
      layouts.size() * windows.size() * documents.size() * heads.size() * ranks.size() * sweep.lines_of_problem();
  if (static_cast<Index>(all) > kMostLines)
    throw Error(fmt::format("{} lines", all), fmt::format("sweep over fewer values: up to {}", kMostLines));
  for (const std::string& rank : ranks)
    if (const Index n = whole_number("--ranks", rank, "8,64,512"); n < 1 || n > kMostRanks)
      throw Error(fmt::format("--ranks {}", n), fmt::format("use from 1 to {}", kMostRanks));
  JsonOutput output(flags.find("json"));
  FileOutput page("--html", flags.find("html")), trace("--trace", flags.find("trace"));
  std::string heading;
  {
    Progress progress(static_cast<Index>(all), "simulations");
    const auto show = [&] { progress.show(static_cast<Index>(sweep.lines().size()), 0); };
    for (const std::string& rank : ranks)
      for (const std::string& docs : documents)
        for (const std::string& window : windows)
          for (const std::string& head : heads)
            for (const std::string& layout : layouts) {
              const check::Case c = sweep.add({rank, docs, window, head, layout}, show);
              if (heading.empty()) heading = heading_of(c, windows.size() > 1, heads.size() > 1);
            }
  }
  const Machine& machine = sweep.machine();
  fmt::print("{}: {}\n{}\n\n", machine.name, machine.about, heading);
  print_lines(sweep.lines(), windows.size() > 1, heads.size() > 1);
  json lines = json::array();
  for (const Simulation& line : sweep.lines()) lines.push_back(to_json(line));
  output.write({{"machine", machine.name}, {"lines", std::move(lines)}});
  if (trace) trace.write(sweep.trace_json());
  if (page) page.write(draw::html(machine, heading, "weft simulate" + flags.words(), sweep.lines()));
  return 0;
}

}  // namespace weft::tool
