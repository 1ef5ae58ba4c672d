#include "weft/choose.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <optional>
#include <sstream>

#include "cost/sketch.h"
#include "schedule/schedules.h"
#include "text.h"
#include "weft/error.h"
#include "weft/simulate.h"

namespace weft {
namespace {

// Ranks may compute with other instructions: what differs less than this is the same, and the first one wins.
constexpr double kSame = 1e-6;

std::string milliseconds(double seconds) {
  std::ostringstream out;
  out << std::setprecision(3) << seconds * 1e3 << " ms";
  return out.str();
}

std::string gigabytes(double bytes) {
  std::ostringstream out;
  out << std::setprecision(3);
  if (bytes < 1e9)
    out << bytes / 1e6 << " MB";
  else
    out << bytes / 1e9 << " GB";
  return out.str();
}

bool shared(const Machine& m) { return m.processor_ranks != 1 || m.processor_kernels < 1; }

// Ranks that share a processor have to be looked at together.
Candidate predicted(const Layer& layer, const Layouts& layouts, const Machine& machine, const cost::Sketch* sketch,
                    const ScheduleOptions& options) {
  Candidate c{.schedule = options};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (pass == Pass::backward && !layer.backward) continue;
    double& seconds = pass == Pass::forward ? c.forward : c.backward;
    if (sketch != nullptr) {
      const cost::Sketch::Result r = sketch->estimate(options, pass);
      seconds = r.seconds;
      c.memory = max_of(c.memory, r.memory);
    } else {
      const Timeline t =
          simulate({layer.problem, layouts, layer.heads_q, layer.heads_k, options, layer.shape}, machine, pass);
      seconds = t.seconds;
      c.memory = max_of(c.memory, t.memory.total());
    }
  }
  return c;
}

ScheduleOptions with_groups(Index groups) { return {.kind = ScheduleKind::all_gather, .head_groups = groups}; }

}  // namespace

std::string words(const ScheduleOptions& o) {
  std::string out(name(o.kind));
  const bool hybrid = o.kind == ScheduleKind::hybrid;
  if (hybrid) out += text(" ", o.inside, " x ", name(o.across));
  const bool gathers = o.kind == ScheduleKind::all_gather || (hybrid && o.across == ScheduleKind::all_gather);
  if (gathers && o.key_order != KeyOrder::automatic) out += text(", ", name(o.key_order), " order");
  if (gathers && o.head_groups != 1) out += text(" in ", o.head_groups, " groups of heads");
  const bool ring = o.kind == ScheduleKind::ring || (hybrid && o.across == ScheduleKind::ring);
  if (ring && o.abreast != ScheduleOptions{}.abreast) out += text(", ", o.abreast, " abreast");
  if (o.kind == ScheduleKind::exact) out += text(" in ", o.stages, o.stages == 1 ? " stage" : " stages");
  return out;
}

std::vector<ScheduleOptions> usual_schedules(const Machine& machine, Index ranks, Index heads_q, Index heads_k) {
  if (ranks == 1) return {{.kind = ScheduleKind::exact, .stages = 1}};
  std::vector<ScheduleOptions> all = {{.kind = ScheduleKind::exact, .stages = 1},
                                      {.kind = ScheduleKind::exact},
                                      {.kind = ScheduleKind::ring},
                                      with_groups(1)};
  if (ranks > 2) all.push_back({.kind = ScheduleKind::ring, .abreast = 1});  // half the buffers
  constexpr Index kGroups = 4;
  if (heads_k > 1) all.push_back(with_groups(min_of(kGroups, heads_k)));
  if (ranks <= heads_q) all.push_back({.kind = ScheduleKind::all_to_all});
  // Swaps are cheap inside a node; so meshes are those of the levels, and the largest that K/V heads divide into.
  std::vector<Index> meshes;
  for (const Level& level : machine.levels)
    if (level.ranks > 1) meshes.push_back(level.ranks);
  for (const Index inside : {Index{2}, Index{4}, Index{8}}) meshes.push_back(inside);
  std::sort(meshes.begin(), meshes.end());
  meshes.erase(std::unique(meshes.begin(), meshes.end()), meshes.end());
  for (const Index inside : meshes) {
    if (inside >= ranks || ranks % inside != 0 || inside > heads_q) continue;
    all.push_back({.kind = ScheduleKind::hybrid, .inside = inside, .across = ScheduleKind::ring});
    all.push_back({.kind = ScheduleKind::hybrid, .inside = inside, .across = ScheduleKind::all_gather});
  }
  return all;
}

ScheduleChoice choose_schedule(const Layer& layer, const Layouts& layouts, const Machine& machine,
                               const ChooseOptions& options) {
  check_machine(machine);
  for (const ScheduleOptions& each : options.schedules) schedule::check_options(each);
  schedule::check_shape(layouts, layer.heads_q, layer.heads_k, layer.shape);
  const Index ranks = layouts.q.ranks();
  const std::vector<ScheduleOptions> tried =
      options.schedules.empty() ? usual_schedules(machine, ranks, layer.heads_q, layer.heads_k) : options.schedules;
  ScheduleChoice choice{.memory_bytes = options.memory_bytes > 0 ? options.memory_bytes : machine.memory_bytes};
  std::optional<cost::Sketch> sketch;
  if (!shared(machine)) sketch.emplace(layer, layouts, machine);
  double least = std::numeric_limits<double>::infinity();
  Index needs = std::numeric_limits<Index>::max();
  std::string remedy;  // of the first that cannot be made
  for (const ScheduleOptions& each : tried) {
    Candidate c{.schedule = each};
    try {
      if (sketch) {
        c.forward = sketch->at_least(each, Pass::forward);
        if (layer.backward) c.backward = sketch->at_least(each, Pass::backward);
        c.at_least = c.seconds() > least;
      }
      if (c.at_least) {
        choice.candidates.push_back(std::move(c));
        continue;
      }
      c = predicted(layer, layouts, machine, sketch ? &*sketch : nullptr, each);
      c.fits = choice.memory_bytes == 0 || static_cast<double>(c.memory) <= choice.memory_bytes;
      needs = min_of(needs, c.memory);
    } catch (const Error& e) {
      c.refused = e.problem();
      if (remedy.empty()) remedy = e.remedy();
    }
    choice.candidates.push_back(std::move(c));
    const Candidate& last = choice.candidates.back();
    if (!last.usable() || last.seconds() >= least * (1 - kSame)) continue;
    least = last.seconds();
    choice.chosen = choice.candidates.size() - 1;
  }
  if (std::isinf(least)) {
    if (needs == std::numeric_limits<Index>::max())
      throw Error(text("no schedule can be made: ", choice.candidates.front().refused), remedy);
    throw Error(text("no schedule fits ", gigabytes(choice.memory_bytes), " a rank; the least needs ",
                     gigabytes(static_cast<double>(needs))),
                "use more ranks, fewer tokens, or a larger memory_bytes");
  }
  return choice;
}

std::string ScheduleChoice::why() const {
  const Candidate& won = best();
  std::string out =
      text(words(won.schedule), ": ", milliseconds(won.seconds()), " (forward ", milliseconds(won.forward));
  if (won.backward > 0) out += text(", backward ", milliseconds(won.backward));
  out += text("), ", gigabytes(static_cast<double>(won.memory)), " a rank");
  std::vector<const Candidate*> others;
  std::size_t too_large = 0;
  for (const Candidate& c : candidates) {
    if (&c != &won && c.usable()) others.push_back(&c);
    too_large += !c.fits;
  }
  std::sort(others.begin(), others.end(),
            [](const Candidate* a, const Candidate* b) { return a->seconds() < b->seconds(); });
  constexpr std::size_t kShown = 3;
  for (std::size_t n = 0; n < std::min(kShown, others.size()); ++n) {
    std::ostringstream more;
    more << std::fixed << std::setprecision(1) << 100 * (others[n]->seconds() / won.seconds() - 1);
    out += text(n == 0 ? "; " : ", ", words(others[n]->schedule), others[n]->at_least ? " takes at least " : " takes ",
                more.str(), " % more");
  }
  if (too_large > 0)
    out += text("; ", too_large, " of ", candidates.size(), " need more than ", gigabytes(memory_bytes));
  return out;
}

BatchChoice choose(std::span<const Layer> layers, Index ranks, const Machine& machine, const ChooseOptions& options) {
  if (ranks < 1) throw Error(text("a choice for ", ranks, " ranks"), "use at least one");
  if (layers.empty()) throw Error("no layers", "give at least one");
  if (!(options.memory_bytes >= 0))
    throw Error(text("a budget of ", options.memory_bytes, " bytes"), "give bytes, or 0 for the machine's");
  for (const Layer& layer : layers)
    if (layer.count < 1) throw Error(text(layer.count, " layers of a kind"), "give at least one");
  for (const Layer& layer : layers)
    if (!(layer.problem.packing().q() == layers[0].problem.packing().q()) ||
        !(layer.problem.packing().k() == layers[0].problem.packing().k()))
      throw Error("the layers have different packings", "choose a layout for each batch by itself");
  std::vector<LayoutKind> kinds = options.layouts;
  if (kinds.empty()) {
    kinds = {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::balanced};
    // Each document cut by itself: only if that is possible without padding it anew.
    const Packing& packing = layers[0].problem.packing();
    bool whole = true;
    for (const Stream* s : {&packing.q(), &packing.k()})
      for (Index i = 0; i < s->sequences() && whole; ++i) whole = s->padded(i) % (2 * ranks) == 0;
    if (whole) kinds.push_back(LayoutKind::dual_chunk);
  }
  // Balanced deals out the work of the layer that has most of it.
  const auto work = [](const Layer& l) {
    return static_cast<double>(l.problem.visible_pairs()) * static_cast<double>(l.heads_q * l.count);
  };
  const Layer& main = *std::max_element(layers.begin(), layers.end(),
                                        [&](const Layer& a, const Layer& b) { return work(a) < work(b); });
  BatchChoice best;
  best.seconds = std::numeric_limits<double>::infinity();
  std::vector<BatchChoice::Tried> tried;
  std::string remedy;  // of the first that does not work
  for (const LayoutKind kind : kinds) {
    BatchChoice::Tried t{.layout = kind};
    try {
      const Layouts layouts = make_layouts(kind, main.problem, ranks);
      std::vector<ScheduleChoice> chosen;
      for (const Layer& layer : layers) {
        chosen.push_back(choose_schedule(layer, layouts, machine, options));
        t.seconds += chosen.back().best().seconds() * static_cast<double>(layer.count);
      }
      if (t.seconds < best.seconds * (1 - kSame)) {
        best.layout = kind;
        best.seconds = t.seconds;
        best.layers = std::move(chosen);
      }
    } catch (const Error& e) {
      t.refused = e.problem();
      if (remedy.empty()) remedy = e.remedy();
    }
    tried.push_back(std::move(t));
  }
  if (best.layers.empty()) throw Error(text("no layout works: ", tried.front().refused), remedy);
  best.layouts = std::move(tried);
  return best;
}

std::string BatchChoice::why() const {
  std::string out = text("layout ", name(layout), ": ", milliseconds(seconds), " for all layers");
  for (const Tried& t : layouts) {
    if (t.layout == layout) continue;
    out += t.refused.empty() ? text("; ", name(t.layout), " ", milliseconds(t.seconds))
                             : text("; ", name(t.layout), " cannot: ", t.refused);
  }
  for (std::size_t n = 0; n < layers.size(); ++n) out += text("\nlayer ", n, ": ", layers[n].why());
  return out;
}

}  // namespace weft
