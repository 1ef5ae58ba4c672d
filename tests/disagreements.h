// Ways in which ranks are given different things: what all of them run, how one of them differs, and what must be said.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "rank_tensors.h"
#include "weft/executor.h"
#include "weft/schedule.h"

namespace weft::test {

// What a rank is given, and which passes it makes.
struct RankTask {
  std::vector<Index> offsets = {0, 40, 64, 96}, used = {40, 24, 32};
  Mask mask = {.causal = true};
  LayoutKind layout = LayoutKind::zigzag;
  Mask dealt_by = {.causal = true};  // the mask that a balanced layout is made for
  ScheduleOptions how = {};
  Index heads_q = 4, heads_k = 4, dim = 8;
  std::vector<Index> head_map = {};
  DType dtype = DType::f32;
  double scale = 0, softcap = 0;
  Sink sink = {};
  bool lse = true, max_logit = false, deterministic = false;
  std::string_view passes = "fb";   // forwards and backwards
  std::vector<Index> layers = {0};  // of each pass; the last one of all that follow
};

struct Disagreement {
  std::string name, said;  // what differs, and part of what is said of it
  std::function<void(RankTask&)> odd;
  std::function<void(RankTask&)> all = {};  // of all ranks, before `odd`
  bool swapped = false;                     // matters only where heads are swapped
};

inline const std::vector<Disagreement>& disagreements() {
  static const std::vector<Disagreement> all = {
      {"cu_seqlens of the same total", "the packing",
       [](RankTask& t) { t.offsets = {0, 48, 64, 96}, t.used = {48, 16, 32}; }},
      {"cu_seqlens of another total", "the packing",
       [](RankTask& t) { t.offsets = {0, 40, 64, 80}, t.used = {40, 24, 16}; }},
      {"lengths without padding", "the packing", [](RankTask& t) { t.used = {40, 20, 32}; }},
      {"causal", "the mask", [](RankTask& t) { t.mask.causal = false; }},
      {"window", "the mask", [](RankTask& t) { t.mask.left = 7; }},
      {"chunk", "the mask", [](RankTask& t) { t.mask.chunk = 16; }},
      {"alignment", "the mask", [](RankTask& t) { t.mask.align = Align::bottom_right; }},
      {"slices of the caller", "the mask",
       [](RankTask& t) { t.mask = {.slices = std::vector<Slice>{{0, 40, 0, 40, -5, 0}}}; }},
      {"scale", "the attention", [](RankTask& t) { t.scale = 0.5; }},
      {"softcap", "the attention", [](RankTask& t) { t.softcap = 10; }},
      {"sink", "the attention", [](RankTask& t) { t.sink = Sink::off_by_one(); }},
      {"layout", "the layout", [](RankTask& t) { t.layout = LayoutKind::contiguous; }},
      {"what a balanced layout is dealt by", "the layout", [](RankTask& t) { t.dealt_by = {.left = 3, .right = 0}; },
       [](RankTask& t) { t.layout = LayoutKind::balanced; }},
      {"schedule", "the schedule",
       [](RankTask& t) {
         t.how.kind = t.how.kind == ScheduleKind::ring ? ScheduleKind::all_gather : ScheduleKind::ring;
       }},
      {"deterministic", "the schedule", [](RankTask& t) { t.deterministic = true; }},
      {"query heads", "shapes", [](RankTask& t) { t.heads_q = 8; }},
      {"K/V heads", "shapes", [](RankTask& t) { t.heads_k = 2; }},
      {"head map", "shapes", [](RankTask& t) { t.head_map = {0, 0, 1, 3}; },
       [](RankTask& t) { t.head_map = {0, 1, 2, 3}; }},
      {"dim", "shapes", [](RankTask& t) { t.dim = 16; }},
      {"dtype", "shapes", [](RankTask& t) { t.dtype = DType::f16; }, [](RankTask& t) { t.dtype = DType::bf16; }},
      {"whether lse is asked for", "shapes", [](RankTask& t) { t.lse = false, t.passes = "f"; },
       [](RankTask& t) { t.passes = "ff"; }, true},
      {"whether max_logit is asked for", "shapes", [](RankTask& t) { t.max_logit = true; }},
      {"a backward left out", " in pass 2, a forward", [](RankTask& t) { t.passes = "ffbb"; },
       [](RankTask& t) { t.passes = "fbfb"; }},
      {"the number of the layer", "the number of the layer", [](RankTask& t) { t.layers = {0, 1, 3}; },
       [](RankTask& t) { t.passes = "fffbbb", t.layers = {0, 1, 2}; }},
  };
  return all;
}

// The passes of a task on one rank, where the kernel's tensors lie.
inline void run_task(Communicator& c, const RankTask& t, const std::string& kernel = "cpu.scalar") {
  const Place place = check::place_of(kernel, c.rank());
  const Problem problem(Stream::from_used(t.offsets, t.used), t.mask);
  const Layout dealt = Layout::balanced(Problem(problem.packing(), t.dealt_by), c.ranks());
  const Layouts layouts =
      t.layout == LayoutKind::balanced ? Layouts{dealt, dealt} : make_layouts(t.layout, problem, c.ranks());
  Executor executor(c, make_schedule(problem, layouts, c.rank(), {t.heads_q, t.heads_k, t.head_map}, t.how),
                    {.kernel = kernel, .deterministic = t.deterministic, .place = place});
  const RankTensors<> tensors(
      RankSizes{layouts.q.rows(), layouts.k.rows(), t.heads_q, t.heads_k, t.dim, t.dim, t.dtype}, 1);
  check::DeviceMirror mirror(place);
  Attention attention{.softcap = t.softcap, .sink = t.sink, .head_map = t.head_map};
  if (t.scale > 0) attention.scale = t.scale;
  RankArgs args = tensors.args(mirror, attention);
  if (!t.lse) args.forward.lse = {};
  if (t.max_logit) args.forward.max_logit = mirror.out(tensors.max_logit.view);
  mirror.send();
  for (std::size_t i = 0; i < t.passes.size(); ++i) {
    args.forward.layer = args.backward.layer = t.layers[std::min(i, t.layers.size() - 1)];
    t.passes[i] == 'f' ? executor.forward(args.forward) : executor.backward(args.backward);
    if (place.kind == DeviceKind::cpu) continue;
    device::synchronize(place);
    c.check();
  }
}

// That of rank `odd` differs from those of all others.
inline RankTask task_of(const Disagreement& way, const ScheduleOptions& how, Index rank, Index odd) {
  RankTask task;
  task.how = how;
  if (way.all) way.all(task);
  if (rank == odd) way.odd(task);
  return task;
}

}  // namespace weft::test
