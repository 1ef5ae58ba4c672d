#include "draw/simulation.h"

#include <algorithm>

#include "draw/formatting.h"
#include "draw/page_json.h"
#include "draw/palette.h"
#include "index.h"
#include "text.h"
#include "weft/choose.h"
#include "weft/version.h"

namespace weft::draw {
namespace {

constexpr int kExact = 15;                           // digits, so that the page rounds as the table does
constexpr Index kTimelines = 24, kRankEvents = 400;  // timelines of a page, and events of a rank in one

std::string window_words(const Simulation& s) {
  if (!s.layer.empty()) return text(", one of ", counted(s.layers, "layer"), " ", s.layer);
  return s.window.empty() ? "" : text(", window ", s.window);
}

// Simulations of one problem on any ranks: one plot.
std::string sweep_words(const Simulation& s) {
  return text("documents ", s.docs, ", heads ", s.heads, window_words(s));
}

// Simulations of one problem on as many ranks: one section.
std::string problem_words(const Simulation& s) {
  return text(counted(s.ranks, "rank"), ": ", counted(s.documents, "document"), ", ", counted(s.tokens, "token"),
              window_words(s), ", heads ", s.heads);
}

std::string timelines_json(const Simulation& s, Index& left) {
  const auto one = [&](const std::optional<Timeline>& t) {
    return t && left-- > 0 ? timeline_json(*t, 2 * kRankEvents, kRankEvents) : std::string("null");
  };
  const std::string forward = one(s.forward), backward = one(s.backward);
  return text("{\"forward\":", forward, ",\"backward\":", backward, "}");
}

std::string line_json(const Simulation& s, Index& timelines_left) {
  const std::string head =
      text("{\"name\":", json_string(s.name()), ",\"ranks\":", s.ranks, ",\"chosen\":", s.chosen ? "true" : "false",
           ",\"schedule\":", json_string(s.words()), ",\"layout\":", json_string(name(s.layout)),
           ",\"problem\":", json_string(problem_words(s)));
  if (!s.refused.empty() || s.seconds() <= 0) return text(head, ",\"refused\":", json_string(s.refused), "}");
  const Simulation::Totals both = s.totals();
  const auto ms = [](const std::optional<Timeline>& t) {
    return t ? json_number(t->seconds, kExact) : std::string("null");
  };
  return text(head, ",\"sweep\":", json_string(sweep_words(s)), ",\"asked\":", json_string(s.asked),
              ",\"why\":", json_string(s.why), ",\"heads\":", s.heads_q, ",\"forward\":", ms(s.forward),
              ",\"backward\":", ms(s.backward), ",\"efficiency\":", json_number(s.efficiency(), kExact),
              ",\"overlapped\":",
              both.exchange > 0 ? json_number(both.overlapped / both.exchange, kExact) : std::string("null"),
              ",\"imbalance\":", json_number(both.imbalance, kExact), ",\"parts\":[", json_number(both.busy, kExact),
              ",", json_number(both.uneven, kExact), ",", json_number(both.exposed, kExact),
              "],\"tokensPerSecond\":", json_number(s.tokens_per_second(), kExact), ",\"bytesIn\":", both.bytes_in,
              ",\"memory\":", s.memory(), ",\"times\":", timelines_json(s, timelines_left), "}");
}

}  // namespace

Index Simulation::memory() const {
  return max_of(forward ? forward->memory.total() : 0, backward ? backward->memory.total() : 0);
}

Simulation::Totals Simulation::totals() const {
  Totals all;
  std::vector<Index> bytes(at(ranks), 0);
  for (const auto* pass : {&forward, &backward}) {
    if (!*pass) continue;
    double longest = 0, sum = 0;
    for (std::size_t r = 0; r < bytes.size(); ++r) {
      const RankTimes& times = (*pass)->ranks[r];
      longest = std::max(longest, times.compute + times.rows);
      sum += times.compute + times.rows;
      all.exchange += times.exchange;
      all.overlapped += times.overlapped;
      bytes[r] += times.bytes_in;
    }
    all.imbalance = std::max(all.imbalance, (*pass)->straggling());
    all.busy += sum / static_cast<double>(ranks);
    all.uneven += longest - sum / static_cast<double>(ranks);
    all.exposed += (*pass)->seconds - longest;
  }
  all.bytes_in = *std::max_element(bytes.begin(), bytes.end());
  return all;
}

std::string Simulation::words() const { return text(weft::words(schedule), source > 0 ? ", latent" : ""); }
std::string Simulation::name() const { return text(chosen ? "auto: " : "", words(), ", ", weft::name(layout)); }

std::string html(const Machine& machine, const std::string& heading, const std::string& command,
                 const std::vector<Simulation>& all) {
  JsonList lines, notes;
  Index timelines = 0, left = kTimelines;
  for (const Simulation& s : all) {
    lines.add(line_json(s, left));
    timelines += s.forward.has_value() + s.backward.has_value();
  }
  if (timelines > kTimelines)
    notes.add(json_string(text("The page has the first ", kTimelines, " of ", timelines, " timelines.")));
  return filled_page(
      machine.name,
      text("{\"kind\":\"simulate\",\"title\":", json_string(machine.name), ",\"words\":", json_string(machine.about),
           ",\"memory\":", json_number(machine.memory_bytes, kExact), ",\"heading\":", json_string(heading),
           ",\"notes\":", notes.json(), ",\"command\":", json_string(command), ",\"version\":", json_string(version()),
           ",\"palettes\":", palettes_json(), ",\"lines\":", lines.json(), "}"));
}

}  // namespace weft::draw
