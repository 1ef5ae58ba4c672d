// Attention from cu_seqlens where the tensors are: on a GPU planned there, in the call's stream, without the host.
#include "torch/offsets.h"

#include <string>
#include <tuple>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "attention.h"
#include "convert.h"
#ifdef WEFT_WITH_CUDA
#include "cuda/handle_pool.h"
#endif
#include "gil.h"
#include "held.h"
#include "module.h"
#include "plan/shared_context.h"
#include "schedule_options.h"
#include "weft/attention.h"
#include "weft/capacity.h"
#include "weft/executor.h"
#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/plan.h"

namespace weft::python {
namespace {

using namespace nb::literals;

// A side as Python gives it: cu_seqlens, cu_seqlens_padded or None, tokens.
using OffsetsSide = std::tuple<Array, std::optional<Array>, Index>;

// What is asked, by offsets where the tensors are; the rows of each rank are capacities.
struct OffsetsProblem {
  Offsets q;
  std::optional<Offsets> k;
  Mask mask;
  LayoutKind kind;
  Index ranks, q_rows, k_rows;

  const Place& place() const { return q.cu.place; }
  // As weft.torch gives the tensors of a call.
  void check_place(const Place& tensors) const {
    if (tensors.kind != place().kind || tensors.device != place().device)
      throw Error(text("cu_seqlens lie on ", name(place()), " and tensors on ", name(tensors)),
                  "keep both in one place");
  }
  DevicePlanArgs on_gpu() const {
    DevicePlanArgs args{.q = q.on_gpu(), .mask = mask};
    if (k) args.k = k->on_gpu();
    args.q_runs = args.k_runs = DeviceLayout::sequence_order();
    return args;
  }
  DevicePlanArgs on_gpu(const MetRanks& met) const {
    DevicePlanArgs args = on_gpu();
    args.q_runs = DeviceLayout{kind, ranks, q_rows}.rank_order(met.q);
    args.k_runs = DeviceLayout{kind, ranks, k_rows}.rank_order(met.k);
    return args;
  }
};

OffsetsProblem problem_of_offsets(const OffsetsSide& q, const std::optional<OffsetsSide>& k, const Mask& mask,
                                  LayoutKind kind, Index ranks, Index q_rows, Index k_rows) {
  const auto offsets = [&q](const OffsetsSide& side) {
    const auto& [cu, padded, tokens] = side;
    if (cu.place != std::get<0>(q).place || (padded && padded->place != cu.place))
      throw Error("cu_seqlens are not all in one place", "keep them where the tensors are");
    return offsets_of(cu, padded, tokens);
  };
  return {offsets(q), k ? std::optional(offsets(*k)) : std::nullopt, mask, kind, ranks, q_rows, k_rows};
}

// The same plans as on a GPU, of offsets that lie on the CPU.
class HostPlans {
 public:
  explicit HostPlans(const OffsetsProblem& asked)
      : q_rows_(asked.q_rows), k_rows_(asked.k_rows), problem_(packing(asked), asked.mask) {
    if (asked.ranks > 1) layouts_ = make_layouts(asked.kind, problem_, asked.ranks);
  }
  Plan whole() const { return make_plan(problem_, RunList::sequence_order(q_rows_), RunList::sequence_order(k_rows_)); }
  Plan of(const MetRanks& met) const {
    return make_plan(problem_, with_room(layouts_->q, met.q, q_rows_), with_room(layouts_->k, met.k, k_rows_));
  }

 private:
  static Packing packing(const OffsetsProblem& asked) {
    return asked.k ? Packing(asked.q.on_cpu(), asked.k->on_cpu()) : Packing(asked.q.on_cpu());
  }
  // Buffers with room for `rows` of each rank, of which the layout may need fewer.
  static RunList with_room(const Layout& layout, const RunList::Members& m, Index rows) {
    if (layout.rows() > rows)
      throw Error(text("each rank needs ", layout.rows(), " rows and has ", rows), "give as many as rows_for says");
    std::vector<Run> runs;
    for (Index i = 0; i < m.count; ++i)
      for (Run run : layout.runs(m.first + i * m.step).runs()) {
        run.row += i * rows;
        runs.push_back(run);
      }
    return RunList::from_runs(std::move(runs), m.count * rows);
  }

  Index q_rows_, k_rows_;
  Problem problem_;
  std::optional<Layouts> layouts_;
};

// One rank: plans and calls. The plan's memory is taken and given back in the stream, in a captured graph too.
template <class Args, class Call>
void planned(const OffsetsProblem& problem, Args& args, const Call& call) {
  problem.check_place(args.place);
  const ReleaseGil others_run;
  if (args.q.rows != problem.q_rows || args.k.rows != problem.k_rows)
    throw Error(text("q has ", args.q.rows, " rows and k has ", args.k.rows, ", and the plan is for ", problem.q_rows,
                     " and ", problem.k_rows),
                "give tensors of the rows that the problem was made for");
  if (args.place.kind == DeviceKind::cpu) {
    const Plan plan = HostPlans(problem).whole();
    args.slices = plan.slices;
    return call(args);
  }
  const DevicePlanArgs asked = problem.on_gpu();
  with_shared_context(args.place, [&](DeviceContext& context) {
    DevicePlan plan(context, device_plan_capacity(asked));
    plan.plan(asked);
    args.device_plan = &plan;
    call(args);
  });
}

// Several ranks: an executor whose steps are planned where the offsets are, anew in each call.
class OffsetsExecutor {
 public:
  OffsetsExecutor(Comm& comm, CapacitySchedule made, ExecutorOptions options)
      : comm_(comm), made_(std::move(made)), options_(std::move(options)), last_(options_.place) {
    if (options_.place.kind != DeviceKind::cpu) on_gpu_.emplace(comm.get(), made_.schedule, options_);
  }

  // call(executor, args)
  template <class Args, class Call>
  void run(const OffsetsProblem& problem, Args& args, const Call& call) {
    problem.check_place(args.place);
    const ReleaseGil others_run;
    const InTurn turn(comm_);
    if (args.place.kind == DeviceKind::cpu) {
      Schedule schedule = made_.schedule;
      const HostPlans plans(problem);
      for (std::size_t i = 0; i < schedule.plans.size(); ++i) schedule.plans[i] = plans.of(made_.met[i]);
      Executor executor(comm_.get(), std::move(schedule), options_);
      return call(executor, args);
    }
    std::vector<DevicePlan> plans;
    plans.reserve(made_.met.size());
    // The context is free again before ranks meet: those that are threads may share a stream.
    with_shared_context(args.place, [&](DeviceContext& context) {
      for (const MetRanks& met : made_.met) {
        const DevicePlanArgs asked = problem.on_gpu(met);
        plans.emplace_back(context, device_plan_capacity(asked)).plan(asked);
      }
    });
    std::vector<DevicePlan*> all;
    for (DevicePlan& plan : plans) all.push_back(&plan);
    args.device_plans = all;
    last_.use(args.place);
    call(*on_gpu_, args);
  }

  const Schedule& schedule() const { return made_.schedule; }

 private:
  Comm& comm_;  // kept alive by Python
  CapacitySchedule made_;
  ExecutorOptions options_;
  LastStream last_;
  std::optional<Executor> on_gpu_;
};

void bind_passes_of_offsets(nb::module_& m) {
  m.def(
      "attend_offsets",
      [](const OffsetsProblem& problem, const Array& q, const Array& k, const Array& v, const Settings& settings,
         const Array& out, const std::optional<Array>& lse, const std::optional<Array>& max_logit,
         const std::string& kernel, std::uintptr_t stream) {
        auto args = forward_args<ForwardArgs>(q, k, v, Format::thd, settings, out, lse, max_logit, stream);
        planned(problem, args, [&](const ForwardArgs& a) { attend(a, kernel); });
      },
      "problem"_a, "q"_a, "k"_a, "v"_a, "settings"_a, "out"_a, "lse"_a, "max_logit"_a.none(), "kernel"_a, "stream"_a);
  m.def(
      "attend_offsets_backward",
      [](const OffsetsProblem& problem, const Array& q, const Array& k, const Array& v, const Settings& settings,
         const Array& out, const Array& lse, const Array& dout, const Array& dq, const Array& dk, const Array& dv,
         const std::optional<Array>& dsink, const std::string& kernel, bool deterministic, std::uintptr_t stream) {
        auto args =
            backward_args<BackwardArgs>(q, k, v, Format::thd, settings, out, lse, dout, {dq, dk, dv, dsink}, stream);
        args.deterministic = deterministic;
        planned(problem, args, [&](const BackwardArgs& a) { attend_backward(a, kernel); });
      },
      "problem"_a, "q"_a, "k"_a, "v"_a, "settings"_a, "out"_a, "lse"_a, "dout"_a, "dq"_a, "dk"_a, "dv"_a,
      "dsink"_a.none(), "kernel"_a, "deterministic"_a, "stream"_a);
}

void bind_offsets_executor(nb::module_& m) {
  nb::class_<OffsetsExecutor>(m, "OffsetsExecutor", "Attention of one rank of several, by cu_seqlens as tensors.")
      .def_prop_ro("schedule", &OffsetsExecutor::schedule, nb::rv_policy::reference_internal)
      .def(
          "__init__",
          [](OffsetsExecutor* self, Comm& comm, Index q_rows, Index k_rows, Index heads_q, Index heads_k,
             nb::object head_map, std::string_view schedule, nb::dict options, std::string kernel, bool deterministic,
             std::optional<int> device, std::uintptr_t stream) {
            const auto map = optional_indices(head_map, "head_map").value_or(std::vector<Index>{});
            const ScheduleOptions said = schedule_options(schedule, options);
            const ReleaseGil others_run;  // on a GPU ranks meet
            const InTurn turn(comm);
            const Capacity capacity{comm.get().ranks(), comm.get().rank(), q_rows, k_rows};
            new (self) OffsetsExecutor(
                comm, capacity_schedule(capacity, {heads_q, heads_k, map}, said),
                {.kernel = std::move(kernel), .deterministic = deterministic, .place = place_on(device, stream)});
          },
          "comm"_a, "q_rows"_a, "k_rows"_a, "heads_q"_a, "heads_k"_a, "head_map"_a.none(), "schedule"_a, "options"_a,
          "kernel"_a, "deterministic"_a, "device"_a.none(), "stream"_a, nb::keep_alive<1, 2>())
      .def(
          "forward",
          [](OffsetsExecutor& self, const OffsetsProblem& problem, const Array& q, const Array& k, const Array& v,
             const Settings& settings, const Array& out, const Array& lse, const std::optional<Array>& max_logit,
             std::uintptr_t stream) {
            auto args = forward_args<ExecutorForwardArgs>(q, k, v, Format::thd, settings, out, lse, max_logit, stream);
            self.run(problem, args, [](Executor& e, const ExecutorForwardArgs& a) { e.forward(a); });
          },
          "problem"_a, "q"_a, "k"_a, "v"_a, "settings"_a, "out"_a, "lse"_a, "max_logit"_a.none(), "stream"_a)
      .def(
          "backward",
          [](OffsetsExecutor& self, const OffsetsProblem& problem, const Array& q, const Array& k, const Array& v,
             const Settings& settings, const Array& out, const Array& lse, const Array& dout, const Array& dq,
             const Array& dk, const Array& dv, const std::optional<Array>& dsink, std::uintptr_t stream) {
            auto args = backward_args<ExecutorBackwardArgs>(q, k, v, Format::thd, settings, out, lse, dout,
                                                            {dq, dk, dv, dsink}, stream);
            self.run(problem, args, [](Executor& e, const ExecutorBackwardArgs& a) { e.backward(a); });
          },
          "problem"_a, "q"_a, "k"_a, "v"_a, "settings"_a, "out"_a, "lse"_a, "dout"_a, "dq"_a, "dk"_a, "dv"_a,
          "dsink"_a.none(), "stream"_a);
}

}  // namespace

namespace {

void use_graph_memory([[maybe_unused]] nb::object take, [[maybe_unused]] nb::object give_back) {
#ifdef WEFT_WITH_CUDA
  // Never let go: what was taken may be given back while the process ends.
  const auto* const taking = new nb::object(std::move(take));
  const auto* const giving = new nb::object(std::move(give_back));
  cuda::use_graph_memory({.take = [taking](std::size_t bytes, int device, cudaStream_t stream) -> void* {
                            const AcquireGil locked;
                            const nb::int_ size(bytes), on(device), in(reinterpret_cast<std::uintptr_t>(stream));
                            return reinterpret_cast<void*>(
                                nb::cast<std::uintptr_t>(call_python(*taking, size, on, in)));
                          },
                          .give_back =
                              [giving](void* data) {
                                const AcquireGil locked;
                                try {
                                  call_python(*giving, nb::int_(reinterpret_cast<std::uintptr_t>(data)));
                                } catch (nb::python_error& e) {  // destructors give memory back
                                  e.discard_as_unraisable("giving back memory of a graph");
                                }
                              }});
#endif
}

}  // namespace

void bind_offsets_attention(nb::module_& m) {
  m.def("use_graph_memory", &use_graph_memory, "take"_a, "give_back"_a,
        "Memory of captured graphs is take(bytes, device, stream), an address, until give_back(address).");
  nb::class_<OffsetsProblem>(m, "OffsetsProblem", "What ranks attend, by cu_seqlens as tensors.")
      .def(
          "__init__",
          [](OffsetsProblem* self, const OffsetsSide& q, const std::optional<OffsetsSide>& k, const Mask& mask,
             std::string_view layout, Index ranks, Index q_rows, Index k_rows) {
            new (self) OffsetsProblem(problem_of_offsets(q, k, mask, layout_kind(layout), ranks, q_rows, k_rows));
          },
          "q"_a, "k"_a.none(), "mask"_a, "layout"_a, "ranks"_a, "q_rows"_a, "k_rows"_a);
  bind_passes_of_offsets(m);
  bind_offsets_executor(m);
}

}  // namespace weft::python
