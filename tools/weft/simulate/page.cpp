// The page of weft simulate: bars, lines over ranks, and timelines, as one file without scripts.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include <fmt/format.h>

#include "draw/svg_parts.h"
#include "draw/written.h"
#include "simulate/simulate.h"
#include "terminal/numbers.h"

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
    by_name[l->asked].push_back(l);
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
  // Round steps of at least a percent, and as many as there are up to the best.
  constexpr double kSteps = 5;
  const double step = std::max(0.01, draw::round_step(best / kSteps));
  const int steps = std::max(1, static_cast<int>(std::ceil(best / step - 1e-6)));
  const double top = step * steps;
  const auto y = [&](double share) { return kTop + kHigh * (1 - share / top); };
  constexpr int kNames = 14;  // high
  std::string out =
      fmt::format("<svg viewBox=\"0 0 1000 {}\" role=\"img\" aria-label=\"share of the ideal over ranks\">",
                  std::max(310, 20 + kNames * static_cast<int>(by_name.size())));
  for (int n = 0; n <= steps; ++n) {
    const double share = step * n;
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
    // Past the colours there are, the same ones in dashes.
    const std::string dashes =
        n < std::size(kColours) ? "" : fmt::format(" stroke-dasharray=\"{} 3\"", 2 + 4 * (n / std::size(kColours)));
    out += fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"{}/>", points, colour(n),
                       dashes);
    const int line = 16 + kNames * static_cast<int>(n);
    out += fmt::format(
        "<line x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\" stroke=\"{}\" stroke-width=\"3\"{}/><text x=\"{}\" "
        "y=\"{}\">{}</text>",
        kLeft + kWide + 14, kLeft + kWide + 38, line, line, colour(n), dashes, kLeft + kWide + 44, line + 4,
        escaped(name));
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
      if (e.kind == TimelineEvent::Kind::wait) continue;
      if (++drawn > kMostEvents) continue;
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
    if (drawn > kMostEvents)
      out += fmt::format("<text class=\"f\" x=\"{}\" y=\"{}\" text-anchor=\"end\">the first {} of {} events</text>",
                         kLeft + kWide, top + 11, kMostEvents, drawn);
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
    const SimulatedLine::Totals both = l->totals();
    const auto ms = [](const std::optional<Timeline>& of) {
      return of ? fmt::format("{:.3f}", of->seconds * 1e3) : "-";
    };
    out += fmt::format(
        "<tr><td class=\"t\">{}</td><td>{}</td><td>{}</td><td>{:.0f} %</td><td>{}</td><td>{:.2f}</td>"
        "<td>{:.1f}</td><td>{}</td></tr>",
        escaped(l->name()), ms(l->forward), ms(l->backward), 100 * l->ideal() / l->seconds(),
        both.exchange > 0 ? fmt::format("{:.0f} %", 100 * both.hidden / both.exchange) : "-", both.straggling,
        static_cast<double>(both.bytes_in) / 0x1p20, bytes_text(l->memory()));
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
  const auto window = [](const SimulatedLine& l) {
    return l.window.empty() ? "" : fmt::format(", window {}", l.window);
  };
  const auto problem = [&](const SimulatedLine& l) {
    return fmt::format("{} document{}, {} tokens{}, heads {}", l.documents, l.documents == 1 ? "" : "s", l.tokens,
                       window(l), l.heads);
  };
  std::map<std::string, std::vector<const SimulatedLine*>> sweeps;  // over ranks
  for (const SimulatedLine* l : right)
    sweeps[fmt::format("documents {}, heads {}{}", l->docs, l->heads, window(*l))].push_back(l);
  for (const auto& [name, of] : sweeps) {
    const std::string plot = curves(of);
    if (!plot.empty()) out += fmt::format("<h2>Share of the ideal over ranks</h2><p>{}</p>{}", escaped(name), plot);
  }
  std::vector<std::pair<std::string, std::vector<const SimulatedLine*>>> problems;
  for (const SimulatedLine* l : right) {
    const std::string name = fmt::format("{} rank{}: {}", l->ranks, l->ranks == 1 ? "" : "s", problem(*l));
    if (problems.empty() || problems.back().first != name) problems.push_back({name, {}});
    problems.back().second.push_back(l);
  }
  constexpr std::size_t kTimelines = 24;
  std::size_t drawn = 0, all_timelines = 0;
  for (const SimulatedLine* l : right) all_timelines += l->forward.has_value() + l->backward.has_value();
  for (const auto& [name, of] : problems) {
    out += fmt::format("<h2>{}</h2>{}{}", escaped(name), bars(of), table(of));
    out +=
        "<p>Forward dark, backward light. Hidden: share of the time of all exchanges that lies under computes. MiB in: "
        "of "
        "the rank that receives most. Both are of all passes above.</p>";
    out += fmt::format(
        "<p>Timelines of rank 0 and of the rank with most pairs: exchanges above, computes below, passes "
        "over rows in purple.{}</p>",
        all_timelines > kTimelines
            ? fmt::format(" The page has the first {} of {} timelines.", kTimelines, all_timelines)
            : "");
    for (const SimulatedLine* l : of) {
      for (const auto* t : {&l->forward, &l->backward}) {
        if (!*t || ++drawn > kTimelines) continue;
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
