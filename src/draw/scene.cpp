#include "draw/scene.h"

#include <algorithm>

#include "draw/contents.h"
#include "draw/times.h"
#include "draw/written.h"
#include "text.h"
#include "weft/choose.h"
#include "weft/error.h"
#include "weft/plan.h"

namespace weft::draw {
namespace {

// Slices of all panels that a page may hold; past it panels go without, and say so.
constexpr Index kSlices = 60'000;
constexpr Index kEvents = 60'000;  // of timelines
// Every rank plans against every other and looks at every document: some 10 ns each. What every rank gets of every
// other is kept until the panel is made: 0.6 GB of 1,024 ranks, and 16 times as much of 4,096.
constexpr Index kWork = Index{1} << 30, kMaxRanks = 1024;

void check_size(const Subject& subject, const std::vector<Setting>& settings) {
  for (const Setting& s : settings) {
    const Index ranks = s.layouts.q.ranks(), documents = subject.problem.packing().sequences() + 1;
    if (ranks > kMaxRanks || ranks * ranks > kWork / documents)
      throw Error(text(ranks, " ranks with ", documents - 1, " documents are too many to draw"),
                  text("use at most ", kMaxRanks, " ranks, and ranks x ranks x documents up to ", kWork));
  }
}

Index pair_heads(const Schedule& s) {
  Index sum = 0;
  for (const Step& step : s.steps)
    sum += visible_pairs(s.plans[static_cast<std::size_t>(step.plan)]) * step.heads_q.size();
  return sum;
}

// The first step of each plan attends its slices; the others bring more heads.
void add_slices(const std::vector<Schedule>& all, Panel& panel) {
  for (const Schedule& s : all) {
    std::vector<bool> seen(s.plans.size(), false);
    for (std::size_t step = 0; step < s.steps.size(); ++step) {
      const std::size_t at = static_cast<std::size_t>(s.steps[step].plan);
      const Plan& plan = s.plans[at];
      if (seen[at] || plan.slices.empty()) continue;
      seen[at] = true;
      const std::vector<Run> runs = contents(all, s.rank, static_cast<Index>(step));
      for (const Slice& slice : plan.slices) {
        const Range keys = touched_keys(slice);
        const auto run = std::upper_bound(runs.begin(), runs.end(), keys.begin,
                                          [](Index row, const Run& r) { return row < r.row + r.count; });
        if (run == runs.end() || run->row > keys.begin) continue;  // a slice of rows that nobody holds
        panel.slices.push_back({.rank = s.rank,
                                .step = static_cast<Index>(step),
                                .slice = slice,
                                .k_shift = run->token - run->row * run->stride,
                                .k_stride = run->stride});
      }
    }
  }
}

Panel make_panel(const Subject& subject, const Setting& setting, Index& room, Index events) {
  const Index ranks = setting.layouts.q.ranks();
  std::vector<Schedule> all;
  for (Index r = 0; r < ranks; ++r)
    all.push_back(make_schedule(subject.problem, setting.layouts, r,
                                {subject.heads_q, subject.heads_k, subject.head_map}, setting.options));
  Panel panel{.layouts = setting.layouts, .options = setting.options, .note = setting.note};
  panel.inside = all.front().ulysses();
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
  panel.balance = imbalance(work);
  if (panel.slices_total <= room) {
    add_slices(all, panel);
    room -= panel.slices_total;
  }
  panel.times = make_times(all, subject.shape, subject.machine, events);
  return panel;
}

std::string mask_words(const Mask& mask) {
  if (mask.slices) return text("mask of ", counted(static_cast<Index>(mask.slices->size()), "slice"));
  const auto side = [](Index n) { return n == -1 ? std::string("unlimited") : grouped(n); };
  std::string said = text("mask ", mask.causal ? "causal" : "full");
  if (mask.align == Align::bottom_right) said += ", bottom_right";
  if (mask.left != -1 || mask.right != -1) said += text(", window (", side(mask.left), ", ", side(mask.right), ")");
  if (mask.chunk) said += text(", chunks of ", grouped(*mask.chunk));
  return said;
}

}  // namespace

std::string words(const Subject& subject) {
  const Packing& p = subject.problem.packing();
  const std::string tokens =
      p.self() ? counted(p.q().tokens(), "token")
               : text(counted(p.q().tokens(), "query token"), ", ", counted(p.k().tokens(), "key token"));
  return text(counted(p.sequences(), "document"), ", ", tokens, ", ", mask_words(subject.problem.mask()));
}

std::string words(const Panel& panel) { return text(name(panel.layouts.q.kind()), ", ", weft::words(panel.options)); }

Setting chosen(const Subject& subject, const Layouts& layouts) {
  const ScheduleChoice choice = choose_schedule(
      {.problem = subject.problem, .heads_q = subject.heads_q, .heads_k = subject.heads_k, .shape = subject.shape},
      layouts, subject.machine, {.simulated_slices = kWork >> 10});
  return {layouts, choice.schedule(), text("chosen: ", choice.why())};
}

Scene make_scene(const Subject& subject, const std::vector<Setting>& settings) {
  if (settings.empty()) throw Error("nothing to draw", "give at least one layout and one schedule");
  check_size(subject, settings);
  Scene scene{.subject = subject, .mask = subject.problem.global_slices(), .panels = {}};
  Index room = kSlices;
  const Index events = kEvents / (2 * static_cast<Index>(settings.size()));
  for (const Setting& setting : settings) scene.panels.push_back(make_panel(subject, setting, room, events));
  return scene;
}

}  // namespace weft::draw
