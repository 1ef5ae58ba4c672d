// weft simulate: schedules and layouts on a machine that need not be there.
#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "bench/case.h"
#include "check/cases/tree_case.h"
#include "draw/simulation.h"
#include "flags/machine_flag.h"
#include "flags/schedule_flags.h"
#include "index.h"
#include "simulate/report.h"
#include "terminal/file_output.h"
#include "terminal/json_file.h"
#include "terminal/numbers.h"
#include "terminal/progress.h"
#include "terminal/words.h"
#include "verbs.h"
#include "weft/choose.h"
#include "weft/error.h"
#include "weft/models.h"
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
  std::vector<std::string> all = {"contiguous", "zigzag", "striped", "balanced", "placed"};
  const std::string given = flags.text("layout", kDefaultLayout);
  return given == "all" ? all : list_of("--layout", given, all);
}

// What all lines of the table have in common.
std::string heading_of(const check::Case& c, const Model* model, const Shown& shown) {
  Mask mask = c.mask;
  if (shown.windows) mask.left = mask.right = -1;
  return fmt::format(
      "{}, {}", model != nullptr ? std::string(model->name) : mask_words(mask),
      shown.heads ? fmt::format("dim {}:{}, {}", c.dim_qk, c.dim_v, weft::name(c.dtype)) : attention_words(c));
}

// What the times are of.
std::string times_words(const Model* model, Index tp) {
  std::string words = "fwd, bwd: attention of one layer";
  if (model != nullptr) words += fmt::format(" and of all {} (a step)", model->layer_count());
  words += ", start of all ranks to end of the last; TFLOP/s of a GPU; memory of one layer";
  if (tp > 1)
    words += fmt::format("\ntensor parallel {}: heads of a GPU; neighbouring ranks are {} GPUs apart", tp, tp);
  return words;
}

// The heads of one GPU under tensor parallelism. More GPUs than K/V heads hold copies of them.
void divide_heads(check::Case& c, Index tp) {
  const bool copies = tp % c.heads_k == 0;
  if (c.heads_q % tp != 0 || (c.heads_k % tp != 0 && !copies))
    throw Error(fmt::format("--tp {} of heads {}:{}", tp, c.heads_q, c.heads_k),
                "use a divisor of the heads, or a multiple of the K/V heads that divides the query heads");
  c.heads_q /= tp;
  c.heads_k = copies ? 1 : c.heads_k / tp;
}

// Layers of one kind: without a model there is one.
struct Kind {
  std::string words;
  Index count = 1;
  check::Case given;
  Problem problem;
};
std::vector<Kind> kinds_of(const check::Case& c, const Model* model) {
  if (model == nullptr) return {{"", 1, c, check::problem_of(c)}};
  std::vector<Kind> kinds;
  for (const ModelLayers& layers : model->layers) {
    check::Case one = c;
    if (std::optional<check::TreeCase> tree = one.tree) {
      tree->left = layers.mask.left;
      tree->chunk = layers.mask.chunk;
      check::set_tree(one, std::move(*tree));
    } else {
      one.mask = layers.mask;
    }
    const std::string words = layers.mask.chunk       ? fmt::format("chunk {}", *layers.mask.chunk)
                              : layers.mask.left >= 0 ? fmt::format("window {},0", layers.mask.left)
                                                      : "full";
    kinds.push_back({words, layers.count, one, check::problem_of(one)});
  }
  return kinds;
}

// The kind with most work, by whose pairs tokens are dealt out: all layers have one layout.
const Kind& main_kind(const std::vector<Kind>& kinds) {
  const auto work = [](const Kind& k) {
    return static_cast<double>(k.problem.visible_pairs()) * static_cast<double>(k.count);
  };
  return *std::max_element(kinds.begin(), kinds.end(), [&](const Kind& a, const Kind& b) { return work(a) < work(b); });
}

// One problem of a sweep, as the flags give its parts.
struct Asked {
  std::string ranks, docs, window, heads, layout;
};

class Sweep {
 public:
  Sweep(const Flags& flags, const Machine& machine)
      : flags_(flags),
        tp_(flags.within("tp", 1, 1, kMostRanks)),
        machine_(tensor_parallel(machine, tp_)),
        passes_(passes_of(flags)) {
    flags.exclude("model", {"heads", "dim", "mask", "align", "window", "chunk", "slices", "docs-k", "cu-seqlens-k"},
                  "a model brings its heads, widths and masks");
    if (const std::string* name = flags.find("model")) model_ = &weft::model(*name);
    options_.simulated_slices = 12'000'000;  // of the simulations behind one choice: some seconds
    if (flags.given("memory")) options_.memory_bytes = real_size("--memory", *flags.find("memory"), "8e9");
    if (options_.memory_bytes < 0) throw Error("--memory below 0", "give bytes, e.g. 8e9");
    const AskedSchedules asked = asked_schedules(flags, flags.text("schedule", "all"));
    fixed_ = asked.given;
    automatic_ = asked.automatic;
    const std::vector<std::string> words = values_of(flags, "schedule", "all", ',');
    every_ = std::find(words.begin(), words.end(), "all") != words.end();
    for (const std::string& option : schedule_option_names()) every_ = every_ && !flags.given(option);
  }

  // At most: of `all`, more heads have more variants.
  std::size_t lines_of_problem(Index ranks) const {
    const std::size_t schedules = every_ ? schedules_of_problem(ranks, kMaxTokens, kMaxTokens).size() : fixed_.size();
    return (schedules + (automatic_ ? 1 : 0)) * (model_ != nullptr ? model_->layers.size() : 1) * sources().size();
  }
  const Model* model() const { return model_; }
  Index tp() const { return tp_; }
  const Machine& machine() const { return machine_; }
  const std::vector<Simulation>& lines() const { return lines_; }
  const std::vector<std::string>& latent_words() const { return latent_words_; }  // a line a problem
  std::string trace_json() const { return trace_.json(); }

  // All schedules of one problem; `progress` is called before each. Returns the problem.
  template <class Progress>
  check::Case add(const Asked& asked, Progress&& progress) {
    const bool any_layout = asked.layout == "auto";
    Flags one = flags_.with("ranks", asked.ranks)
                    .with("heads", asked.heads)
                    .with("layout", any_layout ? "zigzag" : asked.layout);
    if (!flags_.given("cu-seqlens") && !flags_.given("tree")) one = one.with("docs", asked.docs);
    if (!asked.window.empty()) one = one.with("window", asked.window);
    if (!flags_.given("mask") && !flags_.given("slices")) one = one.with("mask", "causal");
    if (model_ != nullptr)
      one = one.with("heads", fmt::format("{}:{}", model_->heads_q, model_->heads_k))
                .with("dim", fmt::format("{}:{}", model_->dim_qk, model_->dim_v));
    check::Case c = case_of(one, kSimulateDefaults);
    divide_heads(c, tp_);
    const std::vector<Kind> kinds = kinds_of(c, model_);
    const Packing& packing = kinds[0].problem.packing();
    Simulation base{.ranks = c.ranks,
                    .docs = asked.docs,
                    .window = asked.window,
                    .heads = fmt::format("{}:{}", c.heads_q, c.heads_k),
                    .layout = c.layout,
                    .tokens = packing.q().tokens(),
                    .documents = packing.sequences(),
                    .heads_q = c.heads_q};
    const std::size_t first = lines_.size();
    for (const Index source : sources()) {
      base.source = source;
      for (const ScheduleOptions& schedule : schedules_of_problem(c.ranks, c.heads_q, c.heads_k)) {
        progress();
        if (any_layout)
          add_chosen(kinds, asked.layout, base, {schedule});
        else
          add_fixed(kinds, base, schedule);
      }
      progress();
      if (automatic_) add_chosen(kinds, asked.layout, base, {});
    }
    compare_sources(first, kinds.size(), c);
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

  // Those that were named; of `all` also what `auto` would consider.
  std::vector<ScheduleOptions> schedules_of_problem(Index ranks, Index heads_q, Index heads_k) const {
    std::vector<ScheduleOptions> all = fixed_;
    std::set<std::string> said;
    for (ScheduleOptions& each : all) {
      each.head_groups = min_of(each.head_groups, heads_k);  // a sweep goes over heads
      said.insert(weft::words(each));
    }
    if (!every_) return all;
    for (const ScheduleOptions& each : usual_schedules(machine_, ranks, heads_q, heads_k))
      if (said.insert(weft::words(each)).second) all.push_back(each);
    return all;
  }

  // What moves: K and V, and where they are made of a latent, that in their place too.
  std::vector<Index> sources() const {
    return model_ != nullptr && model_->latent > 0 ? std::vector<Index>{0, model_->latent} : std::vector<Index>{0};
  }

  TensorShape shape(const check::Case& c, Index source) const {
    return {.dtype = c.dtype,
            .dim_qk = c.dim_qk,
            .dim_v = c.dim_v,
            .dsink = model_ != nullptr && model_->sink,
            .source = source};
  }

  // Says which is faster, K and V or the latent, of the problem whose lines begin there.
  void compare_sources(std::size_t first, std::size_t kinds, const check::Case& c) {
    if (sources().size() < 2) return;
    const Simulation* best[2] = {nullptr, nullptr};
    for (std::size_t n = first; n < lines_.size(); n += kinds) {
      const Simulation& line = lines_[n];
      if (!line.refused.empty()) continue;
      const Simulation*& of = best[line.source > 0 ? 1 : 0];
      if (of == nullptr || line.seconds() < of->seconds()) of = &line;
    }
    if (best[0] == nullptr || best[1] == nullptr) return;
    const bool pays = best[1]->seconds() <= best[0]->seconds();
    const double ratio = static_cast<double>(c.heads_k * (c.dim_qk + c.dim_v)) / static_cast<double>(model_->latent);
    latent_words_.push_back(
        fmt::format("{} ranks, {} heads: {} in {:.3f} ms, {} in {:.3f} ms; the latent is {:.1f} times fewer bytes, and "
                    "expanding it "
                    "on every rank costs {} than it saves",
                    best[0]->ranks, c.heads_k, best[1]->name(), best[1]->seconds() * 1e3, best[0]->name(),
                    best[0]->seconds() * 1e3, ratio, pays ? "less" : "more"));
  }

  void run(Simulation& line, const Kind& kind, const Layouts& layouts) {
    const check::Case& c = kind.given;
    const Job job{kind.problem, layouts, c.heads_q, c.heads_k, line.schedule, shape(c, line.source)};
    const double pairs = static_cast<double>(kind.problem.visible_pairs()) * static_cast<double>(c.heads_q);
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

  // A line for each kind of layer; what cannot be run says why.
  template <class Run>
  void add_lines(const std::vector<Kind>& kinds, const Simulation& base, const Run& run_kind) {
    for (std::size_t n = 0; n < kinds.size(); ++n) {
      Simulation line = base;
      line.layers = kinds[n].count;
      line.layer = kinds[n].words;
      try {
        run_kind(n, line);
      } catch (const Error& e) {
        line.refused = e.what();
      }
      lines_.push_back(std::move(line));
    }
  }

  void add_fixed(const std::vector<Kind>& kinds, Simulation base, const ScheduleOptions& schedule) {
    base.schedule = schedule;
    base.asked = base.name();
    const Kind& main = main_kind(kinds);
    std::optional<Layouts> layouts;  // made where its error is that of a line
    add_lines(kinds, base, [&](std::size_t n, Simulation& line) {
      if (!layouts) layouts = check::layouts_of(main.given, main.problem);
      run(line, kinds[n], *layouts);
    });
  }

  // A layout, schedules or both chosen for the problem; `schedules`: among these, or all if there are none.
  void add_chosen(const std::vector<Kind>& kinds, const std::string& layout, Simulation base,
                  std::vector<ScheduleOptions> schedules) {
    base.chosen = true;
    base.asked = fmt::format("{}{}, {}", schedules.empty() ? "auto" : weft::words(schedules.front()),
                             base.source > 0 ? ", latent" : "", layout == "auto" ? "auto layout" : layout);
    std::vector<Layer> layers;
    for (const Kind& kind : kinds)
      layers.push_back({.problem = kind.problem,
                        .heads_q = kind.given.heads_q,
                        .heads_k = kind.given.heads_k,
                        .shape = shape(kind.given, base.source),
                        .count = kind.count,
                        .backward = passes_.back() == Pass::backward});
    ChooseOptions options = options_;
    options.schedules = std::move(schedules);
    std::optional<BatchChoice> choice;
    add_lines(kinds, base, [&](std::size_t n, Simulation& line) {
      if (layout != "auto") options.layouts = {layout_kind(layout)};
      if (!choice) choice = choose(layers, base.ranks, machine_, options);
      line.layout = choice->layout;
      line.schedule = choice->layers[n].schedule();
      line.why = layout == "auto" ? choice->why() : choice->layers[n].why();
      run(line, kinds[n], make_layouts(line.layout, main_kind(kinds).problem, base.ranks));
    });
  }

  const Flags& flags_;
  Index tp_;
  Machine machine_;
  const Model* model_ = nullptr;
  std::vector<Pass> passes_;
  ChooseOptions options_ = {};
  std::vector<ScheduleOptions> fixed_;
  bool automatic_ = false, every_ = false;
  std::vector<Simulation> lines_;
  std::vector<std::string> latent_words_;
  Trace trace_;
};

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

int list_models() {
  for (const Model& m : models()) {
    fmt::print("{:<14}heads {}:{}, dim {}:{}, layers", m.name, m.heads_q, m.heads_k, m.dim_qk, m.dim_v);
    for (const ModelLayers& l : m.layers)
      fmt::print(" {} x {}{}", l.count, mask_words(l.mask), &l == &m.layers.back() ? "" : ",");
    fmt::print("{}{}\n    {}\n", m.sink ? ", learnable sinks" : "",
               m.latent > 0 ? fmt::format(", latent {}", m.latent) : "", m.source);
  }
  return 0;
}

}  // namespace

std::vector<FlagSpec> simulate_flags() {
  std::vector<std::string_view> names;
  for (const Model& m : models()) names.push_back(m.name);
  return with_schedule_options(
      {{"machine", "NAME", "a preset (--machines lists them), or a machine file; h100-400g if not given"},
       {"machines", "", "say which machines there are, and where their numbers come from"},
       {"model", "NAME",
        fmt::format("heads, widths, layers and masks of {}: times of its layers and of all of them",
                    fmt::join(names, ", "))},
       {"models", "", "say which models there are, and where their numbers come from"},
       {"tp", "N", "tensor-parallel degree: heads are divided by it, and ranks (context parallel) are N GPUs apart"},
       {"pass", "NAME", "both (default), forward or backward"},
       {"schedule", "LIST", "all (default: each, and with the options that auto would try), or auto, all_gather, .."},
       {"memory", "BYTES", "auto: what a rank has for one layer, 8e9 or 8G; the machine's if not given"},
       {"html", "FILE", "write a page with plots"},
       {"trace", "FILE", "write the timelines of up to 64 ranks for ui.perfetto.dev or chrome://tracing"}});
}

int simulate(const Flags& flags) {
  if (flags.given("machines")) return list_machines();
  if (flags.given("models")) return list_models();
  Sweep sweep(flags, machine_of(flags, "h100-400g"));
  const std::vector<std::string> layouts = layout_names(flags), windows = values_of(flags, "window", "", '/'),
                                 documents = values_of(flags, "docs", "published:tokens=1048576", '/'),
                                 heads = values_of(flags, "heads", kSimulateDefaults.heads, ','),
                                 ranks = values_of(flags, "ranks", "8", ',');
  std::size_t all = 0;
  for (const std::string& rank : ranks) {
    const Index n = whole_number("--ranks", rank, "8,64,512");
    if (n < 1 || n > kMostRanks) throw Error(fmt::format("--ranks {}", n), fmt::format("use from 1 to {}", kMostRanks));
    all += layouts.size() * windows.size() * documents.size() * heads.size() * sweep.lines_of_problem(n);
  }
  if (static_cast<Index>(all) > kMostLines)
    throw Error(fmt::format("{} lines", all), fmt::format("sweep over fewer values: up to {}", kMostLines));
  JsonOutput output(flags.find("json"));
  FileOutput page("--html", flags.find("html")), trace("--trace", flags.find("trace"));
  const Shown shown{windows.size() > 1, heads.size() > 1, sweep.model() != nullptr};
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
              if (heading.empty()) heading = heading_of(c, sweep.model(), shown);
            }
  }
  const Machine& machine = sweep.machine();
  fmt::print("{}: {}\n{}\n{}\n\n", machine.name, machine.about, heading, times_words(sweep.model(), sweep.tp()));
  std::vector<json> records, lines, totals;
  std::vector<const Simulation*> kinds;
  for (const Simulation& line : sweep.lines()) {
    lines.push_back(to_json(line));
    records.push_back(lines.back());
    if (sweep.model() == nullptr) continue;
    kinds.push_back(&line);
    if (kinds.size() < sweep.model()->layers.size()) continue;
    totals.push_back(total_json(kinds, sweep.tp()));
    records.push_back(totals.back());
    kinds.clear();
  }
  print_report(records, shown);
  for (std::size_t n = 0; n < sweep.latent_words().size(); ++n)
    fmt::print("{}latent, {}\n", n == 0 ? "\n" : "", sweep.latent_words()[n]);
  json out = {{"machine", machine.name},
              {"memory_bytes_per_rank", machine.memory_bytes},
              {"tp", sweep.tp()},
              {"lines", std::move(lines)}};
  if (!sweep.latent_words().empty()) out["latent"] = sweep.latent_words();
  if (sweep.model() != nullptr) {
    out["model"] = sweep.model()->name;
    out["totals"] = std::move(totals);
  }
  output.write(out);
  if (trace) trace.write(sweep.trace_json());
  if (page) page.write(draw::html(machine, heading, "weft simulate" + flags.words(), sweep.lines()));
  return 0;
}

}  // namespace weft::tool
