// The helpers of docs/rows.md.
#include "weft/rows.h"

#include <utility>

#include <nanobind/stl/string.h>

#include "convert.h"
#include "gil.h"
#include "module.h"
#include "problem.h"
#include "rows/row_tensor.h"
#include "tensor.h"

namespace weft::python {
namespace {

using namespace nb::literals;

void check_orders(const Layout& layout, const RowTensor& sequence, const RowTensor& ranks) {
  check_row_tensor("sequence", sequence, layout.stream().tokens(), sequence.row_bytes);
  check_row_tensor("ranks", ranks, layout.ranks() * layout.rows(), sequence.row_bytes);
  if (sequence.data == ranks.data && sequence.rows > 0)
    throw Error("sequence and ranks are the same buffer", "give two: rows change places");
}

void reorder(const Layout& layout, const Array& sequence, const Array& ranks, Way way, std::uintptr_t stream) {
  const RowTensor tokens = rows_view(sequence, "sequence", Format::thd, way == Way::to_tokens ? Use::write : Use::read);
  const RowTensor rows = rows_view(ranks, "ranks", Format::thd, way == Way::to_rows ? Use::write : Use::read);
  const Place place = place_of({{"sequence", sequence}, {"ranks", ranks}}, stream);
  if (place.kind == DeviceKind::cpu)
    return way == Way::to_rows ? sequence_to_rank_order(layout, tokens, rows)
                               : rank_to_sequence_order(layout, rows, tokens);
  check_orders(layout, tokens, rows);
  copy_on_gpu(place, layout.rank_order(), tokens, rows, way);
}

void bind_orders(nb::module_& m) {
  m.def(
      "sequence_to_rank_order",
      [](const PlacedLayouts& p, const Array& sequence, const Array& ranks, std::uintptr_t stream) {
        reorder(p.layouts.q, sequence, ranks, Way::to_rows, stream);
      },
      "layout"_a, "sequence"_a, "ranks"_a, "stream"_a = 0, nb::call_guard<ReleaseGil>());
  m.def(
      "rank_to_sequence_order",
      [](const PlacedLayouts& p, const Array& ranks, const Array& sequence, std::uintptr_t stream) {
        reorder(p.layouts.q, sequence, ranks, Way::to_tokens, stream);
      },
      "layout"_a, "ranks"_a, "sequence"_a, "stream"_a = 0, nb::call_guard<ReleaseGil>());
  m.def(
      "sequence_rows_of_rank_order",
      [](const PlacedLayouts& p) { return array_of(sequence_rows_of_rank_order(p.layouts.q)); }, "layout"_a,
      "[ranks * rows] token of each row, -1 where it holds none.");
  m.def(
      "rank_rows_of_sequence_order",
      [](const PlacedLayouts& p) { return array_of(rank_rows_of_sequence_order(p.layouts.q)); }, "layout"_a,
      "[tokens] row in rank order of each token, -1 where no rank holds it.");
  m.def(
      "valid_rows", [](const Packing& p) { return array_of(valid_rows(p.q())); }, "packing"_a,
      "[tokens] 1 where the token is real.");
  m.def(
      "sequences_to_chunks",
      [](const Packing& p, Index chunk) {
        Chunks c = sequences_to_chunks(p.q(), chunk);
        return nb::make_tuple(array_of(std::move(c.cu_seqlens)), array_of(std::move(c.cu_seqlens_padded)),
                              array_of(std::move(c.sequence)));
      },
      "packing"_a, "chunk_size"_a,
      "(cu_seqlens, cu_seqlens_padded, sequence) of sequences cut at multiples of a size.");
}

void bind_steps(nb::module_& m) {
  nb::class_<VarlenStep>(m, "VarlenStep", "One call of a varlen kernel: n entries of query rows x key rows.")
      .def_prop_ro("cu_seqlens_q", copy_of(&VarlenStep::cu_seqlens_q), kNew)
      .def_prop_ro("cu_seqlens_k", copy_of(&VarlenStep::cu_seqlens_k), kNew)
      .def_prop_ro("cu_seqlens_q_padded", copy_of(&VarlenStep::cu_seqlens_q_padded), kNew)
      .def_prop_ro("cu_seqlens_k_padded", copy_of(&VarlenStep::cu_seqlens_k_padded), kNew)
      .def_prop_ro("seqused_q", copy_of(&VarlenStep::seqused_q), kNew)
      .def_prop_ro("seqused_k", copy_of(&VarlenStep::seqused_k), kNew)
      .def_prop_ro("lo", copy_of(&VarlenStep::lo), kNew)
      .def_prop_ro("hi", copy_of(&VarlenStep::hi), kNew)
      .def_prop_ro("sequence", copy_of(&VarlenStep::sequence), kNew)
      .def_ro("max_seqlen_q", &VarlenStep::max_seqlen_q)
      .def_ro("max_seqlen_k", &VarlenStep::max_seqlen_k)
      .def_prop_ro(
          "slices", [](const VarlenStep& s) { return slices_array(slices(s)); }, kNew)
      .def_prop_ro(
          "rank_rows", [](const VarlenStep& s) { return array_of(rank_rows_of_packed_step(s)); },
          "Row of the rank's buffer of each row of the packed step.", kNew);
  const auto bind_step = [&m](const char* name, VarlenStep (*make)(const Problem&, const Layout&, Index, Index)) {
    m.def(
        name,
        [make](const Problem& p, const PlacedLayouts& placed, Index rank, Index step) {
          return make(p, placed.layouts.q, rank, step);
        },
        "problem"_a, "layout"_a, "rank"_a, "step"_a);
  };
  bind_step("all_gather_step", &all_gather_step);
  bind_step("ring_step", &ring_step);
  m.def(
      "ring_tile",
      [](Index ranks, Index rank, Index step) {
        constexpr const char* kNames[] = {"diagonal", "below", "above"};
        const RingTile tile = ring_tile(ranks, rank, step);
        return nb::make_tuple(kNames[tile.kind], tile.keys_rank);
      },
      "ranks"_a, "rank"_a, "step"_a,
      "Kind of the tile (diagonal, below or above) that a rank attends at a step of a ring, and whose keys these are.");
}

}  // namespace

void bind_rows(nb::module_& m) {
  bind_orders(m);
  bind_steps(m);
}

}  // namespace weft::python
