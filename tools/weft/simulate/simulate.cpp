// weft simulate: schedules and layouts on a machine that need not be there.
#include "simulate/simulate.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "flags/machine_flag.h"
#include "flags/schedule_flags.h"
#include "index.h"
#include "terminal/file_output.h"
#include "terminal/json_file.h"
#include "terminal/numbers.h"
#include "terminal/progress.h"
#include "terminal/words.h"
#include "verbs.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

using nlohmann::json;

constexpr Index kMostRanks = 16384, kMostLines = 4096;
constexpr Defaults kSimulateDefaults = {"64:8", "128", "bf16"};

std::vector<Pass> passes_of(const Flags& flags) {
  const std::string pass = flags.one_of("pass", {"both", "forward", "backward"});
  if (pass == "forward") return {Pass::forward};
  if (pass == "backward") return {Pass::backward};
  return {Pass::forward, Pass::backward};
}

// Values of a flag that a sweep goes through; one without the flag.
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

// Groups of heads and meshes are what they can be: a sweep goes over heads and ranks.
ScheduleOptions fitted_to(ScheduleOptions options, const check::Case& c) {
  options.head_groups = min_of(options.head_groups, c.heads_k);
  return options;
}

// What all lines have in common.
std::string heading_of(const check::Case& c, bool windows, bool heads) {
  Mask mask = c.mask;
  if (windows) mask.left = mask.right = -1;
  return fmt::format("{}, {}", mask_words(mask),
                     heads ? fmt::format("dim {}:{}, {}", c.dim_qk, c.dim_v, weft::name(c.dtype)) : attention_words(c));
}

struct Sweep {
  const Flags& flags;
  Machine machine;
  std::vector<Pass> passes;
  ChooseOptions options;
  bool automatic = false;
  std::vector<SimulatedLine> lines = {};

  TensorShape shape(const check::Case& c) const { return {.dtype = c.dtype, .dim_qk = c.dim_qk, .dim_v = c.dim_v}; }

  void run(SimulatedLine& line, const check::Case& c, const Problem& problem, const Layouts& layouts) {
    const Job job{problem, layouts, c.heads_q, c.heads_k, line.schedule, shape(c)};
    const double pairs = static_cast<double>(problem.visible_pairs()) * static_cast<double>(c.heads_q);
    for (const Pass pass : passes) {
      Timeline t = weft::simulate(job, machine, pass, {.detail = {0}, .busiest = true});
      const Index width = pass == Pass::forward ? 2 * (c.dim_qk + c.dim_v) : 2 * (3 * c.dim_qk + 2 * c.dim_v);
      line.flops += pairs * static_cast<double>(width);
      (pass == Pass::forward ? line.forward : line.backward) = std::move(t);
    }
  }
};

SimulatedLine line_of(const check::Case& c, const Problem& problem, const std::string& docs,
                      const std::string& window) {
  SimulatedLine line;
  line.ranks = c.ranks;
  line.docs = docs;
  line.window = window;
  line.heads = fmt::format("{}:{}", c.heads_q, c.heads_k);
  line.layout = c.layout;
  line.tokens = problem.packing().q().tokens();
  line.documents = problem.packing().sequences();
  return line;
}

void add_chosen(Sweep& sweep, check::Case c, const Problem& problem, const std::string& layout,
                const SimulatedLine& base) {
  SimulatedLine line = base;
  line.chosen = true;
  line.asked =
      fmt::format("{}, {}", sweep.options.schedules.empty() ? "auto" : weft::words(sweep.options.schedules.front()),
                  layout == "auto" ? "auto layout" : layout);
  const Layer layer{.problem = problem,
                    .heads_q = c.heads_q,
                    .heads_k = c.heads_k,
                    .shape = sweep.shape(c),
                    .count = 1,
                    .backward = sweep.passes.size() > 1 || sweep.passes[0] == Pass::backward};
  ChooseOptions options = sweep.options;
  try {
    if (layout != "auto") options.layouts = {layout_kind(layout)};
    const BatchChoice choice = choose({&layer, 1}, c.ranks, sweep.machine, options);
    line.layout = choice.layout;
    line.schedule = choice.layers[0].schedule();
    line.why = layout == "auto" ? choice.why() : choice.layers[0].why();
    sweep.run(line, c, problem, make_layouts(line.layout, problem, c.ranks));
  } catch (const Error& e) {
    line.refused = e.what();
  }
  sweep.lines.push_back(std::move(line));
}

void print_lines(const std::vector<SimulatedLine>& lines, bool windows, bool documents, bool heads) {
  fmt::print("{:>6} ", "ranks");
  if (documents) fmt::print("{:>10} {:>9} ", "tokens", "documents");
  if (windows) fmt::print("{:<12} ", "window");
  if (heads) fmt::print("{:<7} ", "heads");
  fmt::print("{:<11}{:<40}{:>10}{:>10}{:>9}{:>6}{:>7}{:>7}{:>10}{:>10}\n", "layout", "schedule", "fwd ms", "bwd ms",
             "TFLOP/s", "eff", "hidden", "even", "MiB in", "memory");
  for (const SimulatedLine& l : lines) {
    fmt::print("{:>6} ", l.ranks);
    if (documents) fmt::print("{:>10} {:>9} ", l.tokens, l.documents);
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
    const SimulatedLine::Totals both = l.totals();
    fmt::print("{:>10}{:>10}{:>9.1f}{:>5.0f}%{:>6}{:>7.2f}{:>10.1f}{:>10}\n", ms(l.forward), ms(l.backward),
               l.flops / l.seconds() / static_cast<double>(l.ranks) * 1e-12, 100 * l.ideal() / l.seconds(),
               both.exchange > 0 ? fmt::format("{:.0f}%", 100 * both.hidden / both.exchange) : "-", both.straggling,
               static_cast<double>(both.bytes_in) / 0x1p20, bytes_text(l.memory()));
  }
  std::set<std::string> told;
  for (const SimulatedLine& l : lines)
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
              {"straggling", t.straggling()},
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

json to_json(const SimulatedLine& l) {
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

Index SimulatedLine::memory() const {
  return max_of(forward ? forward->memory.total() : 0, backward ? backward->memory.total() : 0);
}

SimulatedLine::Totals SimulatedLine::totals() const {
  Totals all;
  std::vector<Index> bytes(at(ranks), 0);
  for (const auto* t : {&forward, &backward}) {
    if (!*t) continue;
    for (std::size_t r = 0; r < bytes.size(); ++r) {
      const RankTimes& times = (*t)->ranks[r];
      all.exchange += times.exchange;
      all.hidden += times.overlapped;
      bytes[r] += times.bytes_in;
    }
    all.straggling = std::max(all.straggling, (*t)->straggling());
  }
  all.bytes_in = *std::max_element(bytes.begin(), bytes.end());
  return all;
}

std::string SimulatedLine::name() const {
  return fmt::format("{}{}, {}", chosen ? "auto: " : "", weft::words(schedule), weft::name(layout));
}

const std::vector<FlagSpec>& simulate_flags() {
  static const std::vector<FlagSpec> flags = with_schedule_options(
      {{"machine", "NAME", "a preset (--machines lists them), or a machine file; h100-400g if not given"},
       {"machines", "", "say which machines there are, and where their numbers come from"},
       {"pass", "NAME", "both (default), forward or backward"},
       {"schedule", "LIST", "all (default), or auto, all_gather, ring, .., with the options below"},
       {"memory", "BYTES", "auto: what a rank has for one layer, 8e9 or 8G; the machine's if not given"},
       {"html", "FILE", "write a page with plots"}});
  return flags;
}

int simulate(const Flags& flags) {
  if (flags.given("machines")) return list_machines();
  Sweep sweep{flags, machine_of(flags, "h100-400g"), passes_of(flags), {}};
  constexpr Index kMostSlices = 3'000'000;  // of a simulation for a choice: some seconds in all
  sweep.options.simulated_slices = kMostSlices;
  if (flags.given("memory")) sweep.options.memory_bytes = real_size("--memory", *flags.find("memory"), "8e9");
  if (sweep.options.memory_bytes < 0) throw Error("--memory below 0", "give bytes, e.g. 8e9");
  std::vector<ScheduleOptions> fixed;
  std::string schedules = flags.text("schedule", "all");
  {
    std::vector<std::string> names = list_of("--schedule", schedules, {"all"});
    const auto automatic = std::remove(names.begin(), names.end(), "auto");
    sweep.automatic = automatic != names.end();
    names.erase(automatic, names.end());
    schedules = names.size() == 1 && names[0] == "all" ? "all" : fmt::format("{}", fmt::join(names, ","));
  }
  if (!schedules.empty()) fixed = schedules_of(flags, schedules);
  const std::vector<std::string> layouts = layout_names(flags), windows = values_of(flags, "window", "", '/'),
                                 documents = values_of(flags, "docs", "published:tokens=1048576", '/'),
                                 heads = values_of(flags, "heads", kSimulateDefaults.heads, ','),
                                 ranks = values_of(flags, "ranks", "8", ',');
  const std::size_t all = layouts.size() * windows.size() * documents.size() * heads.size() * ranks.size() *
                          (fixed.size() + (sweep.automatic ? 1 : 0));
  if (static_cast<Index>(all) > kMostLines)
    throw Error(fmt::format("{} lines", all), fmt::format("sweep over fewer values: up to {}", kMostLines));
  JsonOutput output(flags.find("json"));
  FileOutput page("--html", flags.find("html"));
  std::string heading;
  {
    Progress progress(static_cast<Index>(all), "simulations");
    for (const std::string& rank : ranks) {
      const Index number = whole_number("--ranks", rank, "8,64,512");
      if (number < 1 || number > kMostRanks)
        throw Error(fmt::format("--ranks {}", number), fmt::format("use from 1 to {}", kMostRanks));
      for (const std::string& docs : documents)
        for (const std::string& window : windows)
          for (const std::string& head : heads)
            for (const std::string& layout : layouts) {
              const bool any = layout == "auto";
              Flags one = flags.with("ranks", rank).with("heads", head).with("layout", any ? "zigzag" : layout);
              if (!flags.given("cu-seqlens")) one = one.with("docs", docs);
              if (!window.empty()) one = one.with("window", window);
              if (!flags.given("mask") && !flags.given("slices")) one = one.with("mask", "causal");
              const check::Case c = case_of(one, kSimulateDefaults);
              const Problem problem = check::problem_of(c);
              SimulatedLine base = line_of(c, problem, docs, window);
              if (heading.empty()) heading = heading_of(c, windows.size() > 1, heads.size() > 1);
              for (const ScheduleOptions& options : fixed) {
                progress.show(static_cast<Index>(sweep.lines.size()), 0);
                if (any) {  // the layout chosen for this schedule
                  sweep.options.schedules = {fitted_to(options, c)};
                  add_chosen(sweep, c, problem, layout, base);
                  sweep.options.schedules.clear();
                  continue;
                }
                SimulatedLine line = base;
                line.schedule = fitted_to(options, c);
                line.asked = line.name();
                try {
                  sweep.run(line, c, problem, check::layouts_of(c, problem));
                } catch (const Error& e) {
                  line.refused = e.what();
                }
                sweep.lines.push_back(std::move(line));
              }
              progress.show(static_cast<Index>(sweep.lines.size()), 0);
              if (sweep.automatic) add_chosen(sweep, c, problem, layout, base);
            }
    }
  }
  fmt::print("{}: {}\n{}\n\n", sweep.machine.name, sweep.machine.about, heading);
  print_lines(sweep.lines, windows.size() > 1, true, heads.size() > 1);
  json all_lines = json::array();
  for (const SimulatedLine& line : sweep.lines) all_lines.push_back(to_json(line));
  output.write({{"machine", sweep.machine.name}, {"lines", std::move(all_lines)}});
  if (page) page.write(simulated_page(sweep.machine, heading, sweep.lines));
  return 0;
}

}  // namespace weft::tool
