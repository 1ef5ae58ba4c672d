// The page: data as compact JSON, and the files of draw/page, in one piece.
#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "draw/assets.h"
#include "draw/coarse.h"
#include "draw/palette.h"
#include "draw/scene.h"
#include "draw/written.h"
#include "text.h"
#include "weft/error.h"
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

// A page has at most so many of each; what is more is drawn more coarsely, and a note says so.
struct Limits {
  Index documents = 40'000, mask = 40'000, runs = 60'000, slices = 60'000, events = 60'000;

  void halve() {
    for (Index* each : {&documents, &mask, &runs, &slices, &events}) *each /= 2;
  }
};

// What was left out, in words.
class Notes {
 public:
  void add(const std::string& note) {
    if (std::find(notes_.begin(), notes_.end(), note) == notes_.end()) notes_.push_back(note);
  }
  std::string json() const {
    List list;
    for (const std::string& note : notes_) list.add(json_string(note));
    return list.json();
  }

 private:
  std::vector<std::string> notes_;
};

std::string stream_json(const Stream& stream, Index most, Notes& notes) {
  const BundledStream b = bundled(stream, most);
  if (b.each > 1) notes.add(text(grouped(b.each), " documents are drawn as one"));
  return text("{\"tokens\":", stream.tokens(), ",\"bundle\":", b.each, ",\"offsets\":", json_deltas(b.offsets),
              ",\"used\":", json_list(b.used), "}");
}

std::string runs_json(const Layout& layout, Index most, Notes& notes) {
  const Holding held = holding(layout, most);
  if (held.stretch > 0)
    notes.add(text("who holds a token is drawn for ", counted(held.stretch, "token"), " together, rows are not said"));
  Columns columns(5);
  for (const auto& [rank, run] : held.parts) columns.add(rank, run.row, run.token, run.count, run.stride);
  return text("{\"rows\":", layout.rows(), ",\"coarse\":", held.stretch > 0 ? "true" : "false",
              ",\"runs\":", columns.json(), "}");
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
std::string timeline_json(const Timeline& timeline, Index most) {
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
    most -= static_cast<Index>(line.events.size());
    if (most < 0) break;  // the page says how many ranks it has
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

std::string times_json(const Times& times, Index most) {
  return text("{\"about\":", json_string(times.about), ",\"forward\":", timeline_json(times.forward, most),
              ",\"backward\":", timeline_json(times.backward, most), "}");
}

// The data of a page within limits.
class Data {
 public:
  Data(const Scene& scene, const Limits& limits) : scene_(scene), limits_(limits), room_(limits.slices) {}

  std::string json() {
    const Subject& s = scene_.subject;
    const Packing& packing = s.problem.packing();
    List panels;
    for (const Panel& p : scene_.panels) panels.add(panel(p));
    const BundledSlices mask = bundled(scene_.mask, limits_.mask);
    if (mask.each > 1)
      notes_.add(text(grouped(mask.each),
                      " slices of the mask are drawn as one that holds them all: near, more looks "
                      "visible than is"));
    const std::string q = stream_json(packing.q(), limits_.documents, notes_),
                      k = packing.self() ? "null" : stream_json(packing.k(), limits_.documents, notes_);
    return text("{\"title\":", json_string(s.title), ",\"words\":", json_string(words(s)), ",\"notes\":", notes_.json(),
                ",\"command\":", json_string(s.command), ",\"version\":", json_string(version()),
                ",\"pairs\":", s.problem.visible_pairs(), ",\"heads\":[", s.heads_q, ",", s.heads_k, "],\"dims\":[",
                s.shape.dim_qk, ",", s.shape.dim_v, "],\"dtype\":", json_string(name(s.shape.dtype)),
                ",\"mode\":", s.by_step ? "\"step\"" : "\"query\"", ",\"palettes\":", palettes_json(),
                ",\"far\":", kFar, ",\"q\":", q, ",\"k\":", k, ",\"maskBundle\":", mask.each,
                ",\"mask\":", slices_json(mask.slices), ",\"layouts\":", layouts(), ",\"panels\":", panels.json(), "}");
  }

 private:
  std::string panel(const Panel& p) {
    Columns shares(5);
    for (const RankShare& r : p.ranks)
      shares.add(r.pair_heads, r.forward.bytes_received, r.forward.bytes_sent, r.backward.bytes_received,
                 r.backward.bytes_sent);
    const bool all = static_cast<Index>(p.slices.size()) == p.slices_total && p.slices_total <= room_;
    if (all) room_ -= p.slices_total;
    const Index events = limits_.events / (2 * static_cast<Index>(scene_.panels.size()));
    const std::size_t q = layout(p.layouts.q), k = layout(p.layouts.k);
    return text("{\"name\":", json_string(words(p)), ",\"note\":", json_string(p.note),
                ",\"ranks\":", p.layouts.q.ranks(), ",\"inside\":", p.inside, ",\"steps\":", p.steps,
                ",\"headSteps\":", p.head_steps, ",\"stepOf\":", json_list(p.step_of),
                ",\"balance\":", number(p.balance), ",\"q\":", q, ",\"k\":", k, ",\"shares\":", shares.json(),
                ",\"slicesTotal\":", p.slices_total, ",\"slices\":", all ? placed_json(p.slices) : "null",
                ",\"times\":", times_json(p.times, events), "}");
  }

  // Each layout once, whichever panels have it.
  std::size_t layout(const Layout& of) {
    const std::string json = runs_json(of, limits_.runs, notes_);
    const auto at = static_cast<std::size_t>(std::find(layouts_.begin(), layouts_.end(), json) - layouts_.begin());
    if (at == layouts_.size()) layouts_.push_back(json);
    return at;
  }
  std::string layouts() const {
    List list;
    for (const std::string& each : layouts_) list.add(each);
    return list.json();
  }

  const Scene& scene_;
  const Limits& limits_;
  Index room_;
  Notes notes_;
  std::vector<std::string> layouts_;
};

std::string page_of(const Scene& scene, const Limits& limits) {
  const std::vector<std::pair<std::string_view, std::string>> parts = {
      {"{{title}}", escaped(scene.subject.title.empty() ? words(scene.subject) : scene.subject.title)},
      {"{{style}}", std::string(assets::style)},
      {"{{data}}", Data(scene, limits).json()},
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

}  // namespace

std::string html(const Scene& scene) {
  constexpr std::size_t kMost = 5'000'000;  // bytes: what a browser opens and a mail carries without a thought
  constexpr int kTimes = 10;
  Limits limits;
  std::string page = page_of(scene, limits);
  for (int n = 0; n < kTimes && page.size() > kMost; ++n) {
    limits.halve();
    page = page_of(scene, limits);
  }
  if (page.size() > kMost)
    throw Error(text("a page of ", counted(static_cast<Index>(scene.panels.size()), "panel"), " has ",
                     bytes_text(static_cast<double>(page.size())), " at its coarsest"),
                "draw fewer layouts, schedules or ranks, or shorten the title");
  return page;
}

}  // namespace weft::draw
