// The page of flight records: a timeline a rank, and a table of the last calls.
#include <algorithm>

#include "draw/flight/flight.h"
#include "draw/formatting.h"
#include "draw/svg_writer.h"
#include "index.h"
#include "text.h"
#include "weft/version.h"

namespace weft::draw {
namespace {

constexpr Index kShownCalls = 24;  // of the table
constexpr double kWidth = 1000, kMargin = 90, kRow = 26;

constexpr std::string_view kStyle =
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1100px;padding:0 1rem;color-scheme:light dark}"
    "h1{font-size:1.3rem}h2{font-size:1.1rem;margin-top:2rem}.parted{font-weight:600}"
    "svg{width:100%;height:auto;overflow:visible}text{font-size:13px;fill:currentColor}"
    ".done{fill:#7fb3a6}.waiting,.posted{fill:#d9822b}.queued{fill:#8f9fd1}.failed{fill:#c23b3b}"
    ".mark{stroke:#c23b3b;stroke-width:1.5;stroke-dasharray:4 3}"
    "table{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}"
    "th,td{text-align:left;padding:2px 10px;border-bottom:1px solid #8884;white-space:nowrap}"
    "td.failed,td.waiting,td.posted,td.none{font-weight:600}td.failed,td.none{color:#c23b3b}td.waiting,td.posted{color:"
    "#d9822b}"
    "td.done,td.queued{fill:none}tr.parted td{background:#c23b3b22}footer{margin-top:2rem;font-size:12px;opacity:.7}";

std::string seconds_words(double seconds) {
  if (seconds < 1e-3) return decimal(seconds * 1e6, 0) + " µs";
  return seconds < 1 ? decimal(seconds * 1e3, 1) + " ms" : decimal(seconds, 2) + " s";
}

// The states are ours; another word in a file has no colour.
std::string class_of(const FlightCall& call) {
  for (const char* state : {"posted", "waiting", "queued", "done", "failed"})
    if (call.state == state) return state;
  return "other";
}

std::string title_of(const FlightCall& c) {
  const auto peers = [](const char* way, Index bytes, const std::string& ranks) {
    return ranks.empty() ? std::string() : text(", ", bytes, " bytes ", way, " ", ranks);
  };
  return text("#", c.number, " ", c.name(), peers("to", c.bytes_to, c.to), peers("from", c.bytes_from, c.from), ", ",
              c.state, c.over() ? " after " : " for ", seconds_words(c.seconds));
}

struct Span {
  double begin = 0, end = 0;
};
Span span_of(const Flight& flight) {
  Span all;
  bool first = true;
  for (const FlightRank& rank : flight.recorded) {
    for (const FlightCall& c : rank.calls) {
      all.begin = first ? c.begun : std::min(all.begin, c.begun);
      all.end = first ? c.begun + c.seconds : std::max(all.end, c.begun + c.seconds);
      first = false;
    }
  }
  return all;
}

std::string timeline(const Flight& flight, const Parting& parted) {
  const Span span = span_of(flight);
  const double scale = (kWidth - kMargin) / std::max(span.end - span.begin, 1e-9);
  const double height = kRow * static_cast<double>(flight.recorded.size()) + 30;
  std::string svg = text("<svg viewBox=\"0 0 ", decimal(kWidth), " ", decimal(height), "\" role=\"img\">");
  double y = 0, mark = -1;
  for (const FlightRank& rank : flight.recorded) {
    svg += text("<text x=\"0\" y=\"", decimal(y + 17), "\">rank ", rank.rank, "</text>");
    for (const FlightCall& c : rank.calls) {
      const double x = kMargin + (c.begun - span.begin) * scale;
      if (c.number == parted.call && mark < 0) mark = x;
      svg += text("<rect class=\"", class_of(c), "\" x=\"", decimal(x, 2), "\" y=\"", decimal(y + 4), "\" width=\"",
                  decimal(std::max(c.seconds * scale, 1.5), 2), "\" height=\"", decimal(kRow - 8), "\"><title>",
                  escaped(title_of(c)), "</title></rect>");
    }
    y += kRow;
  }
  if (mark >= 0)
    svg += text("<line class=\"mark\" x1=\"", decimal(mark, 2), "\" x2=\"", decimal(mark, 2), "\" y1=\"0\" y2=\"",
                decimal(y + 6), "\"/><text x=\"", decimal(mark + 4, 2), "\" y=\"", decimal(y + 20), "\">#", parted.call,
                "</text>");
  svg += text("<text x=\"", decimal(kMargin), "\" y=\"", decimal(y + 20), "\">0</text><text x=\"", decimal(kWidth),
              "\" y=\"", decimal(y + 20), "\" text-anchor=\"end\">", escaped(seconds_words(span.end - span.begin)),
              "</text></svg>");
  return svg;
}

std::string table(const Flight& flight, const Parting& parted) {
  Index last = -1;
  for (const FlightRank& rank : flight.recorded)
    if (!rank.calls.empty()) last = max_of(last, rank.calls.back().number);
  Index first = max_of(0, last - kShownCalls + 1);
  if (parted.call >= 0) first = min_of(first, max_of(0, parted.call - 3));
  std::string rows = "<table><tr><th>call</th>";
  for (const FlightRank& rank : flight.recorded) rows += text("<th>rank ", rank.rank, "</th>");
  rows += "</tr>";
  for (Index call = first; call <= last; ++call) {
    std::string name, cells;
    for (const FlightRank& rank : flight.recorded) {
      const FlightCall* c = rank.find(call);
      if (c != nullptr && name.empty()) name = c->name();
      cells += c == nullptr
                   ? std::string("<td class=\"none\">not made</td>")
                   : text("<td class=\"", class_of(*c), "\">", c->name() == name ? "" : escaped(c->name() + ": "),
                          escaped(c->state), " ", escaped(seconds_words(c->seconds)), "</td>");
    }
    rows += text("<tr", call == parted.call ? " class=\"parted\"" : "", "><td>#", call, " ", escaped(name), "</td>",
                 cells, "</tr>");
  }
  return rows + "</table>";
}

}  // namespace

std::string flight_html(const std::vector<Flight>& flights, const std::string& command) {
  std::string body;
  for (const Flight& flight : flights) {
    const Parting parted = parting(flight);
    body += text("<h2>", flight.ranks, " ranks, ", escaped(flight.comm), "</h2>");
    for (std::size_t i = 0; i < parted.words.size(); ++i)
      body += text("<p", i == 0 ? " class=\"parted\"" : "", ">", escaped(parted.words[i]), "</p>");
    body += timeline(flight, parted) + table(flight, parted);
  }
  return text(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n<title>The last calls of ranks</title>\n<style>",
      kStyle, "</style>\n</head>\n<body>\n<h1>The last calls of ranks</h1>\n", body, "\n<footer>", escaped(command),
      "<br>weft ", escaped(version()), "</footer>\n</body>\n</html>\n");
}

}  // namespace weft::draw
