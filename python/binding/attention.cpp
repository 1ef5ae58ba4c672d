// Attention on one rank and by schedules.
#include "attention.h"

#include <memory>
#include <optional>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "communicator.h"
#include "convert.h"
#include "gil.h"
#include "kernel/registry.h"
#include "module.h"
#include "problem.h"
#include "run/executor_data.h"
#include "schedule_options.h"
#include "text.h"
#include "torch/source.h"
#include "weft/error.h"
#include "weft/support.h"

namespace weft::python {
namespace {

using namespace nb::literals;

template <class Run>
void bind_passes(nb::class_<Run>& run) {
  run.def(
         "forward",
         [](Run& r, const Array& q, const Array& k, const Array& v, Format format, const Settings& settings,
            const Array& out, const std::optional<Array>& lse, const std::optional<Array>& max_logit,
            std::uintptr_t stream, Index layer) {
           auto args = forward_args<typename Run::Forward>(q, k, v, format, settings, out, lse, max_logit, stream);
           r.forward(args, layer);
         },
         "q"_a, "k"_a, "v"_a, "format"_a, "settings"_a, "out"_a, "lse"_a.none(), "max_logit"_a.none(), "stream"_a = 0,
         "layer"_a = kNoLayer, nb::call_guard<ReleaseGil>())
      .def(
          "backward",
          [](Run& r, const Array& q, const Array& k, const Array& v, Format format, const Settings& settings,
             const Array& out, const Array& lse, const Array& dout, const Array& dq, const Array& dk, const Array& dv,
             const std::optional<Array>& dsink, std::uintptr_t stream, Index layer) {
            auto args = backward_args<typename Run::Backward>(q, k, v, format, settings, out, lse, dout,
                                                              {dq, dk, dv, dsink}, stream);
            r.backward(args, layer);
          },
          "q"_a, "k"_a, "v"_a, "format"_a, "settings"_a, "out"_a, "lse"_a, "dout"_a, "dq"_a, "dk"_a, "dv"_a,
          "dsink"_a.none(), "stream"_a = 0, "layer"_a = kNoLayer, nb::call_guard<ReleaseGil>());
}

void bind_one_rank(nb::module_& m) {
  nb::class_<Settings>(m, "Settings")
      .def(
          "__init__",
          [](Settings* self, std::optional<double> scale, double softcap, std::optional<Array> sink, bool off_by_one,
             nb::object head_map) {
            new (self) Settings{scale, softcap, std::move(sink), off_by_one,
                                optional_indices(head_map, "head_map").value_or(std::vector<Index>{})};
          },
          "scale"_a.none() = nb::none(), "softcap"_a = 0.0, "sink"_a.none() = nb::none(), "off_by_one"_a = false,
          "head_map"_a.none() = nb::none());

  nb::class_<OneRank> run(m, "OneRank", "A plan of the whole problem, run where the tensors are.");
  run.def(
      "__init__",
      [](OneRank* self, const Problem& problem, std::string kernel, bool deterministic) {
        new (self) OneRank{whole_plan(problem), std::move(kernel), deterministic};
      },
      "problem"_a, "kernel"_a = "", "deterministic"_a = false);
  bind_passes(run);
}

void bind_schedule(nb::module_& m) {
  nb::class_<Schedule>(m, "RankSchedule", "What one rank does: rows that move, then slices that are attended.")
      .def(
          "__init__",
          [](Schedule* self, const Problem& problem, const PlacedLayouts& placed, Index rank, Index heads_q,
             Index heads_k, nb::object head_map, std::string_view schedule, nb::dict options) {
            const auto map = optional_indices(head_map, "head_map").value_or(std::vector<Index>{});
            new (self) Schedule(make_schedule(problem, placed.layouts, rank, {heads_q, heads_k, map},
                                              schedule_options(schedule, options)));
          },
          "problem"_a, "layout"_a, "rank"_a, "heads_q"_a, "heads_k"_a, "head_map"_a.none(), "schedule"_a,
          "options"_a = nb::dict())
      .def_prop_ro("kind", [](const Schedule& s) { return std::string(name(s.options.kind)); })
      .def_prop_ro("steps", [](const Schedule& s) { return s.steps.size(); })
      .def_ro("rank", &Schedule::rank)
      .def_ro("ranks", &Schedule::ranks)
      .def_ro("q_rows", &Schedule::q_rows)
      .def_ro("k_rows", &Schedule::k_rows)
      .def(
          "traffic",
          [](const Schedule& s, DType dtype, Index dim_qk, Index dim_v, bool backward, Index source) {
            const Traffic t = traffic(s, {.dtype = dtype, .dim_qk = dim_qk, .dim_v = dim_v, .source = source},
                                      backward ? Pass::backward : Pass::forward);
            return dict_of("bytes_sent", t.bytes_sent, "bytes_received", t.bytes_received, "messages_sent",
                           t.messages_sent, "messages_received", t.messages_received, "bytes_sent_between",
                           t.bytes_sent_between, "bytes_received_between", t.bytes_received_between);
          },
          "dtype"_a, "dim_qk"_a, "dim_v"_a, "backward"_a = false, "source"_a = 0,
          "Bytes and messages of one pass on this rank; of a source so wide in place of K and V.");
}

nb::list step_events(const HeldExecutor& e) {
  constexpr const char* kKinds[] = {"wait", "compute", "give back"};
  nb::list out;
  for (const StepEvent& event : *e.events)
    out.append(nb::make_tuple(kKinds[static_cast<int>(event.kind)], event.step, event.slices, event.begin, event.end));
  return out;
}

void bind_executor(nb::module_& m) {
  nb::class_<HeldExecutor> executor(m, "Executor", "Runs a schedule. Belongs to one thread at a time.");
  executor
      .def(
          "__init__",
          [](HeldExecutor* self, Comm& comm, const Schedule& schedule, std::string kernel, bool deterministic,
             bool checked, std::optional<int> device, std::uintptr_t stream, bool observe) {
            Schedule copy = schedule;
            const ReleaseGil others_run;  // checked, or on a GPU: ranks meet
            const InTurn turn(comm);
            new (self) HeldExecutor(comm, std::move(copy),
                                    {.kernel = std::move(kernel),
                                     .deterministic = deterministic,
                                     .checked = checked,
                                     .place = place_on(device, stream)},
                                    observe);
          },
          "comm"_a, "schedule"_a, "kernel"_a = "", "deterministic"_a = false, "checked"_a = false,
          "device"_a.none() = nb::none(), "stream"_a = 0, "observe"_a = false, nb::keep_alive<1, 2>())
      .def_prop_ro("events", step_events,
                   "What the last pass did, if it is observed: (kind, step, slices, begin, end).")
      .def_prop_ro("workspace_bytes", [](const HeldExecutor& e) { return e.executor.workspace_bytes(); });
  bind_passes(executor);
  bind_source(executor);
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_one_rank(m);
  bind_schedule(m);
  bind_executor(m);
}

void bind_support(nb::module_& m) {
  m.def("kernels", [] {
    nb::list out;
    for (const Kernel& kernel : kernels()) {
      const auto no = kernel.refusal({Pass::forward, DType::f32, 64, 64, false});
      out.append(dict_of("name", std::string(kernel.name), "about", std::string(kernel.about), "refusal",
                         no ? nb::cast(*no) : nb::none()));
    }
    return out;
  });
  m.def(
      "kernel_choice",
      [](std::string_view kernel, bool backward, DType dtype, Index dim_qk, Index dim_v, std::optional<int> device,
         const Schedule* schedule) {
        const KernelRequest request{.pass = backward ? Pass::backward : Pass::forward,
                                    .dtype = dtype,
                                    .dim_qk = dim_qk,
                                    .dim_v = dim_v,
                                    .partial = !backward && schedule != nullptr && !run::Computed(*schedule).once(),
                                    .device = device ? DeviceKind::cuda : DeviceKind::cpu,
                                    .gpu = device.value_or(0)};
        const std::string_view chosen = select_kernel(kernel, request).name;
        std::vector<std::pair<std::string, std::string>> others;
        for (const Kernel& other : kernels()) {
          if (other.name == chosen) break;
          if (kernel.empty() || other.name == kernel) others.emplace_back(other.name, *other.refusal(request));
        }
        return std::pair(std::string(chosen), others);
      },
      "kernel"_a, "backward"_a, "dtype"_a, "dim_qk"_a, "dim_v"_a, "device"_a.none(), "schedule"_a.none(),
      "The kernel that does such a call, and why better ones do not: (name, [(name, reason)]).");
  m.def("schedules", [] {
    std::vector<std::string> names;
    for (const ScheduleKind kind : schedule_kinds()) names.emplace_back(name(kind));
    return names;
  });
  m.def("support_table", [] {
    const auto why = [](const std::optional<Refusal>& r) -> nb::object {
      return r ? nb::object(nb::cast(text(r->problem, "; ", r->remedy))) : nb::object(nb::none());
    };
    nb::list rows;
    for (const SupportRow& row : support_table()) {
      nb::dict cells;
      cells["one rank"] = why(row.one_rank);
      std::size_t i = 0;
      for (const ScheduleKind kind : schedule_kinds())
        cells[nb::cast(std::string(name(kind)))] = why(row.schedules[i++]);
      rows.append(nb::make_tuple(row.group, row.name, cells));
    }
    return rows;
  });
  m.def("set_cpu_threads", &set_cpu_threads, "threads"_a, "Threads that CPU kernels use at most; 0: all.");
}

}  // namespace weft::python
