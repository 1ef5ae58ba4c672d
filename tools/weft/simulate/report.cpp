#include "simulate/report.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "terminal/columns.h"

namespace weft::tool {
namespace {

using draw::Simulation;
using nlohmann::json;

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

double seconds(const std::optional<Timeline>& t) { return t ? t->seconds : 0; }

// Both passes: of one layer, or of all that the lines stand for.
json both_json(const std::vector<const Simulation*>& lines, bool all_layers) {
  double ideal = 0, all = 0, exchange = 0, overlapped = 0, imbalance = 1;
  Index bytes = 0, memory = 0;
  for (const Simulation* l : lines) {
    const double layers = static_cast<double>(all_layers ? l->layers : 1);
    const Simulation::Totals one = l->totals();
    ideal += layers * l->ideal();
    all += layers * l->seconds();
    exchange += layers * one.exchange;
    overlapped += layers * one.overlapped;
    imbalance = std::max(imbalance, one.imbalance);
    bytes += one.bytes_in * static_cast<Index>(layers);
    memory = max_of(memory, l->memory());
  }
  return {{"seconds", all},
          {"efficiency", ideal / all},
          {"overlap", exchange > 0 ? json(overlapped / exchange) : json()},
          {"imbalance", imbalance},
          {"bytes_in", bytes},
          {"memory_bytes", memory}};
}

json problem_json(const Simulation& l) {
  return {{"ranks", l.ranks},      {"tokens", l.tokens}, {"documents", l.documents},
          {"window", l.window},    {"heads", l.heads},   {"layout", weft::name(l.layout)},
          {"schedule", l.words()}, {"auto", l.chosen}};
}

}  // namespace

json to_json(const Simulation& l) {
  json out = problem_json(l);
  out["layers"] = l.layers;
  out["layer"] = l.layer;
  if (!l.refused.empty()) out["refused"] = l.refused;
  if (!l.why.empty()) out["why"] = l.why;
  if (l.forward) out["forward"] = to_json(*l.forward);
  if (l.backward) out["backward"] = to_json(*l.backward);
  if (l.seconds() <= 0) return out;
  out["both"] = both_json({&l}, false);
  out["tokens_per_second_per_rank"] = l.tokens_per_second();
  const Simulation::Totals both = l.totals();
  out["parts"] = {{"busy", both.busy}, {"imbalance", both.uneven}, {"exposed_communication", both.exposed}};
  out["tflops_per_rank"] = l.flops / l.seconds() / static_cast<double>(l.ranks) * 1e-12;
  return out;
}

json total_json(const std::vector<const Simulation*>& kinds, Index tp) {
  const Simulation& first = *kinds.front();
  json out = problem_json(first);
  out["gpus"] = first.ranks * tp;
  Index layers = 0;
  double forward = 0, backward = 0, flops = 0;
  std::vector<std::string> schedules;  // of the kinds of layers, each once
  for (const Simulation* l : kinds) {
    layers += l->layers;
    forward += seconds(l->forward) * static_cast<double>(l->layers);
    backward += seconds(l->backward) * static_cast<double>(l->layers);
    flops += l->flops * static_cast<double>(l->layers);
    const std::string words = l->words();
    if (std::find(schedules.begin(), schedules.end(), words) == schedules.end()) schedules.push_back(words);
    if (!l->refused.empty()) out["refused"] = l->refused;
  }
  out["layers"] = layers;
  out["layer"] = fmt::format("all {}", layers);
  out["schedule"] = fmt::format("{}", fmt::join(schedules, " / "));
  if (out.contains("refused")) return out;
  if (first.forward) out["forward"] = {{"seconds", forward}};
  if (first.backward) out["backward"] = {{"seconds", backward}};
  out["both"] = both_json(kinds, true);
  out["tflops_per_rank"] = flops / (forward + backward) / static_cast<double>(first.ranks) * 1e-12;
  out["tokens_per_second_per_gpu"] =
      static_cast<double>(first.tokens) / (forward + backward) / static_cast<double>(first.ranks * tp);
  return out;
}

void print_report(const std::vector<json>& records, const Shown& shown) {
  std::vector<Column> columns = {
      {"ranks", "/ranks", 6}, {"tokens", "/tokens", 11}, {"documents", "/documents", 10}, {"", "", 1}};
  if (shown.windows) columns.push_back({"window", "/window", -13});
  if (shown.heads) columns.push_back({"heads", "/heads", -8});
  if (shown.layers) columns.push_back({"layers", "/layer_words", -22});
  columns.insert(columns.end(), {{"layout", "/layout", -11}, {"schedule", "/schedule", -40}});
  const std::size_t about = columns.size();
  columns.insert(columns.end(), {{"fwd ms", "/forward/seconds", 10, 3, 1e3},
                                 {"bwd ms", "/backward/seconds", 10, 3, 1e3},
                                 {"TFLOP/s", "/tflops_per_rank", 9, 1},
                                 {"efficiency", "/both/efficiency", 11, 0, 100, "%"},
                                 {"overlapped", "/both/overlap", 11, 0, 100, "%"},
                                 {"imbalance", "/both/imbalance", 10, 2},
                                 {"MiB in", "/both/bytes_in", 10, 1, 0x1p-20},
                                 {"memory", "/both/memory_bytes", 10, Column::kBytes}});
  fmt::print("{}", head_of(columns));
  for (json record : records) {
    const bool total = record.contains("gpus");
    record["layer_words"] =
        total ? record["layer"].get<std::string>()
              : fmt::format("1 of {} {}", record["layers"].get<Index>(), record["layer"].get<std::string>());
    if (record["auto"].get<bool>()) record["schedule"] = "auto: " + record["schedule"].get<std::string>();
    if (record.contains("refused"))
      fmt::print("{}  {}\n", line_of(std::span(columns).first(about), record), record["refused"].get<std::string>());
    else
      fmt::print("{}\n", line_of(columns, record));
  }
  std::set<std::string> told;
  for (const json& record : records)
    if (record.contains("why") && told.insert(record["why"]).second)
      fmt::print("\nauto, {} ranks: {}\n", record["ranks"].get<Index>(), record["why"].get<std::string>());
}

}  // namespace weft::tool
