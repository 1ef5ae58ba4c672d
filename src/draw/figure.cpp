#include "draw/figure.h"

#include <algorithm>

#include "draw/formatting.h"
#include "draw/step_keys.h"
#include "index.h"
#include "text.h"
#include "weft/choose.h"
#include "weft/error.h"
#include "weft/plan.h"

namespace weft::draw {
namespace {

// The most slices of all panels together; panels that do not fit leave theirs out, and the page says so.
constexpr Index kSlices = 60'000;
constexpr Index kEvents = 60'000;  // of all timelines
// Every rank plans against every other and looks at every document, some 10 ns each. Messages between all ranks are
// held until the panel is made: 0.6 GB for 1,024 ranks, 16 times as much for 4,096.
constexpr Index kWork = Index{1} << 30, kMaxRanks = 1024;

void check_size(const Subject& subject, const std::vector<PanelSpec>& specs) {
  for (const PanelSpec& s : specs) {
    const Index ranks = s.layouts.q.ranks(), documents = subject.problem.packing().sequences() + 1;
    if (ranks > kMaxRanks || ranks * ranks > kWork / documents)
      throw Error(text(ranks, " ranks with ", documents - 1, " documents are too many to draw"),
                  text("use at most ", kMaxRanks, " ranks, and ranks x ranks x documents up to ", kWork));
  }
}

Index pair_heads(const Schedule& s) {
  Index sum = 0;
  for (const Step& step : s.steps) sum += visible_pairs(s.plans[at(step.plan)]) * step.heads_q.size();
  return sum;
}

Slice in_query_buffer(Slice s, Index first_row) {
  s.q_begin += first_row;
  s.q_end += first_row;
  s.lo = shift_bound(s.lo, -first_row);
  s.hi = shift_bound(s.hi, -first_row);
  return s;
}

// Several steps may share a plan, each for other heads: its slices are drawn in the first of them.
void add_slices(const std::vector<Schedule>& all, Panel& panel) {
  for (const Schedule& s : all) {
    std::vector<bool> seen(s.plans.size(), false);
    for (std::size_t step = 0; step < s.steps.size(); ++step) {
      const std::size_t number = at(s.steps[step].plan);
      const Plan& plan = s.plans[number];
      if (seen[number] || plan.slices.empty()) continue;
      seen[number] = true;
      const std::vector<Run> runs = keys_of_step(all, s.rank, static_cast<Index>(step));
      for (const Slice& slice : plan.slices) {
        const Range keys = touched_keys(slice);
        const auto run = std::upper_bound(runs.begin(), runs.end(), keys.begin,
                                          [](Index row, const Run& r) { return row < r.row + r.count; });
        if (run == runs.end() || run->row > keys.begin) continue;  // no rank holds these rows
        panel.slices.push_back({.rank = s.rank,
                                .step = static_cast<Index>(step),
                                .slice = in_query_buffer(slice, s.steps[step].queries.begin),
                                .k_shift = run->token - run->row * run->stride,
                                .k_stride = run->stride});
      }
    }
  }
}

std::vector<Index> drawn_ranks(Index ranks, Index steps, Index events) {
  constexpr Index kMost = 32, kLeast = 4, kOfAStep = 4;  // compute, exchange, wait, rows
  std::vector<Index> drawn;
  const Index room = events / (kOfAStep * max_of(steps, 1)), count = min_of(ranks, min_of(max_of(room, kLeast), kMost));
  for (Index i = 0; i < count; ++i) drawn.push_back(i * ranks / count);
  return drawn;
}

// `all`: the schedule of every rank, in rank order. About `events` events of each pass are recorded: of all ranks, or
// of fewer ranks where these have more.
Timelines make_timelines(const std::vector<Schedule>& all, const TensorShape& shape, const Machine& machine,
                         Index events) {
  const SimulateOptions options{
      .detail = drawn_ranks(static_cast<Index>(all.size()), static_cast<Index>(all.front().steps.size()), events)};
  Timelines times{.about = text("simulated on ", machine.name)};
  try {
    times.forward = simulate(all, shape, machine, Pass::forward, options);
    times.backward = simulate(all, shape, machine, Pass::backward, options);
  } catch (const Error& refused) {  // the machine has no rate for these tensors: everything else can still be drawn
    times = {.about = text("not simulated: ", refused.what())};
  }
  return times;
}

Panel make_panel(const Subject& subject, const PanelSpec& spec, Index& room, Index events) {
  const Index ranks = spec.layouts.q.ranks();
  std::vector<Schedule> all;
  for (Index r = 0; r < ranks; ++r)
    all.push_back(make_schedule(subject.problem, spec.layouts, r, {subject.heads_q, subject.heads_k, subject.head_map},
                                spec.options));
  Panel panel{.layouts = spec.layouts, .options = spec.options, .note = spec.note};
  panel.ulysses = all.front().ulysses();
  panel.query_ranks = all.front().query_ranks;
  panel.steps = static_cast<Index>(all.front().steps.size());
  panel.head_steps = panel.steps / max_of(static_cast<Index>(all.front().plans.size()), 1);
  panel.step_of = meeting_steps(all);
  std::vector<Index> work;
  for (const Schedule& s : all) {
    work.push_back(pair_heads(s));
    panel.ranks.push_back({.pair_heads = work.back(),
                           .forward = traffic(s, subject.shape, Pass::forward),
                           .backward = traffic(s, subject.shape, Pass::backward)});
    for (const Plan& plan : s.plans) panel.slices_total += static_cast<Index>(plan.slices.size());
  }
  panel.imbalance = imbalance(work);
  if (panel.slices_total <= room) {
    add_slices(all, panel);
    room -= panel.slices_total;
  }
  panel.times = make_timelines(all, subject.shape, subject.machine, events);
  return panel;
}

}  // namespace

std::string mask_words(const Mask& mask) {
  if (mask.slices) return text(counted(static_cast<Index>(mask.slices->size()), "slice"), " of your own");
  const auto side = [](Index n) { return n == -1 ? std::string("unlimited") : grouped(n); };
  std::string said = mask.causal ? "causal" : "full";
  if (mask.align == Align::bottom_right) said += ", bottom_right";
  if (mask.left != -1 || mask.right != -1) said += text(", window (", side(mask.left), ", ", side(mask.right), ")");
  if (mask.chunk) said += text(", chunks of ", grouped(*mask.chunk));
  return said;
}

std::string words(const Subject& subject) {
  const Packing& p = subject.problem.packing();
  const std::string tokens =
      p.self() ? counted(p.q().tokens(), "token")
               : text(counted(p.q().tokens(), "query token"), ", ", counted(p.k().tokens(), "key token"));
  return text(counted(p.sequences(), "document"), ", ", tokens, ", mask ", mask_words(subject.problem.mask()));
}

std::string words(const Panel& panel) { return text(name(panel.layouts.q.kind()), ", ", weft::words(panel.options)); }

PanelSpec chosen(const Subject& subject, const Layouts& layouts) {
  const ScheduleChoice choice = choose_schedule(
      {.problem = subject.problem, .heads_q = subject.heads_q, .heads_k = subject.heads_k, .shape = subject.shape},
      layouts, subject.machine, {.simulated_slices = kWork >> 10});
  return {layouts, choice.schedule(), text("chosen: ", choice.why())};
}

Figure make_figure(const Subject& subject, const std::vector<PanelSpec>& specs) {
  if (specs.empty()) throw Error("nothing to draw", "give at least one layout and one schedule");
  check_size(subject, specs);
  Figure figure{.subject = subject, .mask = subject.problem.global_slices(), .panels = {}};
  Index room = kSlices;
  const Index events = kEvents / (2 * static_cast<Index>(specs.size()));
  for (const PanelSpec& spec : specs) figure.panels.push_back(make_panel(subject, spec, room, events));
  return figure;
}

}  // namespace weft::draw
