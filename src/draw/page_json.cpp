#include "draw/page_json.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "draw/assets.h"
#include "draw/formatting.h"
#include "index.h"
#include "text.h"

namespace weft::draw {

std::string JsonColumns::json() const {
  JsonList list;
  for (const std::vector<Index>& column : columns_) list.add(json_deltas(column));
  return list.json();
}

std::string json_number(double value, int digits) {
  std::ostringstream out;
  out.precision(digits);
  out << value;
  return out.str();
}

std::string timeline_json(const Timeline& timeline, Index most, Index most_of_rank) {
  std::vector<std::string> names;  // kind and name of events, each once; events refer to them by number
  const auto number_of = [&](const TimelineEvent& e) {
    const std::string name = text("[", static_cast<int>(e.kind), ",", json_string(e.name), "]");
    const auto found = std::find(names.begin(), names.end(), name);
    const Index number = found - names.begin();
    if (found == names.end()) names.push_back(name);
    return number;
  };
  // Nanoseconds. A machine file can make a call last for ever, and JavaScript counts to 2^53.
  const auto nano = [](double seconds) { return static_cast<Index>(std::llround(std::min(seconds * 1e9, 0x1p53))); };
  JsonList ranks;
  for (const RankTimeline& line : timeline.detail) {
    const Index all = static_cast<Index>(line.events.size()), shown = min_of(all, most_of_rank);
    most -= shown;
    if (most < 0) break;  // the page says how many ranks it shows
    JsonColumns columns(5);
    for (Index i = 0; i < shown; ++i) {
      const TimelineEvent& e = line.events[at(i)];
      columns.add(number_of(e), e.step, nano(e.begin), nano(e.end) - nano(e.begin),
                  e.kind == TimelineEvent::Kind::compute ? e.pairs : e.bytes_in);
    }
    ranks.add(text("{\"rank\":", line.rank, ",\"total\":", all, ",\"events\":", columns.json(), "}"));
  }
  JsonList named;
  for (const std::string& name : names) named.add(name);
  return text("{\"end\":", json_number(timeline.seconds), ",\"ideal\":", json_number(timeline.ideal),
              ",\"overlap\":", json_number(timeline.overlap()), ",\"names\":", named.json(),
              ",\"ranks\":", ranks.json(), "}");
}

std::string filled_page(std::string_view title, const std::string& data) {
  const std::vector<std::pair<std::string_view, std::string>> parts = {{"{{title}}", escaped(title)},
                                                                       {"{{style}}", std::string(assets::style)},
                                                                       {"{{data}}", data},
                                                                       {"{{script}}", std::string(assets::script)}};
  // In the order of the page, so that text which was put in is never searched for a mark.
  std::string page;
  std::string_view rest = assets::page;
  for (const auto& [mark, with] : parts) {
    const std::size_t found = rest.find(mark);
    page.append(rest.substr(0, found)).append(with);
    rest.remove_prefix(found + mark.size());
  }
  return page.append(rest);
}

}  // namespace weft::draw
