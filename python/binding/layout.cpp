// Layout and Plan.
#include <functional>
#include <string>
#include <utility>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "convert.h"
#include "gil.h"
#include "module.h"
#include "problem.h"
#include "rows/row_tensor.h"
#include "tensor.h"
#include "text.h"
#include "weft/error.h"
#include "weft/plan.h"
#include "weft/rows.h"

namespace weft::python {
namespace {

using namespace nb::literals;

// A hash of the tokens of a rank's rows, without empty rows at the end: equal for two layouts that place the same rows.
std::uint64_t fingerprint(const Layout& layout, Index rank) {
  const std::vector<Index> tokens = layout.tokens(rank);
  std::size_t count = tokens.size();
  while (count > 0 && tokens[count - 1] == kNoToken) --count;
  RowHash hash;
  for (std::size_t i = 0; i < count; ++i) hash.add(tokens[i]);
  hash.add(static_cast<Index>(count));
  return hash.value();
}

const Layout& side_of(const PlacedLayouts& placed, std::string_view side) {
  if (side != "q" && side != "k") throw Error(text("there is no side '", side, "'"), "use 'q' or 'k'");
  return side == "q" ? placed.layouts.q : placed.layouts.k;
}

void check_rank(const Layout& layout, Index rank) {
  if (rank < 0 || rank >= layout.ranks())
    throw Error(text("there is no rank ", rank, " of ", layout.ranks()), text("use 0 to ", layout.ranks() - 1));
}

// A method of (rank, side) that is a function of the layout of that side.
template <class Function>
auto of_rank(const Function& function) {
  return [function](const PlacedLayouts& placed, Index rank, std::string_view side) {
    const Layout& layout = side_of(placed, side);
    check_rank(layout, rank);
    return function(layout, rank);
  };
}

struct Rows {
  const Array& array;
  Format format;
};

void move_rows(const Layout& layout, Index rank, const Rows& whole, const Rows& local, Way way, std::uintptr_t stream) {
  check_rank(layout, rank);
  const RowTensor tokens =
      rows_view(whole.array, "the whole array", whole.format, way == Way::to_tokens ? Use::write : Use::read);
  const RowTensor rows =
      rows_view(local.array, "the rank's rows", local.format, way == Way::to_rows ? Use::write : Use::read);
  const Place place = place_of({{"the whole array", whole.array}, {"the rank's rows", local.array}}, stream);
  const ReleaseGil others_run;
  if (place.kind == DeviceKind::cpu)
    return way == Way::to_rows ? layout.shard(rank, tokens, rows) : layout.unshard(rank, rows, tokens);
  check_row_tensor("whole", tokens, layout.stream().tokens(), tokens.row_bytes);
  check_row_tensor("local", rows, layout.rows(), tokens.row_bytes);
  copy_on_gpu(place, layout.runs(rank), tokens, rows, way);
}

RunList keys_of(const Layout& layout, nb::handle keys) {
  std::string name;
  if (nb::try_cast<std::string>(keys, name)) {
    if (name == "sequence") return layout.sequence_order();
    if (name == "rank") return layout.rank_order();
  }
  Index rank = 0;
  if (!nb::try_cast<Index>(keys, rank))
    throw Error(text("keys: ", nb::repr(keys).c_str()),
                "use 'sequence', 'rank', or the number of the rank whose keys are meant");
  check_rank(layout, rank);
  return layout.runs(rank);
}

void bind_rows_of(nb::class_<PlacedLayouts>& layout) {
  layout
      .def("fingerprint", of_rank(fingerprint), "rank"_a, "side"_a = "q",
           "A number that two layouts have in common if the rank's rows are the same.")
      .def("tokens", of_rank([](const Layout& l, Index rank) { return array_of(l.tokens(rank)); }), "rank"_a,
           "side"_a = "q", "Token of each row; -1 where the row holds none.")
      .def("position_ids", of_rank([](const Layout& l, Index rank) { return array_of(l.positions(rank)); }), "rank"_a,
           "side"_a = "q", "Position of each row in its sequence; 0 where the row is padding.")
      .def("valid", of_rank([](const Layout& l, Index rank) { return array_of(valid_rows(l, rank)); }), "rank"_a,
           "side"_a = "q", "1 where the row holds a real token.")
      .def(
          "shard",
          [](const PlacedLayouts& p, std::string_view side, Index rank, const Array& whole, Format whole_format,
             const Array& local, Format local_format, std::uintptr_t stream) {
            move_rows(side_of(p, side), rank, {whole, whole_format}, {local, local_format}, Way::to_rows, stream);
          },
          "side"_a, "rank"_a, "whole"_a, "whole_format"_a, "local"_a, "local_format"_a, "stream"_a = 0,
          "On a GPU rows that hold no token are left as they are.")
      .def(
          "unshard",
          [](const PlacedLayouts& p, std::string_view side, Index rank, const Array& local, Format local_format,
             const Array& whole, Format whole_format, std::uintptr_t stream) {
            move_rows(side_of(p, side), rank, {whole, whole_format}, {local, local_format}, Way::to_tokens, stream);
          },
          "side"_a, "rank"_a, "local"_a, "local_format"_a, "whole"_a, "whole_format"_a, "stream"_a = 0,
          "Copies a rank's rows to their tokens; other tokens are left as they are.")
      .def("__repr__", [](const PlacedLayouts& p) {
        return text("Layout(", name(p.layouts.q.kind()), ", ", p.layouts.q.ranks(), " ranks of ", p.layouts.q.rows(),
                    " rows)");
      });
}

void bind_layout(nb::module_& m) {
  nb::class_<PlacedLayouts> layout(m, "Layout", R"(Who holds which tokens: a stream dealt out to ranks.

    >>> import weft
    >>> layout = weft.Layout("zigzag", weft.Packing([0, 7, 10, 16]), ranks=4)
    >>> layout.rows, layout.tokens(0).tolist()
    (4, [0, 1, 14, 15])
)");
  layout
      .def(
          "__init__",
          [](PlacedLayouts* self, std::string_view kind, const Packing& packing, Index ranks,
             std::optional<Mask> mask) {
            const LayoutKind known = layout_kind(kind);
            if (!mask && (known == LayoutKind::balanced || known == LayoutKind::placed)) mask = usual_mask(packing);
            const Problem problem(packing, mask.value_or(Mask{}));
            new (self) PlacedLayouts{packing, make_layouts(known, problem, ranks), mask};
          },
          nb::sig(
              "def __init__(self, kind: typing.Literal['contiguous', 'dual_chunk', 'zigzag', 'striped', 'balanced', "
              "'placed'], "
              "packing: Packing, ranks: int, mask: Mask | None = None) -> None"),
          "kind"_a, "packing"_a, "ranks"_a, "mask"_a.none() = nb::none())
      .def_static(
          "explicit",
          [](const Packing& packing, nb::object runs, nb::object runs_k) {
            const Layout q = Layout::explicit_runs(packing.q(), runs_from(runs));
            if (runs_k.is_none() && !packing.self())
              throw Error("runs of the keys are not given, and keys are not where the queries are", "give runs_k too");
            return PlacedLayouts{
                packing, {q, runs_k.is_none() ? q : Layout::explicit_runs(packing.k(), runs_from(runs_k))}, {}};
          },
          "packing"_a, "runs"_a, "runs_k"_a.none() = nb::none(),
          "Your own runs, a list for each rank of (row, token, count) or (row, token, count, stride).")
      .def_ro("packing", &PlacedLayouts::packing)
      .def_ro("mask", &PlacedLayouts::mask, "What `balanced` and `placed` go by: causal unless one was given.")
      .def_ro("own_options", &PlacedLayouts::own_options, "Made by weft.place, and not what its name alone stands for.")
      .def_prop_ro("kind", [](const PlacedLayouts& p) { return std::string(name(p.layouts.q.kind())); })
      .def_prop_ro("ranks", [](const PlacedLayouts& p) { return p.layouts.q.ranks(); })
      .def_prop_ro(
          "rows", [](const PlacedLayouts& p) { return p.layouts.q.rows(); }, "Query rows of each rank.")
      .def_prop_ro("rows_k", [](const PlacedLayouts& p) { return p.layouts.k.rows(); }, "Key rows of each rank.");
  bind_rows_of(layout);
}

void bind_plan(nb::module_& m) {
  nb::class_<Plan>(m, "Plan", "Slices of one rank: query rows x key rows of the two buffers at hand, cut by a band.")
      .def_prop_ro(
          "slices", [](const Plan& p) { return slices_array(p.slices); },
          "[n, 6]: q_begin, q_end, k_begin, k_end, lo, hi. Row q sees row k iff lo <= k - q <= hi.", kNew)
      .def_ro("q_rows", &Plan::q_rows)
      .def_ro("k_rows", &Plan::k_rows)
      .def_prop_ro("visible_pairs", [](const Plan& p) { return visible_pairs(p); })
      .def_prop_ro(
          "touched_keys",
          [](const Plan& p) {
            std::vector<Index> flat;
            for (const Range& r : touched_keys(p)) flat.insert(flat.end(), {r.begin, r.end});
            return array_of(std::move(flat), 2);
          },
          "[n, 2]: key rows that some query sees, as ranges.", kNew)
      .def("__repr__", [](const Plan& p) {
        return text("Plan(", p.slices.size(), " slices, ", p.q_rows, " query rows, ", p.k_rows, " key rows)");
      });
  m.def("whole_plan", &whole_plan);
  m.def("rank_plan", [](const Problem& p, const PlacedLayouts& placed, Index rank, nb::object keys) {
    check_rank(placed.layouts.q, rank);
    return make_plan(p, placed.layouts.q.runs(rank), keys_of(placed.layouts.k, keys));
  });
  m.def("pairs_by_rank",
        [](const Problem& p, const PlacedLayouts& placed) { return array_of(pairs_by_rank(p, placed.layouts.q)); });
}

}  // namespace

Plan whole_plan(const Problem& problem) {
  const Packing& packing = problem.packing();
  return make_plan(problem, RunList::sequence_order(packing.q().tokens()),
                   RunList::sequence_order(packing.k().tokens()));
}

void bind_layouts(nb::module_& m) {
  bind_layout(m);
  bind_plan(m);
}

}  // namespace weft::python
