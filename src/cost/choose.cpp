#include "weft/choose.h"

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <memory>
#include <optional>

#include "cost/sketch.h"
#include "index.h"
#include "schedule/build.h"
#include "text.h"
#include "weft/error.h"
#include "weft/simulate.h"

namespace weft {
namespace {

// Ranks may compute with other instructions: what differs less than this is the same, and the first one wins.
constexpr double kSame = 1e-6;

std::string milliseconds(double seconds) { return text(std::setprecision(3), seconds * 1e3, " ms"); }
std::string gigabytes(double bytes) {
  const bool small = bytes < 1e9;
  return text(std::setprecision(3), bytes / (small ? 1e6 : 1e9), small ? " MB" : " GB");
}
std::string more(double seconds, double than) {
  return text(std::fixed, std::setprecision(1), 100 * (seconds / than - 1), " % more");
}

bool shared(const Machine& m) { return m.processor_ranks != 1 || m.processor_kernels < 1; }

// The budget of simulations, for layers that are estimated to take so many seconds each.
Index simulated_slices(const ChooseOptions& options, double seconds, Index count) {
  if (options.simulated_slices > 0) return options.simulated_slices;
  constexpr double kShare = 0.04, kSliceSeconds = 4e-7, kLeast = 1e4, kMost = 2e5;
  constexpr Index kLayers = 32;
  const double all = seconds * static_cast<double>(max_of(kLayers, count));
  return static_cast<Index>(std::clamp(all * kShare / kSliceSeconds, kLeast, kMost));
}

// Fills in the passes that count; predict(pass) gives seconds and bytes.
template <class Predict>
void predict_candidate(const Layer& layer, Candidate& c, const Predict& predict) {
  c.forward = c.backward = 0;
  c.memory = 0;
  c.at_least = false;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (pass == Pass::backward && !layer.backward) continue;
    const cost::Sketch::Result r = predict(pass);
    (pass == Pass::forward ? c.forward : c.backward) = r.seconds;
    c.memory = max_of(c.memory, r.memory);
  }
}

// The schedules of one layer on one layout: ranked by estimates at first, then decided by simulations of those that are
// near the best. Work is counted in slices and never in seconds, so that all ranks simulate the same.
class Contest {
 public:
  Contest(const Layer& layer, const Layouts& layouts, const Machine& machine, const ChooseOptions& options)
      : layer_(layer), layouts_(layouts), machine_(machine) {
    check_machine(machine);
    for (const ScheduleOptions& each : options.schedules) check_options(each);
    schedule::check_shape(layouts, layer.heads_q, layer.heads_k, layer.shape);
    const Index ranks = layouts.q.ranks();
    choice_.memory_bytes = options.memory_bytes > 0 ? options.memory_bytes : machine.memory_bytes;
    if (!shared(machine)) sketch_.emplace(layer, layouts, machine);
    choice_.slices = sketch_ ? sketch_->slices() : 0;
    for (const ScheduleOptions& each :
         options.schedules.empty() ? usual_schedules(machine, ranks, layer.heads_q, layer.heads_k) : options.schedules)
      enter(each);
    const auto first = best_of([](const Candidate&) { return true; });
    if (!first) refuse();
    estimated_ = choice_.candidates[*first].seconds();
  }

  double estimated() const { return estimated_; }  // of the first
  // What the simulation of the first goes through: without it there is nothing to compare.
  double least_work() const {
    const auto first = best_of([](const Candidate& c) { return !c.simulated; });
    return first ? work(choice_.candidates[*first]) : 0;
  }

  // `budget`: of work, out of `slices` for all; what is spent is taken from it.
  ScheduleChoice decided(bool by_simulation, double& budget, Index slices) {
    choice_.simulated_slices = slices;
    if (by_simulation) simulate_near(budget);
    auto won = best_of([&](const Candidate& c) { return c.simulated || !by_simulation; });
    // None that was simulated fits, and the budget is spent.
    if (!won) won = best_of([](const Candidate&) { return true; });
    if (!won) refuse();
    choice_.chosen = *won;
    return std::move(choice_);
  }

 private:
  static constexpr std::size_t kFinalists = 3;
  static constexpr double kNear = 1.15;  // most estimates are less than this off
  static constexpr double kNever = std::numeric_limits<double>::infinity();

  std::size_t number(const Candidate& c) const { return at(&c - choice_.candidates.data()); }

  // What fits, the first of those that take the same.
  template <class Wanted>
  std::optional<std::size_t> best_of(const Wanted& wanted) const {
    std::optional<std::size_t> best;
    for (const Candidate& c : choice_.candidates) {
      if (!c.usable() || c.at_least || !wanted(c)) continue;
      if (!best || c.seconds() < choice_.candidates[*best].seconds() * (1 - kSame)) best = number(c);
    }
    return best;
  }

  template <class F>
  void attempt(Candidate& c, const F& predict) {
    try {
      predict();
      if (c.at_least) return;
      c.fits = choice_.memory_bytes == 0 || static_cast<double>(c.memory) <= choice_.memory_bytes;
      needs_ = min_of(needs_, c.memory);
    } catch (const Error& e) {
      c.refused = e.problem();
      if (remedy_.empty()) remedy_ = e.remedy();
    }
  }

  // Simulated, and so exactly what `weft simulate` prints.
  void simulate_candidate(Candidate& c) const {
    const Job job{layer_.problem, layouts_, layer_.heads_q, layer_.heads_k, c.schedule, layer_.shape};
    predict_candidate(layer_, c, [&](Pass pass) -> cost::Sketch::Result {
      const Timeline t = simulate(job, machine_, pass);
      return {t.seconds, t.memory.total()};
    });
    c.simulated = true;
  }
  void estimate_candidate(Candidate& c) const {
    predict_candidate(layer_, c, [&](Pass pass) { return sketch_->estimate(c.schedule, pass); });
  }

  void enter(const ScheduleOptions& options) {
    Candidate c{.schedule = options};
    attempt(c, [&] {
      if (!sketch_) return simulate_candidate(c);
      c.forward = sketch_->at_least(options, Pass::forward);
      if (layer_.backward) c.backward = sketch_->at_least(options, Pass::backward);
      c.at_least = least_.size() == kFinalists && c.seconds() > least_.back();
      if (!c.at_least) estimate_candidate(c);
    });
    if (c.usable() && !c.at_least) {
      least_.insert(std::upper_bound(least_.begin(), least_.end(), c.seconds()), c.seconds());
      if (least_.size() > kFinalists) least_.pop_back();
    }
    choice_.candidates.push_back(std::move(c));
  }

  // What the simulations of a candidate go through, in both passes.
  double work(const Candidate& c) const {
    if (!sketch_) return 0;
    return (choice_.slices + sketch_->listed_steps(c.schedule)) * (layer_.backward ? 2 : 1);
  }

  // Its exchanges alone take longer than the best can, however rough that estimate is: not worth a simulation.
  bool far_behind(const Candidate& c) const {
    constexpr double kRough = 1.5;
    const double backward = layer_.backward ? sketch_->at_least(c.schedule, Pass::backward) : 0;
    return sketch_->at_least(c.schedule, Pass::forward) + backward > kRough * estimated();
  }

  // Simulates the first few by the estimate, and then whatever the estimate does not put behind the best of those by
  // more than kNear, as far as the budget goes.
  void simulate_near(double& budget) {
    std::size_t done = 0;
    std::vector<bool> seen(choice_.candidates.size(), false);
    while (sketch_) {
      const auto next = best_of([&](const Candidate& c) { return !c.simulated && !seen[number(c)]; });
      const auto best = best_of([](const Candidate& c) { return c.simulated; });
      const double near = best ? kNear * choice_.candidates[*best].seconds() : kNever;
      if (!next || (done >= kFinalists && choice_.candidates[*next].seconds() > near)) {
        if (estimate_bounded(near) == 0) return;
        continue;
      }
      seen[*next] = true;
      Candidate& c = choice_.candidates[*next];
      if (done > 0 && c.seconds() > near && far_behind(c)) continue;
      if (work(c) > budget) {
        choice_.left_out += c.seconds() <= near;
        continue;
      }
      budget -= work(c);
      attempt(c, [&] { simulate_candidate(c); });
      done += c.usable();
    }
  }

  // Those that have only a bound, which is near: they may be faster after all, or the only ones that fit. Returns how
  // many there were.
  std::size_t estimate_bounded(double near) {
    std::size_t count = 0;
    for (Candidate& c : choice_.candidates) {
      if (!c.at_least || !c.refused.empty() || c.seconds() > near) continue;
      ++count;
      attempt(c, [&] { estimate_candidate(c); });
    }
    return count;
  }

  [[noreturn]] void refuse() const {
    if (needs_ == std::numeric_limits<Index>::max())
      throw Error(text("no schedule can be made: ", choice_.candidates.front().refused), remedy_);
    throw Error(text("no schedule fits ", gigabytes(choice_.memory_bytes), " a rank; the least needs ",
                     gigabytes(static_cast<double>(needs_))),
                "use more ranks, fewer tokens, or a larger memory_bytes");
  }

  const Layer& layer_;
  const Layouts& layouts_;
  const Machine& machine_;
  ScheduleChoice choice_;
  std::optional<cost::Sketch> sketch_;  // none: ranks that share a processor are simulated together
  double estimated_ = 0;
  std::vector<double> least_;  // the best estimates so far
  Index needs_ = std::numeric_limits<Index>::max();
  std::string remedy_;  // of the first that cannot be made
};

}  // namespace

std::vector<ScheduleOptions> usual_schedules(const Machine& machine, Index ranks, Index heads_q, Index heads_k) {
  std::vector<Index> levels;
  for (const Level& level : machine.levels) levels.push_back(level.ranks);
  return schedule::all_candidates({.ranks = ranks, .heads_q = heads_q, .heads_k = heads_k}, levels);
}

ScheduleChoice choose_schedule(const Layer& layer, const Layouts& layouts, const Machine& machine,
                               const ChooseOptions& options) {
  Contest contest(layer, layouts, machine, options);
  const Index slices = simulated_slices(options, contest.estimated(), layer.count);
  auto budget = static_cast<double>(slices);
  return contest.decided(contest.least_work() <= budget, budget, slices);
}

std::string ScheduleChoice::why() const {
  const Candidate& won = best();
  std::string out =
      text(words(won.schedule), ": ", milliseconds(won.seconds()), " (forward ", milliseconds(won.forward));
  if (won.backward > 0) out += text(", backward ", milliseconds(won.backward));
  out += text("), ", gigabytes(static_cast<double>(won.memory)), " a rank");
  if (!won.simulated)
    out += text(", estimated from a few ranks: all of them have about ", std::setprecision(2), slices,
                " slices, too many to simulate for a choice (simulated_slices is ", simulated_slices, ")");
  std::vector<const Candidate*> others;
  std::size_t too_large = 0, behind = 0;
  for (const Candidate& c : candidates) {
    too_large += !c.fits;
    if (&c == &won || !c.usable()) continue;
    if (c.simulated == won.simulated)
      others.push_back(&c);
    else
      ++behind;
  }
  std::sort(others.begin(), others.end(),
            [](const Candidate* a, const Candidate* b) { return a->seconds() < b->seconds(); });
  constexpr std::size_t kShown = 3;
  for (std::size_t n = 0; n < std::min(kShown, others.size()); ++n)
    out += text(n == 0 ? "; " : ", ", words(others[n]->schedule), others[n]->at_least ? " takes at least " : " takes ",
                more(others[n]->seconds(), won.seconds()));
  if (left_out > 0)
    out += text("; ", left_out, left_out == 1 ? " more is" : " more are",
                " near these by the estimate, and not simulated: simulated_slices = ", simulated_slices, " are spent");
  if (behind > left_out)
    out += text("; ", behind - left_out, behind - left_out == 1 ? " more is" : " more are",
                " behind these by a quick estimate");
  if (too_large > 0)
    out += text("; ", too_large, " of ", candidates.size(), " need more than ", gigabytes(memory_bytes));
  return out;
}

namespace {

void check_batch(std::span<const Layer> layers, Index ranks, const ChooseOptions& options) {
  if (ranks < 1) throw Error(text("a choice for ", ranks, " ranks"), "use at least one");
  if (layers.empty()) throw Error("no layers", "give at least one");
  if (!(options.memory_bytes >= 0))
    throw Error(text("a budget of ", options.memory_bytes, " bytes"), "give bytes, or 0 for the machine's");
  const Packing& first = layers[0].problem.packing();
  for (const Layer& layer : layers) {
    if (layer.count < 1) throw Error(text(layer.count, " layers of a kind"), "give at least one");
    const Packing& packing = layer.problem.packing();
    if (!(packing.q() == first.q()) || !(packing.k() == first.k()))
      throw Error("the layers have different packings", "choose a layout for each batch by itself");
  }
}

std::vector<LayoutKind> usual_layouts(const Packing& packing, Index ranks) {
  std::vector<LayoutKind> kinds = {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::balanced};
  // dual_chunk cuts each document by itself: only if that is possible without padding it anew.
  for (const Stream* s : {&packing.q(), &packing.k()})
    for (Index i = 0; i < s->sequences(); ++i)
      if (s->padded(i) % (2 * ranks) != 0) return kinds;
  kinds.push_back(LayoutKind::dual_chunk);
  return kinds;
}

// The layer with most work: `balanced` deals out its pairs.
const Layer& main_layer(std::span<const Layer> layers) {
  const auto work = [](const Layer& l) {
    return static_cast<double>(l.problem.visible_pairs()) * static_cast<double>(l.heads_q * l.count);
  };
  return *std::max_element(layers.begin(), layers.end(),
                           [&](const Layer& a, const Layer& b) { return work(a) < work(b); });
}

// The layouts of a batch: all are ranked by estimates, and those near the best are decided by simulations, the best
// first, as far as the budget goes; if not even the first can be simulated, by the estimates.
class LayoutContest {
 public:
  LayoutContest(std::span<const Layer> layers, Index ranks, const Machine& machine, const ChooseOptions& options)
      : layers_(layers) {
    const Layer& main = main_layer(layers);
    for (const LayoutKind kind :
         options.layouts.empty() ? usual_layouts(main.problem.packing(), ranks) : options.layouts) {
      Entry e{.said = {.layout = kind}, .layouts = {}, .layers = {}};
      attempt(e, [&] {
        e.layouts = std::make_unique<Layouts>(make_layouts(kind, main.problem, ranks));
        for (const Layer& layer : layers) {
          e.layers.push_back(std::make_unique<Contest>(layer, *e.layouts, machine, options));
          e.said.seconds += e.layers.back()->estimated() * static_cast<double>(layer.count);
        }
        least_ = std::min(least_, e.said.seconds);
      });
      entries_.push_back(std::move(e));
    }
  }

  BatchChoice decided(const ChooseOptions& options) {
    best_.seconds = kNever;
    best_.count = 0;
    for (const Layer& layer : layers_) best_.count += layer.count;
    const std::vector<Entry*> order = by_estimate();
    slices_ = simulated_slices(options, least_ / static_cast<double>(best_.count), best_.count);
    auto budget = static_cast<double>(slices_);
    constexpr double kNear = 1.25;  // estimates are seldom further off
    for (std::size_t n = 0; n < order.size(); ++n) {
      Entry& e = *order[n];
      // As long as nothing fits, all are tried.
      if (!best_.layers.empty() && e.said.seconds > kNear * least_) break;
      const double least = least_work(e);
      if (best_.layers.empty()) best_.simulated = least <= budget;
      if (best_.simulated && least > budget) continue;
      // What is left is shared with the layouts that follow.
      double later = 0;
      for (std::size_t m = n + 1; m < order.size() && order[m]->said.seconds <= kNear * least_; ++m)
        later += least_work(*order[m]);
      decide(e, budget, std::min(later, budget - least));
    }
    if (best_.layers.empty()) throw Error(text("no layout works: ", entries_.front().said.refused), remedy_);
    for (Entry& e : entries_) best_.layouts.push_back(std::move(e.said));
    return std::move(best_);
  }

 private:
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  struct Entry {
    BatchChoice::Tried said;
    std::unique_ptr<Layouts> layouts;
    std::vector<std::unique_ptr<Contest>> layers;
  };

  // Those that can be made, the first of those that take the same first.
  std::vector<Entry*> by_estimate() {
    std::vector<Entry*> left, order;
    for (Entry& e : entries_)
      if (e.said.refused.empty()) left.push_back(&e);
    while (!left.empty()) {
      auto best = left.begin();
      for (auto e = left.begin(); e != left.end(); ++e)
        if ((*e)->said.seconds < (*best)->said.seconds * (1 - kSame)) best = e;
      order.push_back(*best);
      left.erase(best);
    }
    return order;
  }

  static double least_work(const Entry& e) {
    double sum = 0;
    for (const auto& layer : e.layers) sum += layer->least_work();
    return sum;
  }

  template <class F>
  void attempt(Entry& e, const F& f) {
    try {
      f();
    } catch (const Error& error) {
      e.said.refused = error.problem();
      if (remedy_.empty()) remedy_ = error.remedy();
    }
  }

  // Of the budget so much is kept for others.
  void decide(Entry& e, double& budget, double kept) {
    attempt(e, [&] {
      std::vector<ScheduleChoice> chosen;
      double seconds = 0, needed = least_work(e);
      for (std::size_t n = 0; n < layers_.size(); ++n) {
        needed -= e.layers[n]->least_work();  // by the layers that follow
        double mine = budget - kept - needed;
        const double before = mine;
        chosen.push_back(e.layers[n]->decided(best_.simulated, mine, slices_));
        budget -= before - mine;
        seconds += chosen.back().best().seconds() * static_cast<double>(layers_[n].count);
        e.said.simulated = (n == 0 || e.said.simulated) && chosen.back().best().simulated;
      }
      e.said.seconds = seconds;
      // What was simulated comes before an estimate.
      const bool first = best_.layers.empty(), same = e.said.simulated == best_.simulated;
      if (!first && (same ? seconds >= best_.seconds * (1 - kSame) : best_.simulated)) return;
      best_.simulated = e.said.simulated;
      best_.layout = e.said.layout;
      best_.seconds = seconds;
      best_.layers = std::move(chosen);
    });
  }

  std::span<const Layer> layers_;
  std::vector<Entry> entries_;
  BatchChoice best_;
  double least_ = kNever;
  Index slices_ = 0;    // the budget
  std::string remedy_;  // of the first that does not work
};

}  // namespace

BatchChoice choose(std::span<const Layer> layers, Index ranks, const Machine& machine, const ChooseOptions& options) {
  check_batch(layers, ranks, options);
  return LayoutContest(layers, ranks, machine, options).decided(options);
}

std::string BatchChoice::why() const {
  std::string out = text("layout ", name(layout), ": ", milliseconds(seconds));
  if (count > 1) out += text(" for all ", count, " layers");
  if (!simulated) out += ", estimated";
  for (const Tried& t : layouts) {
    if (t.layout == layout) continue;
    out += !t.refused.empty() ? text("; ", name(t.layout), " cannot: ", t.refused)
           : t.simulated == simulated
               ? text("; ", name(t.layout), " ", milliseconds(t.seconds))
               : text("; ", name(t.layout), " about ", more(t.seconds, seconds), ", by an estimate");
  }
  for (std::size_t n = 0; n < layers.size(); ++n) out += text("\nlayer ", n, ": ", layers[n].why());
  return out;
}

}  // namespace weft
