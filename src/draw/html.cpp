// The page: data as compact JSON, and the files of draw/page, in one piece.
#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "draw/assets.h"
#include "draw/palette.h"
#include "draw/scene.h"
#include "draw/written.h"
#include "text.h"
#include "weft/version.h"

namespace weft::draw {
namespace {

// Past any token, and exact in JavaScript's numbers also after a sum.
constexpr Index kFar = Index{1} << 40;

Index bound(Index b) { return min_of(max_of(b, -kFar), kFar); }

class List {
 public:
  void add(const std::string& item) {
    if (!items_.empty()) items_ += ',';
    items_ += item;
  }
  std::string json() const { return text("[", items_, "]"); }

 private:
  std::string items_;
};

// Columns of numbers, each as differences.
class Columns {
 public:
  explicit Columns(std::size_t count) : columns_(count) {}
  template <class... Values>
  void add(Values... values) {
    std::size_t at = 0;
    (columns_[at++].push_back(values), ...);
  }
  std::string json() const {
    List list;
    for (const std::vector<Index>& column : columns_) list.add(json_deltas(column));
    return list.json();
  }

 private:
  std::vector<std::vector<Index>> columns_;
};

std::string stream_json(const Stream& stream) {
  return text("{\"tokens\":", stream.tokens(),
              ",\"offsets\":", json_deltas({stream.offsets().begin(), stream.offsets().end()}),
              ",\"used\":", json_list({stream.used_lengths().begin(), stream.used_lengths().end()}), "}");
}

std::string runs_json(const Layout& layout) {
  Columns columns(5);
  for (Index r = 0; r < layout.ranks(); ++r)
    for (const Run& run : layout.runs(r).runs()) columns.add(r, run.row, run.token, run.count, run.stride);
  return text("{\"rows\":", layout.rows(), ",\"runs\":", columns.json(), "}");
}

std::string slices_json(const std::vector<Slice>& slices) {
  Columns columns(6);
  for (const Slice& s : slices)
    columns.add(s.q_begin, s.q_end - s.q_begin, s.k_begin, s.k_end - s.k_begin, bound(s.lo), bound(s.hi));
  return columns.json();
}

std::string placed_json(const std::vector<PlacedSlice>& slices) {
  Columns columns(10);
  for (const PlacedSlice& p : slices)
    columns.add(p.rank, p.step, p.slice.q_begin, p.slice.q_end - p.slice.q_begin, p.slice.k_begin,
                p.slice.k_end - p.slice.k_begin, bound(p.slice.lo), bound(p.slice.hi), p.k_shift, p.k_stride);
  return columns.json();
}

std::string number(double value) {
  std::ostringstream out;
  out.precision(6);
  out << value;
  return out.str();
}

// Nanoseconds, and a list of what there is to say instead of saying it with each event.
std::string timeline_json(const Timeline& timeline) {
  std::vector<std::string> names;
  const auto number_of = [&](const TimelineEvent& e) {
    const std::string name = text("[", static_cast<int>(e.kind), ",", json_string(e.name), "]");
    const auto at = std::find(names.begin(), names.end(), name) - names.begin();
    if (static_cast<std::size_t>(at) == names.size()) names.push_back(name);
    return static_cast<Index>(at);
  };
  // A machine file can make a call last for ever; the page counts to 2^53.
  const auto nano = [](double seconds) { return static_cast<Index>(std::llround(std::min(seconds * 1e9, 0x1p53))); };
  List ranks;
  for (const RankTimeline& line : timeline.detail) {
    Columns columns(5);
    for (const TimelineEvent& e : line.events)
      columns.add(number_of(e), e.step, nano(e.begin), nano(e.end) - nano(e.begin),
                  e.kind == TimelineEvent::Kind::compute ? e.pairs : e.bytes_in);
    ranks.add(text("{\"rank\":", line.rank, ",\"events\":", columns.json(), "}"));
  }
  List said;
  for (const std::string& name : names) said.add(name);
  return text("{\"end\":", number(timeline.seconds), ",\"ideal\":", number(timeline.ideal),
              ",\"overlap\":", number(timeline.overlap()), ",\"names\":", said.json(), ",\"ranks\":", ranks.json(),
              "}");
}

std::string times_json(const Times& times) {
  return text("{\"about\":", json_string(times.about), ",\"forward\":", timeline_json(times.forward),
              ",\"backward\":", timeline_json(times.backward), "}");
}

// Each layout once, whichever panels have it.
class LayoutList {
 public:
  std::size_t number(const Layout& layout) {
    const std::string json = runs_json(layout);
    const auto at = static_cast<std::size_t>(std::find(layouts_.begin(), layouts_.end(), json) - layouts_.begin());
    if (at == layouts_.size()) layouts_.push_back(json);
    return at;
  }
  std::string json() const {
    List list;
    for (const std::string& layout : layouts_) list.add(layout);
    return list.json();
  }

 private:
  std::vector<std::string> layouts_;
};

std::string panel_json(const Panel& p, LayoutList& layouts) {
  Columns shares(5);
  for (const RankShare& r : p.ranks)
    shares.add(r.pair_heads, r.forward.bytes_received, r.forward.bytes_sent, r.backward.bytes_received,
               r.backward.bytes_sent);
  return text("{\"name\":", json_string(words(p)), ",\"note\":", json_string(p.note),
              ",\"ranks\":", p.layouts.q.ranks(), ",\"inside\":", p.inside, ",\"steps\":", p.steps,
              ",\"headSteps\":", p.head_steps, ",\"stepOf\":", json_list(p.step_of), ",\"balance\":", number(p.balance),
              ",\"q\":", layouts.number(p.layouts.q), ",\"k\":", layouts.number(p.layouts.k),
              ",\"shares\":", shares.json(), ",\"slicesTotal\":", p.slices_total,
              ",\"slices\":", static_cast<Index>(p.slices.size()) == p.slices_total ? placed_json(p.slices) : "null",
              ",\"times\":", times_json(p.times), "}");
}

std::string data_json(const Scene& scene) {
  const Subject& s = scene.subject;
  const Packing& packing = s.problem.packing();
  List panels;
  LayoutList layouts;
  for (const Panel& p : scene.panels) panels.add(panel_json(p, layouts));
  return text("{\"title\":", json_string(s.title), ",\"words\":", json_string(words(s)),
              ",\"command\":", json_string(s.command), ",\"version\":", json_string(version()),
              ",\"pairs\":", s.problem.visible_pairs(), ",\"heads\":[", s.heads_q, ",", s.heads_k, "],\"dims\":[",
              s.shape.dim_qk, ",", s.shape.dim_v, "],\"dtype\":", json_string(name(s.shape.dtype)),
              ",\"mode\":", s.by_step ? "\"step\"" : "\"query\"", ",\"palettes\":", palettes_json(), ",\"far\":", kFar,
              ",\"q\":", stream_json(packing.q()), ",\"k\":", packing.self() ? "null" : stream_json(packing.k()),
              ",\"mask\":", slices_json(scene.mask), ",\"layouts\":", layouts.json(), ",\"panels\":", panels.json(),
              "}");
}

}  // namespace

std::string html(const Scene& scene) {
  const std::vector<std::pair<std::string_view, std::string>> parts = {
      {"{{title}}", escaped(scene.subject.title.empty() ? words(scene.subject) : scene.subject.title)},
      {"{{style}}", std::string(assets::style)},
      {"{{data}}", data_json(scene)},
      {"{{script}}", std::string(assets::script)}};
  // In the order of the page, and only forward: what was put in is not looked at again.
  std::string page;
  std::string_view rest = assets::page;
  for (const auto& [mark, with] : parts) {
    const std::size_t at = rest.find(mark);
    page.append(rest.substr(0, at)).append(with);
    rest.remove_prefix(at + mark.size());
  }
  return page.append(rest);
}

}  // namespace weft::draw
