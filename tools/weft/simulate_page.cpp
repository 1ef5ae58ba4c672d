// The page of weft simulate: bars, lines over ranks, and timelines, as one file without scripts.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include <fmt/format.h>

#include "draw/written.h"
#include "numbers.h"
#include "simulate.h"

namespace weft::tool {
namespace {

using draw::escaped;

constexpr const char* kColours[] = {"#3366cc", "#dc3912", "#ff9900", "#109618", "#990099",
                                    "#0099c6", "#dd4477", "#66aa00", "#b82e2e", "#316395"};
const char* colour(std::size_t n) { return kColours[n % std::size(kColours)]; }

constexpr const char* kHead =
    "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
    "content=\"width=device-width\"><title>weft simulate</title><style>"
    ":root{color-scheme:light dark;--ink:#222;--faint:#888;--line:#ccc;--ground:#fff}"
    "@media(prefers-color-scheme:dark){:root{--ink:#eee;--faint:#999;--line:#444;--ground:#181818}}"
    "body{font:15px/1.4 system-ui,sans-serif;color:var(--ink);background:var(--ground);max-width:70rem;margin:2rem "
    "auto;"
    "padding:0 1rem}table{border-collapse:collapse;font-size:13px}td,th{padding:.15rem .6rem;text-align:right;"
    "border-bottom:1px solid var(--line)}td.t,th.t{text-align:left}svg{width:100%;height:auto}"
    "svg text{fill:var(--ink);font:11px system-ui,sans-serif}svg .f{fill:var(--faint)}svg .l{stroke:var(--line)}"
    "pre{white-space:pre-wrap}@media print{body{margin:0}}</style></head><body>";

// Bars of forward and backward, one line each.
std::string bars(const std::vector<const SimulatedLine*>& lines) {
  constexpr int kHigh = 18, kLeft = 330, kWide = 520;
  double most = 0;
  for (const SimulatedLine* l : lines) most = std::max(most, l->seconds());
  if (most <= 0) return "";
  std::string out = fmt::format("<svg viewBox=\"0 0 1000 {}\" role=\"img\" aria-label=\"milliseconds by schedule\">",
                                kHigh * static_cast<int>(lines.size()) + 4);
  int y = 0;
  for (const SimulatedLine* l : lines) {
    const double forward = l->forward ? l->forward->seconds : 0, all = l->seconds();
    const double a = kWide * forward / most, b = kWide * all / most;
    out += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>", kLeft - 8, y + 13, escaped(l->name()));
    out +=
        fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{:.1f}\" height=\"12\" fill=\"{}\"/>", kLeft, y + 3, a, colour(0));
    out += fmt::format("<rect x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"12\" fill=\"{}\"/>", kLeft + a, y + 3,
                       b - a, colour(5));
    out += fmt::format("<text x=\"{:.1f}\" y=\"{}\">{:.3g} ms, {:.0f} % of ideal</text>", kLeft + b + 6, y + 13,
                       all * 1e3, 100 * l->ideal() / all);
    y += kHigh;
  }
  return out + "</svg>";
}

// Share of the ideal over ranks, a line a schedule and layout.
std::string curves(const std::vector<const SimulatedLine*>& lines) {
  std::map<std::string, std::vector<const SimulatedLine*>> by_name;
  std::set<Index> ranks;
  for (const SimulatedLine* l : lines) {
    by_name[l->chosen ? "auto" : l->name()].push_back(l);
    ranks.insert(l->ranks);
  }
  if (ranks.size() < 2) return "";
  constexpr double kLeft = 50, kWide = 560, kTop = 10, kHigh = 260;
  const auto x = [&](Index rank) {
    const auto at = std::distance(ranks.begin(), ranks.find(rank));
    return kLeft + kWide * static_cast<double>(at) / static_cast<double>(ranks.size() - 1);
  };
  double best = 0;
  for (const SimulatedLine* l : lines) best = std::max(best, l->ideal() / l->seconds());
  const double top = std::min(1.0, std::max(0.1, std::ceil(best * 10) / 10));
  const auto y = [&](double share) { return kTop + kHigh * (1 - share / top); };
  std::string out = "<svg viewBox=\"0 0 1000 310\" role=\"img\" aria-label=\"share of the ideal over ranks\">";
  for (int n = 0; n <= 4; ++n) {
    const double share = top * n / 4;
    out += fmt::format(
        "<line class=\"l\" x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\"/><text class=\"f\" x=\"{}\" "
        "y=\"{:.1f}\" text-anchor=\"end\">{:.0f} %</text>",
        kLeft, kLeft + kWide, y(share), y(share), kLeft - 6, y(share) + 4, 100 * share);
  }
  for (const Index rank : ranks)
    out += fmt::format("<text class=\"f\" x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>", x(rank),
                       kTop + kHigh + 18, rank);
  std::size_t n = 0;
  for (const auto& [name, of] : by_name) {
    std::string points;
    for (const SimulatedLine* l : of)
      points += fmt::format("{:.1f},{:.1f} ", x(l->ranks), y(l->ideal() / l->seconds()));
    out += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>", points, colour(n));
    out += fmt::format("<text x=\"{}\" y=\"{}\"><tspan fill=\"{}\">&#9632;</tspan> {}</text>", kLeft + kWide + 24,
                       20 + 14 * static_cast<int>(n), colour(n), escaped(name));
    ++n;
  }
  return out + "</svg>";
}

// Exchanges above, computes below, of the ranks that were kept.
std::string timeline(const Timeline& t) {
  constexpr int kLeft = 90, kWide = 880, kRow = 30;
  constexpr std::size_t kMostEvents = 400;
  if (t.seconds <= 0) return "";
  std::string out = fmt::format("<svg viewBox=\"0 0 1000 {}\" role=\"img\" aria-label=\"timeline\">",
                                kRow * static_cast<int>(t.detail.size()) + 18);
  int top = 0;
  for (const RankTimeline& rank : t.detail) {
    out += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">rank {}</text>", kLeft - 8, top + 18, rank.rank);
    std::size_t drawn = 0;
    for (const TimelineEvent& e : rank.events) {
      if (e.kind == TimelineEvent::Kind::wait || ++drawn > kMostEvents) continue;
      const bool moves = e.kind == TimelineEvent::Kind::exchange;
      const double x = kLeft + kWide * e.begin / t.seconds, w = std::max(0.3, kWide * (e.end - e.begin) / t.seconds);
      out += fmt::format(
          "<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"11\" fill=\"{}\"><title>{} {}: {:.4g} to "
          "{:.4g} ms</title></rect>",
          x, top + (moves ? 2 : 14), w,
          moves                                    ? colour(2)
          : e.kind == TimelineEvent::Kind::compute ? colour(0)
                                                   : colour(4),
          escaped(e.name), e.step, e.begin * 1e3, e.end * 1e3);
    }
    top += kRow;
  }
  return out + fmt::format(
                   "<text class=\"f\" x=\"{}\" y=\"{}\">0</text><text class=\"f\" x=\"{}\" y=\"{}\" "
                   "text-anchor=\"end\">{:.4g} ms</text></svg>",
                   kLeft, top + 13, kLeft + kWide, top + 13, t.seconds * 1e3);
}

std::string table(const std::vector<const SimulatedLine*>& lines) {
  std::string out =
      "<table><tr><th class=\"t\">schedule, layout</th><th>forward ms</th><th>backward ms</th><th>of ideal</th>"
      "<th>hidden</th><th>busiest / mean</th><th>MiB in</th><th>memory</th></tr>";
  for (const SimulatedLine* l : lines) {
    const Timeline& t = l->backward ? *l->backward : *l->forward;
    const auto ms = [](const std::optional<Timeline>& of) {
      return of ? fmt::format("{:.3f}", of->seconds * 1e3) : "-";
    };
    out += fmt::format(
        "<tr><td class=\"t\">{}</td><td>{}</td><td>{}</td><td>{:.0f} %</td><td>{:.0f} %</td><td>{:.2f}</td>"
        "<td>{:.1f}</td><td>{}</td></tr>",
        escaped(l->name()), ms(l->forward), ms(l->backward), 100 * l->ideal() / l->seconds(), 100 * t.overlap(),
        t.straggling(), static_cast<double>(t.bytes_in()) / 0x1p20, bytes_text(l->memory()));
  }
  return out + "</table>";
}

}  // namespace

std::string simulated_page(const Machine& machine, const std::string& heading,
                           const std::vector<SimulatedLine>& lines) {
  std::string out = kHead;
  out += fmt::format("<h1>{}</h1><p>{}</p><p>{}</p>", escaped(machine.name), escaped(machine.about), escaped(heading));
  std::vector<const SimulatedLine*> right;
  for (const SimulatedLine& l : lines)
    if (l.refused.empty() && l.seconds() > 0) right.push_back(&l);
  const auto problem = [](const SimulatedLine& l) {
    return fmt::format("{} documents, {} tokens{}, heads {}", l.documents, l.tokens,
                       l.window.empty() ? "" : fmt::format(", window {}", l.window), l.heads);
  };
  std::map<std::string, std::vector<const SimulatedLine*>> sweeps;  // over ranks
  for (const SimulatedLine* l : right)
    sweeps[fmt::format("{}, heads {}, window {}", l->docs, l->heads, l->window)].push_back(l);
  for (const auto& [name, of] : sweeps) {
    const std::string plot = curves(of);
    if (!plot.empty()) out += fmt::format("<h2>Share of the ideal over ranks</h2><p>{}</p>{}", escaped(name), plot);
  }
  std::vector<std::pair<std::string, std::vector<const SimulatedLine*>>> problems;
  for (const SimulatedLine* l : right) {
    const std::string name = fmt::format("{} ranks: {}", l->ranks, problem(*l));
    if (problems.empty() || problems.back().first != name) problems.push_back({name, {}});
    problems.back().second.push_back(l);
  }
  constexpr std::size_t kTimelines = 24;
  std::size_t drawn = 0;
  for (const auto& [name, of] : problems) {
    out += fmt::format("<h2>{}</h2>{}{}", escaped(name), bars(of), table(of));
    out +=
        "<p>Forward dark, backward light. Timelines: exchanges above, computes below, passes over rows in purple.</p>";
    for (const SimulatedLine* l : of) {
      for (const auto* t : {&l->forward, &l->backward}) {
        if (!*t || drawn >= kTimelines) continue;
        ++drawn;
        out += fmt::format("<h3>{}, {}</h3>{}", escaped(l->name()), t == &l->forward ? "forward" : "backward",
                           timeline(**t));
      }
      if (!l->why.empty()) out += fmt::format("<pre>{}</pre>", escaped(l->why));
    }
  }
  for (const SimulatedLine& l : lines)
    if (!l.refused.empty())
      out += fmt::format("<p>{}, {} ranks: {}</p>", escaped(l.name()), l.ranks, escaped(l.refused));
  return out + "</body></html>\n";
}

}  // namespace weft::tool
