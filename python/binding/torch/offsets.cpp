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
#include "gil.h"
#include "module.h"
#include "plan/shared_context.h"
#include "weft/attention.h"
#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/plan.h"

namespace weft::python {
namespace {

using namespace nb::literals;

// A side as Python gives it: cu_seqlens, cu_seqlens_padded or None, tokens.
using OffsetsSide = std::tuple<Array, std::optional<Array>, Index>;

// How both sides are dealt out; one rank has the whole, in sequence order.
struct OffsetsSpread {
  LayoutKind kind;
  Index ranks, rank, q_rows, k_rows;
};

// What one rank attends: its rows of the queries, and the keys of all ranks in rank order.
struct OffsetsProblem {
  Array cu_q;           // keeps them alive
  Plan on_cpu;          // for tensors of the CPU, or
  DevicePlanArgs args;  // for those of a GPU
  Index capacity;
};

// The rows of ranks first, first + 1, ... with room for `rows` each, of which the layout may need fewer.
RunList with_room(const Layout& layout, Index first, Index count, Index rows) {
  if (layout.rows() > rows)
    throw Error(text("each rank needs ", layout.rows(), " rows and has ", rows), "give as many as rows_for says");
  std::vector<Run> runs;
  for (Index r = 0; r < count; ++r)
    for (Run run : layout.runs(first + r).runs()) {
      run.row += r * rows;
      runs.push_back(run);
    }
  return RunList::from_runs(std::move(runs), count * rows);
}

Plan plan_on_cpu(const Offsets& q, const std::optional<Offsets>& k, const Mask& mask, const OffsetsSpread& s) {
  const Stream queries = q.on_cpu();
  const Problem problem(k ? Packing(queries, k->on_cpu()) : Packing(queries), mask);
  if (s.ranks == 1) return make_plan(problem, RunList::sequence_order(s.q_rows), RunList::sequence_order(s.k_rows));
  const Layouts layouts = make_layouts(s.kind, problem, s.ranks);
  return make_plan(problem, with_room(layouts.q, s.rank, 1, s.q_rows), with_room(layouts.k, 0, s.ranks, s.k_rows));
}

OffsetsProblem problem_of_offsets(const OffsetsSide& q, const std::optional<OffsetsSide>& k, const Mask& mask,
                                  const OffsetsSpread& s) {
  const auto offsets = [&q](const OffsetsSide& side) {
    const auto& [cu, padded, tokens] = side;
    if (cu.place != std::get<0>(q).place || (padded && padded->place != cu.place))
      throw Error("cu_seqlens are not all in one place", "keep them where the tensors are");
    return offsets_of(cu, padded, tokens);
  };
  OffsetsProblem p{std::get<0>(q), {}, {.mask = mask}, 0};
  const Offsets queries = offsets(q);
  const std::optional<Offsets> keys = k ? std::optional(offsets(*k)) : std::nullopt;
  if (p.cu_q.place.kind == DeviceKind::cpu) {
    p.on_cpu = plan_on_cpu(queries, keys, mask, s);
    return p;
  }
  p.args.q = queries.on_gpu();
  if (keys) p.args.k = keys->on_gpu();
  p.args.q_runs = p.args.k_runs = DeviceLayout::sequence_order();
  if (s.ranks > 1) {
    p.args.q_runs = DeviceLayout{s.kind, s.ranks, s.q_rows}.runs(s.rank);
    p.args.k_runs = DeviceLayout{s.kind, s.ranks, s.k_rows}.rank_order();
  }
  p.capacity = device_plan_capacity(p.args);
  return p;
}

// Plans and calls. The plan's memory is taken and given back in the stream, in a captured graph too.
template <class Args, class Call>
void planned(const OffsetsProblem& problem, Args& args, const Call& call) {
  if (args.place.kind != problem.cu_q.place.kind || args.place.device != problem.cu_q.place.device)
    throw Error(text("cu_seqlens lie on ", name(problem.cu_q.place), " and tensors on ", name(args.place)),
                "keep both in one place");
  const ReleaseGil others_run;
  if (args.place.kind == DeviceKind::cpu) {
    if (args.q.rows != problem.on_cpu.q_rows || args.k.rows != problem.on_cpu.k_rows)
      throw Error(text("q has ", args.q.rows, " rows and k has ", args.k.rows, ", and the plan is for ",
                       problem.on_cpu.q_rows, " and ", problem.on_cpu.k_rows),
                  "give tensors of the rows that the problem was made for");
    args.slices = problem.on_cpu.slices;
    return call(args);
  }
  with_shared_context(args.place, [&](DeviceContext& context) {
    DevicePlan plan(context, problem.capacity);
    plan.plan(problem.args);
    args.device_plan = &plan;
    call(args);
  });
}

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

void bind_sum(nb::module_& m) {
  m.def(
      "sum_rows",
      [](Comm& c, const Array& all, const Array& mine, std::uintptr_t stream) {
        const RowTensor parts = rows_view(all, "what is summed", Format::thd, Use::read);
        const RowTensor own = rows_view(mine, "the sum", Format::thd, Use::write);
        const Index ranks = c.get().ranks();
        if (all.dtype != mine.dtype || (mine.dtype != DType::f32 && mine.dtype != DType::f64) ||
            parts.rows != ranks * own.rows || parts.row_bytes != own.row_bytes)
          throw Error(text(parts.rows, " rows for ", ranks, " ranks of ", own.rows, ", or not of f32 or f64"),
                      "give f32 or f64 rows of all ranks, one after another");
        std::vector<Block> blocks;
        for (Index r = 0; r < ranks; ++r)
          blocks.push_back({static_cast<char*>(parts.data) + r * own.rows * own.row_bytes, own.rows, 1, own.row_bytes,
                            own.row_bytes, own.row_bytes});
        const Block to{own.data, own.rows, 1, own.row_bytes, own.row_bytes, own.row_bytes};
        const Place place = place_of({{"what is summed", all}, {"the sum", mine}}, stream);
        const ReleaseGil others_run;
        const InTurn turn(c);
        if (place.kind == DeviceKind::cpu) return c.get().reduce_scatter(blocks, to, mine.dtype).wait();
        c.get().on(place)->reduce_scatter(blocks, to).wait();
      },
      "comm"_a, "all"_a, "mine"_a, "stream"_a, "The sum over ranks of what each has for this one; contiguous.");
}

}  // namespace

void bind_offsets_attention(nb::module_& m) {
  nb::class_<OffsetsProblem>(m, "OffsetsProblem", "What one rank attends, by cu_seqlens as tensors.")
      .def(
          "__init__",
          [](OffsetsProblem* self, const OffsetsSide& q, const std::optional<OffsetsSide>& k, const Mask& mask,
             std::string_view layout, Index ranks, Index rank, Index q_rows, Index k_rows) {
            new (self)
                OffsetsProblem(problem_of_offsets(q, k, mask, {layout_kind(layout), ranks, rank, q_rows, k_rows}));
          },
          "q"_a, "k"_a.none(), "mask"_a, "layout"_a, "ranks"_a, "rank"_a, "q_rows"_a, "k_rows"_a);
  bind_passes_of_offsets(m);
  bind_sum(m);
}

}  // namespace weft::python
