// The page of a figure.
#include <algorithm>

#include "draw/downsample.h"
#include "draw/figure.h"
#include "draw/formatting.h"
#include "draw/page_json.h"
#include "draw/palette.h"
#include "text.h"
#include "weft/error.h"
#include "weft/version.h"

namespace weft::draw {
namespace {

// Stands for an unlimited bound: past any token, and still exact in JavaScript after an addition.
constexpr Index kFar = Index{1} << 40;

Index bound(Index b) { return min_of(max_of(b, -kFar), kFar); }

// The most a page holds of each. What has more is drawn coarsely, and a note on the page says so.
struct Limits {
  Index documents = 40'000, mask = 40'000, runs = 60'000, slices = 60'000, events = 60'000;

  void halve() {
    for (Index* each : {&documents, &mask, &runs, &slices, &events}) *each /= 2;
  }
};

// What the page leaves out, in words.
class Notes {
 public:
  void add(const std::string& note) {
    if (std::find(notes_.begin(), notes_.end(), note) == notes_.end()) notes_.push_back(note);
  }
  std::string json() const {
    JsonList list;
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
  JsonColumns columns(5);
  for (const auto& [rank, run] : held.parts) columns.add(rank, run.row, run.token, run.count, run.stride);
  return text("{\"rows\":", layout.rows(), ",\"coarse\":", held.stretch > 0 ? "true" : "false",
              ",\"runs\":", columns.json(), "}");
}

std::string slices_json(const std::vector<Slice>& slices) {
  JsonColumns columns(6);
  for (const Slice& s : slices)
    columns.add(s.q_begin, s.q_end - s.q_begin, s.k_begin, s.k_end - s.k_begin, bound(s.lo), bound(s.hi));
  return columns.json();
}

std::string placed_json(const std::vector<PlacedSlice>& slices) {
  JsonColumns columns(10);
  for (const PlacedSlice& p : slices)
    columns.add(p.rank, p.step, p.slice.q_begin, p.slice.q_end - p.slice.q_begin, p.slice.k_begin,
                p.slice.k_end - p.slice.k_begin, bound(p.slice.lo), bound(p.slice.hi), p.k_shift, p.k_stride);
  return columns.json();
}

std::string times_json(const Timelines& times, Index most) {
  return text("{\"about\":", json_string(times.about), ",\"forward\":", timeline_json(times.forward, most, most),
              ",\"backward\":", timeline_json(times.backward, most, most), "}");
}

// The data of a page within limits.
class Data {
 public:
  Data(const Figure& figure, const Limits& limits) : figure_(figure), limits_(limits), room_(limits.slices) {}

  std::string json() {
    const Subject& s = figure_.subject;
    const Packing& packing = s.problem.packing();
    JsonList panels;
    for (const Panel& p : figure_.panels) panels.add(panel(p));
    const BundledSlices mask = bundled(figure_.mask, limits_.mask);
    if (mask.each > 1)
      notes_.add(text(grouped(mask.each),
                      " slices of the mask are drawn as one that holds them all: near, more looks "
                      "visible than is"));
    const std::string q = stream_json(packing.q(), limits_.documents, notes_),
                      k = packing.self() ? "null" : stream_json(packing.k(), limits_.documents, notes_);
    return text("{\"kind\":\"explain\",\"title\":", json_string(s.title), ",\"words\":", json_string(words(s)),
                ",\"notes\":", notes_.json(), ",\"command\":", json_string(s.command),
                ",\"version\":", json_string(version()), ",\"pairs\":", s.problem.visible_pairs(), ",\"heads\":[",
                s.heads_q, ",", s.heads_k, "],\"dims\":[", s.shape.dim_qk, ",", s.shape.dim_v,
                "],\"dtype\":", json_string(name(s.shape.dtype)), ",\"mode\":", s.by_step ? "\"step\"" : "\"query\"",
                ",\"palettes\":", palettes_json(), ",\"far\":", kFar, ",\"q\":", q, ",\"k\":", k,
                ",\"maskBundle\":", mask.each, ",\"mask\":", slices_json(mask.slices), ",\"layouts\":", layouts(),
                ",\"panels\":", panels.json(), "}");
  }

 private:
  std::string panel(const Panel& p) {
    JsonColumns loads(5);
    for (const RankLoad& r : p.ranks)
      loads.add(r.pair_heads, r.forward.bytes_received, r.forward.bytes_sent, r.backward.bytes_received,
                r.backward.bytes_sent);
    const bool all = static_cast<Index>(p.slices.size()) == p.slices_total && p.slices_total <= room_;
    if (all) room_ -= p.slices_total;
    const Index events = limits_.events / (2 * static_cast<Index>(figure_.panels.size()));
    const Index q = layout(p.layouts.q), k = layout(p.layouts.k);
    return text("{\"name\":", json_string(words(p)), ",\"note\":", json_string(p.note),
                ",\"ranks\":", p.layouts.q.ranks(), ",\"ulysses\":", p.ulysses, ",\"queryRanks\":", p.query_ranks,
                ",\"steps\":", p.steps, ",\"headSteps\":", p.head_steps, ",\"stepOf\":", json_list(p.step_of),
                ",\"imbalance\":", json_number(p.imbalance), ",\"q\":", q, ",\"k\":", k, ",\"loads\":", loads.json(),
                ",\"slicesTotal\":", p.slices_total, ",\"slices\":", all ? placed_json(p.slices) : "null",
                ",\"times\":", times_json(p.times, events), "}");
  }

  // Each layout once, whichever panels have it.
  Index layout(const Layout& of) {
    const std::string json = runs_json(of, limits_.runs, notes_);
    const auto found = std::find(layouts_.begin(), layouts_.end(), json);
    const Index number = found - layouts_.begin();
    if (found == layouts_.end()) layouts_.push_back(json);
    return number;
  }
  std::string layouts() const {
    JsonList list;
    for (const std::string& each : layouts_) list.add(each);
    return list.json();
  }

  const Figure& figure_;
  const Limits& limits_;
  Index room_;  // slices that still fit the page
  Notes notes_;
  std::vector<std::string> layouts_;
};

std::string page_of(const Figure& figure, const Limits& limits) {
  return filled_page(figure.subject.title.empty() ? words(figure.subject) : figure.subject.title,
                     Data(figure, limits).json());
}

}  // namespace

std::string html(const Figure& figure) {
  constexpr std::size_t kMost = 5'000'000;  // bytes: quick to open in a browser, and small enough for a mail
  constexpr int kTimes = 10;
  Limits limits;
  std::string page = page_of(figure, limits);
  for (int n = 0; n < kTimes && page.size() > kMost; ++n) {
    limits.halve();
    page = page_of(figure, limits);
  }
  if (page.size() > kMost)
    throw Error(text("a page of ", counted(static_cast<Index>(figure.panels.size()), "panel"), " has ",
                     bytes_text(static_cast<double>(page.size())), " at its coarsest"),
                "draw fewer layouts, schedules or ranks, or shorten the title");
  return page;
}

}  // namespace weft::draw
