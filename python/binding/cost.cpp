// Machines, predictions and choices.
#include <string>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "gil.h"
#include "module.h"
#include "problem.h"
#include "schedule_options.h"
#include "tensor.h"
#include "text.h"
#include "weft/choose.h"
#include "weft/error.h"
#include "weft/placed.h"
#include "weft/simulate.h"

namespace weft::python {
namespace {

using namespace nb::literals;

nb::dict timeline_dict(const Timeline& t) {
  nb::list ranks, timelines;
  for (const RankTimes& r : t.ranks)
    ranks.append(dict_of("end", r.end, "compute", r.compute, "rows", r.rows, "exchange", r.exchange, "overlapped",
                         r.overlapped, "waiting", r.waiting, "pairs", r.pairs, "bytes_in", r.bytes_in, "bytes_out",
                         r.bytes_out));
  for (const RankTimeline& rank : t.detail) {
    nb::list events;
    for (const TimelineEvent& e : rank.events)
      events.append(dict_of("kind", std::string(name(e.kind)), "name", std::string(e.name), "step", e.step, "begin",
                            e.begin, "end", e.end, "pairs", e.pairs, "bytes_in", e.bytes_in, "bytes_out", e.bytes_out));
    timelines.append(dict_of("rank", rank.rank, "events", events));
  }
  return dict_of("seconds", t.seconds, "ideal", t.ideal, "efficiency", t.efficiency(), "overlap", t.overlap(),
                 "straggling", t.straggling(), "slowest", t.slowest(), "bytes_in", t.bytes_in(), "memory_bytes",
                 t.memory.total(), "workspace_bytes", t.memory.workspace, "ranks", ranks, "timelines", timelines);
}

TensorShape shape_of(DType dtype, Index dim_qk, Index dim_v, Index source = 0, bool keeps_expanded = false) {
  return {.dtype = dtype, .dim_qk = dim_qk, .dim_v = dim_v, .source = source, .keeps_expanded = keeps_expanded};
}

void bind_machine(nb::module_& m) {
  nb::class_<Machine>(m, "Machine", R"(What kernels and links cost on a machine: a preset, or a machine file's text.

    >>> import weft
    >>> weft.Machine("a100-200g").about
    'nodes of 8 A100 SXM (80 GB) joined by NVLink, 200 Gb/s a GPU between nodes'
)")
      .def(
          "__init__", [](Machine* self, std::string_view preset) { new (self) Machine(machine_preset(preset)); },
          "preset"_a)
      .def_static(
          "from_json", [](std::string_view json, std::string_view file) { return machine_from_json(json, file); },
          "json"_a, "file"_a = "machine", "A machine from a machine file's text; errors name `file`.")
      .def(
          "to_json", [](const Machine& machine) { return to_json(machine); }, "The text of a machine file.")
      .def_ro("name", &Machine::name)
      .def_ro("about", &Machine::about)
      .def(
          "__eq__", [](const Machine& a, const Machine& b) { return to_json(a) == to_json(b); }, nb::is_operator())
      .def("__hash__", [](const Machine& machine) { return std::hash<std::string>{}(to_json(machine)); })
      .def("__repr__", [](const Machine& machine) { return "Machine(" + machine.name + ": " + machine.about + ")"; });
  m.def("machines", [] {
    std::vector<std::string> names;
    for (const Machine& machine : machine_presets()) names.push_back(machine.name);
    return names;
  });
}

// Where the sequences of a packing lie, and why.
struct PlacedSequences {
  PlacedLayouts layout;
  Placement placement;
};

// The options of a machine and a layer, or those that stand for themselves.
PlacedOptions options_for(const std::optional<Machine>& machine, const std::pair<Index, Index>& heads, DType dtype,
                          const std::pair<Index, Index>& dims, bool backward) {
  if (!machine) return {};
  const TensorShape shape{.dtype = dtype, .dim_qk = dims.first, .dim_v = dims.second};
  return placed_options(*machine, heads.first, heads.second, shape, backward);
}

// A number of each sequence.
template <class T>
std::vector<T> of_sequences(const PlacedSequences& placed, T PlacedSequence::* field) {
  std::vector<T> all;
  for (const PlacedSequence& s : placed.placement.sequences) all.push_back(s.*field);
  return all;
}

void bind_placement(nb::module_& m) {
  nb::class_<PlacedSequences>(m, "Placement", "Where weft.place puts the sequences of a packing, and why.")
      .def_ro("layout", &PlacedSequences::layout, "For layout= of shard, attention, unshard and the others.")
      .def_prop_ro(
          "ranks", [](const PlacedSequences& p) { return array_of(of_sequences(p, &PlacedSequence::ranks)); },
          "[n] on how many ranks each sequence lies; 0 where it has no queries.", kNew)
      .def_prop_ro(
          "nodes", [](const PlacedSequences& p) { return array_of(of_sequences(p, &PlacedSequence::nodes)); },
          "[n] in how many nodes those are.", kNew)
      .def_prop_ro(
          "work", [](const PlacedSequences& p) { return of_sequences(p, &PlacedSequence::work); },
          "[n] of each sequence over a rank's mean share.")
      .def_prop_ro(
          "reasons",
          [](const PlacedSequences& p) {
            std::vector<std::string> reasons;
            for (const PlacedSequence& s : p.placement.sequences) reasons.emplace_back(name(s.why));
            return reasons;
          },
          "[n] why so many ranks: 'whole', 'work' (too much for one), 'rows' (more than one may hold), 'room' (fills "
          "gaps).")
      .def_prop_ro(
          "capacity", [](const PlacedSequences& p) { return p.placement.capacity; }, "Rows of a rank at most.")
      .def_prop_ro(
          "seconds", [](const PlacedSequences& p) { return p.placement.seconds; },
          "Predicted by the weights, to compare placements with; weft.simulate times one.")
      .def(
          "why", [](const PlacedSequences& p) { return p.placement.why(); }, "The same in a sentence.")
      .def("__repr__", [](const PlacedSequences& p) { return "Placement(" + p.placement.why() + ")"; });
  m.def(
      "place",
      [](const Packing& packing, Index ranks, const Mask& mask, Index capacity, Index node,
         const std::optional<Machine>& machine, std::pair<Index, Index> heads, DType dtype,
         std::pair<Index, Index> dims, bool backward) {
        PlacedOptions options = options_for(machine, heads, dtype, dims, backward);
        options.capacity = capacity;
        if (node != 0) options.node = node;
        Placement placement = place(Problem(packing, mask), ranks, options);
        return PlacedSequences{{packing, placement.layouts, mask, true}, std::move(placement)};
      },
      "packing"_a, "ranks"_a, "mask"_a, "capacity"_a, "node"_a, "machine"_a.none(), "heads"_a, "dtype"_a, "dims"_a,
      "backward"_a);
}

void bind_choices(nb::module_& m) {
  nb::class_<ScheduleChoice>(m, "ScheduleChoice", "The best predicted schedule of a layer.")
      .def_prop_ro(
          "options", [](const ScheduleChoice& c) { return options_of(c.schedule()); },
          nb::for_getter(nb::sig("def options(self) -> dict[str, typing.Any]")))
      .def_prop_ro(
          "schedule", [](const ScheduleChoice& c) { return std::string(name(c.schedule().kind)); },
          nb::for_getter(nb::sig(
              "def schedule(self) -> typing.Literal['all_gather', 'ring', 'all_to_all', 'hybrid', 'exact', 'mesh']")))
      .def_prop_ro("seconds", [](const ScheduleChoice& c) { return c.best().seconds(); })
      .def_prop_ro("forward", [](const ScheduleChoice& c) { return c.best().forward; })
      .def_prop_ro("backward", [](const ScheduleChoice& c) { return c.best().backward; })
      .def_prop_ro("memory_bytes", [](const ScheduleChoice& c) { return c.best().memory; })
      .def_prop_ro("simulated", [](const ScheduleChoice& c) { return c.best().simulated; })
      .def_prop_ro("candidates",
                   [](const ScheduleChoice& c) {
                     nb::list all;
                     for (const Candidate& each : c.candidates)
                       all.append(dict_of("schedule", std::string(name(each.schedule.kind)), "options",
                                          options_of(each.schedule), "words", words(each.schedule), "seconds",
                                          each.seconds(), "at_least", each.at_least, "simulated", each.simulated,
                                          "memory_bytes", each.memory, "fits", each.fits, "refused", each.refused));
                     return all;
                   })
      .def("why", &ScheduleChoice::why)
      .def("__repr__", [](const ScheduleChoice& c) { return "ScheduleChoice(" + words(c.schedule()) + ")"; });
  m.def(
      "choose_schedule",
      [](const Problem& problem, const PlacedLayouts& placed, Index heads_q, Index heads_k, DType dtype, Index dim_qk,
         Index dim_v, const Machine& machine, bool backward, double memory_bytes, Index source, bool keeps_expanded,
         Index simulated_slices) {
        return choose_schedule(
            {.problem = problem,
             .heads_q = heads_q,
             .heads_k = heads_k,
             .shape = shape_of(dtype, dim_qk, dim_v, source, keeps_expanded),
             .count = 1,
             .backward = backward},
            placed.layouts, machine,
            {.memory_bytes = memory_bytes, .schedules = {}, .layouts = {}, .simulated_slices = simulated_slices});
      },
      "problem"_a, "layout"_a, "heads_q"_a, "heads_k"_a, "dtype"_a, "dim_qk"_a, "dim_v"_a, "machine"_a,
      "backward"_a = true, "memory_bytes"_a = 0.0, "source"_a = 0, "keeps_expanded"_a = false, "simulated_slices"_a = 0,
      nb::call_guard<ReleaseGil>());

  nb::class_<BatchChoice>(m, "BatchChoice", "The best predicted layout of a batch, and a schedule for each layer.")
      .def_prop_ro(
          "layout", [](const BatchChoice& c) { return std::string(name(c.layout)); },
          nb::for_getter(
              nb::sig("def layout(self) -> typing.Literal['contiguous', 'dual_chunk', 'zigzag', 'striped', 'balanced', "
                      "'placed']")))
      .def_ro("seconds", &BatchChoice::seconds)
      .def_ro("simulated", &BatchChoice::simulated)
      .def_ro("layers", &BatchChoice::layers)
      .def("why", &BatchChoice::why)
      .def("__repr__", [](const BatchChoice& c) { return "BatchChoice(" + std::string(name(c.layout)) + ")"; });
  m.def(
      "choose",
      [](const std::vector<Problem>& problems, const std::vector<Index>& counts, Index ranks, Index heads_q,
         Index heads_k, DType dtype, Index dim_qk, Index dim_v, const Machine& machine, bool backward,
         double memory_bytes, const std::vector<std::string>& among) {
        std::vector<LayoutKind> layouts;
        for (const std::string& each : among) layouts.push_back(layout_kind(each));
        if (counts.size() != problems.size())
          throw Error(text(counts.size(), " counts for ", problems.size(), " problems"), "give one a problem");
        std::vector<Layer> layers;
        for (std::size_t n = 0; n < problems.size(); ++n)
          layers.push_back({.problem = problems[n],
                            .heads_q = heads_q,
                            .heads_k = heads_k,
                            .shape = shape_of(dtype, dim_qk, dim_v),
                            .count = counts[n],
                            .backward = backward});
        return choose(layers, ranks, machine,
                      {.memory_bytes = memory_bytes, .schedules = {}, .layouts = std::move(layouts)});
      },
      "problems"_a, "counts"_a, "ranks"_a, "heads_q"_a, "heads_k"_a, "dtype"_a, "dim_qk"_a, "dim_v"_a, "machine"_a,
      "backward"_a = true, "memory_bytes"_a = 0.0, "layouts"_a = std::vector<std::string>{},
      nb::call_guard<ReleaseGil>());
}

void bind_simulate(nb::module_& m) {
  m.def(
      "simulate",
      [](const Problem& problem, const PlacedLayouts& placed, Index heads_q, Index heads_k, std::string_view schedule,
         nb::dict options, DType dtype, Index dim_qk, Index dim_v, const Machine& machine, bool backward,
         const std::vector<Index>& detail) {
        const Job job{problem,
                      placed.layouts,
                      heads_q,
                      heads_k,
                      schedule_options(schedule, options),
                      shape_of(dtype, dim_qk, dim_v)};
        const Pass pass = backward ? Pass::backward : Pass::forward;
        Timeline t;
        {
          const ReleaseGil others_run;
          t = simulate(job, machine, pass, {.detail = detail});
        }
        return timeline_dict(t);
      },
      "problem"_a, "layout"_a, "heads_q"_a, "heads_k"_a, "schedule"_a, "options"_a, "dtype"_a, "dim_qk"_a, "dim_v"_a,
      "machine"_a, "backward"_a, "detail"_a);
}

}  // namespace

void bind_cost(nb::module_& m) {
  bind_machine(m);
  bind_placement(m);
  bind_choices(m);
  bind_simulate(m);
}

}  // namespace weft::python
