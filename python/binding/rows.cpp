// The helpers of docs/rows.md.
#include "weft/rows.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "communicator.h"
#include "convert.h"
#include "gil.h"
#include "module.h"
#include "plan/shared_context.h"
#include "problem.h"
#include "rows/row_tensor.h"
#include "tensor.h"
#include "torch/offsets.h"
#include "weft/device_rows.h"

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

// --- Row operators of weft.torch: cu_seqlens and rows are arrays in the same place, on a CPU or a GPU ---

// The rows of a rank begin at multiples of `rows`, of which the layout may need fewer.
RowTensor rows_of_rank(const RowTensor& all, Index rows, Index rank, const Layout& layout) {
  RowTensor out = all;
  out.data = row_of(all, rank * rows);
  out.rows = layout.rows();
  return out;
}

struct Spread {
  LayoutKind kind;
  Index ranks, rank;

  Layout over(const Stream& stream) const { return make_layouts(kind, Problem(Packing(stream), Mask{}), ranks).q; }
  void check() const {
    if (kind >= LayoutKind::balanced)
      throw Error(text("layout ", name(kind), " is made on the host, not from cu_seqlens alone"),
                  "use contiguous, dual_chunk, zigzag or striped");
    if (rank < 0 || rank >= ranks)
      throw Error(text("there is no rank ", rank, " of ", ranks), text("use 0 to ", ranks - 1));
  }
};

Spread spread_of(std::string_view layout, Index ranks, Index rank) {
  const Spread out{layout_kind(layout), ranks, rank};
  rows_for(LayoutKind::contiguous, 0, ranks);  // refuses a wrong number of ranks
  out.check();
  return out;
}

void check_rows_fit(Index rows, Index needed) {
  if (rows < needed)
    throw Error(text("each rank needs ", needed, " rows and has ", rows), text("give ", needed, " or more"));
}

enum class Copy { to_ranks, from_ranks, shard, unshard, valid, valid_of_rank };

// On the CPU; `to` holds zeros.
void copy_on_cpu(Copy what, const Offsets& offsets, const Spread& spread, const RowTensor& from, const RowTensor& to) {
  const Stream stream = offsets.on_cpu();
  if (what == Copy::valid) {
    check_row_tensor("x", from, stream.tokens(), from.row_bytes);
    for (Index i = 0; i < stream.sequences(); ++i)
      copy_rows(from, stream.offset(i), to, stream.offset(i), stream.used(i));
    return;
  }
  const Layout layout = spread.over(stream);
  const bool all = what == Copy::to_ranks || what == Copy::from_ranks;
  const bool to_rows = what == Copy::to_ranks || what == Copy::shard;
  const RowTensor &local = to_rows ? to : from, &whole = to_rows ? from : to;
  const Index rows = all ? local.rows / spread.ranks : local.rows;
  check_rows_fit(rows, layout.rows());
  if (what == Copy::valid_of_rank) {
    const std::vector<std::uint8_t> valid = valid_rows(layout, spread.rank);
    for (Index row = 0; row < layout.rows(); ++row)
      if (valid[at(row)] != 0) copy_rows(from, row, to, row, 1);
    return;
  }
  for (Index r = all ? 0 : spread.rank; r < (all ? spread.ranks : spread.rank + 1); ++r) {
    const RowTensor part = rows_of_rank(local, rows, all ? r : 0, layout);
    to_rows ? layout.shard(r, whole, part) : layout.unshard(r, part, whole);
  }
}

void copy_in_context(DeviceContext& context, Copy what, const DeviceStream& stream, const Spread& spread,
                     const RowTensor& from, const RowTensor& to) {
  const DeviceLayout layout{.kind = spread.kind, .ranks = spread.ranks};
  switch (what) {
    case Copy::to_ranks:
      return sequence_to_rank_order(context, stream, layout, from, to, OtherRows::zero);
    case Copy::from_ranks:
      return rank_to_sequence_order(context, stream, layout, from, to, OtherRows::zero);
    case Copy::shard:
      return shard(context, stream, layout, spread.rank, from, to);
    case Copy::unshard:
      return unshard(context, stream, layout, spread.rank, from, to, OtherRows::zero);
    case Copy::valid:
      return copy_valid_rows(context, stream, from, to, OtherRows::zero);
    case Copy::valid_of_rank:
      return copy_valid_rows(context, stream, layout, spread.rank, from, to, OtherRows::zero);
  }
}

void bind_copies(nb::module_& m) {
  nb::enum_<Copy>(m, "RowCopy")
      .value("to_ranks", Copy::to_ranks)
      .value("from_ranks", Copy::from_ranks)
      .value("shard", Copy::shard)
      .value("unshard", Copy::unshard)
      .value("valid", Copy::valid)
      .value("valid_of_rank", Copy::valid_of_rank);
  m.def(
      "copy_rows",
      [](Copy what, const Array& from, const Array& to, const Array& cu, const std::optional<Array>& padded,
         std::optional<Index> tokens, std::string_view layout, Index ranks, Index rank, std::uintptr_t stream) {
        const Offsets offsets = offsets_of(cu, padded, tokens);
        const Spread spread = spread_of(layout, ranks, rank);
        const RowTensor source = rows_view(from, "x", Format::thd, Use::read);
        const RowTensor target = rows_view(to, "the result", Format::thd, Use::write);
        const Place place =
            place_of({{"x", from}, {"the result", to}, {"cu_seqlens", cu}, {"cu_seqlens_padded", padded}}, stream);
        const ReleaseGil others_run;
        if (place.kind == DeviceKind::cpu) return copy_on_cpu(what, offsets, spread, source, target);
        with_shared_context(place, [&](DeviceContext& context) {
          copy_in_context(context, what, offsets.on_gpu(), spread, source, target);
        });
      },
      "what"_a, "source"_a, "to"_a, "cu_seqlens"_a, "cu_seqlens_padded"_a.none(), "tokens"_a.none(), "layout"_a,
      "ranks"_a, "rank"_a, "stream"_a, "Copies rows; the others become zero on a GPU, and must be zero on a CPU.");
  m.def(
      "check_offsets", [](int device) { check_shared_contexts(device); }, "device"_a, nb::call_guard<ReleaseGil>(),
      "Raises what completed work on a GPU found wrong with cu_seqlens there.");
}

std::int32_t* numbers_of(const Array& array, Index count) {
  if (array.floating || array.item_bytes != 4 || array.shape != std::vector<Index>{count})
    throw Error("an array for offsets is not of int32, or has another length", text("give ", count, " numbers"));
  return static_cast<std::int32_t*>(array.data);
}

void write_numbers(const std::vector<Index>& from, std::int32_t* to) {
  std::transform(from.begin(), from.end(), to, device_bound);
}

void bind_offsets(nb::module_& m) {
  m.def(
      "partition_indices",
      [](const Array& cu, const std::optional<Array>& padded, Index tokens, std::string_view layout, Index ranks,
         Index rank, const Array& out, std::uintptr_t stream) {
        const Offsets offsets = offsets_of(cu, padded, tokens);
        const Spread spread = spread_of(layout, ranks, rank);
        const Index rows = out.shape.empty() ? 0 : out.shape.front();
        std::int32_t* const to = numbers_of(out, rows);
        const Place place = place_of({{"the result", out}, {"cu_seqlens", cu}, {"cu_seqlens_padded", padded}}, stream);
        const ReleaseGil others_run;
        if (place.kind != DeviceKind::cpu)
          return with_shared_context(place, [&](DeviceContext& context) {
            partition_indices(context, offsets.on_gpu(), {.kind = spread.kind, .ranks = ranks}, rank, rows, to);
          });
        const Layout made = spread.over(offsets.on_cpu());
        check_rows_fit(rows, made.rows());
        std::fill_n(to, rows, static_cast<std::int32_t>(kNoToken));
        write_numbers(made.tokens(rank), to);
      },
      "cu_seqlens"_a, "cu_seqlens_padded"_a.none(), "tokens"_a, "layout"_a, "ranks"_a, "rank"_a, "out"_a, "stream"_a);
  m.def(
      "cu_seqlens_on_rank",
      [](const Array& cu, const std::optional<Array>& padded, Index tokens, std::string_view layout, Index ranks,
         Index rank, const Array& out, const Array& out_padded, std::uintptr_t stream) {
        const Offsets offsets = offsets_of(cu, padded, tokens);
        const Spread spread = spread_of(layout, ranks, rank);
        const Index count = offsets.sequences() + 1;
        const DeviceRankOffsets to{numbers_of(out, count), numbers_of(out_padded, count)};
        const Place place = place_of(
            {{"the result", out}, {"the padded result", out_padded}, {"cu_seqlens", cu}, {"cu_seqlens_padded", padded}},
            stream);
        const ReleaseGil others_run;
        if (place.kind != DeviceKind::cpu)
          return with_shared_context(place, [&](DeviceContext& context) {
            cu_seqlens_on_rank(context, offsets.on_gpu(), {.kind = spread.kind, .ranks = ranks}, rank, to);
          });
        const RankOffsets found = cu_seqlens_on_rank(spread.over(offsets.on_cpu()), rank);
        write_numbers(found.cu_seqlens, to.cu_seqlens);
        write_numbers(found.cu_seqlens_padded, to.cu_seqlens_padded);
      },
      "cu_seqlens"_a, "cu_seqlens_padded"_a.none(), "tokens"_a, "layout"_a, "ranks"_a, "rank"_a, "out"_a,
      "out_padded"_a, "stream"_a);
}

// A side of a step as Python gives it: cu_seqlens, cu_seqlens_padded or None, tokens.
using Side = std::tuple<Array, std::optional<Array>, Index>;

// The ten arrays of a step, in the order of DeviceStep, in one array of int32: [9 * (capacity + 1) + 3].
DeviceStep step_in(const Array& out, Index capacity) {
  std::int32_t* const all = numbers_of(out, 9 * (capacity + 1) + 3);
  const auto part = [&](Index i) { return all + i * (capacity + 1); };
  return {.capacity = capacity,
          .cu_seqlens_q = part(0),
          .cu_seqlens_k = part(1),
          .cu_seqlens_q_padded = part(2),
          .cu_seqlens_k_padded = part(3),
          .seqused_q = part(4),
          .seqused_k = part(5),
          .lo = part(6),
          .hi = part(7),
          .sequence = part(8),
          .count = part(9)};
}

// As the device does: past the last entry offsets stay at the end and lengths are 0.
void write_step(const VarlenStep& step, const DeviceStep& to) {
  const auto fill = [&](const std::vector<Index>& from, std::int32_t* out, Index size, Index rest) {
    write_numbers(from, out);
    std::fill(out + from.size(), out + size, device_bound(rest));
  };
  const Index n = to.capacity;
  if (step.entries() > n) throw Error("a step does not fit the room for it", "this is a fault of Weft: report it");
  fill(step.cu_seqlens_q, to.cu_seqlens_q, n + 1, step.cu_seqlens_q.back());
  fill(step.cu_seqlens_k, to.cu_seqlens_k, n + 1, step.cu_seqlens_k.back());
  fill(step.cu_seqlens_q_padded, to.cu_seqlens_q_padded, n + 1, step.cu_seqlens_q_padded.back());
  fill(step.cu_seqlens_k_padded, to.cu_seqlens_k_padded, n + 1, step.cu_seqlens_k_padded.back());
  fill(step.seqused_q, to.seqused_q, n, 0);
  fill(step.seqused_k, to.seqused_k, n, 0);
  fill(step.lo, to.lo, n, -kUnlimited);
  fill(step.hi, to.hi, n, kUnlimited);
  fill(step.sequence, to.sequence, n, -1);
  to.count[0] = device_bound(step.entries());
  to.count[1] = device_bound(step.max_seqlen_q);
  to.count[2] = device_bound(step.max_seqlen_k);
}

void make_step(std::string_view kind, const DeviceStepArgs& args, const Offsets& q, const std::optional<Offsets>& k,
               const Array& out, std::uintptr_t stream) {
  const DeviceStep to = step_in(out, device_step_capacity(args));
  const Place place = place_of({{"the result", out},
                                {"cu_seqlens", q.cu},
                                {"cu_seqlens_padded", q.padded},
                                {"cu_seqlens_k", k ? std::optional(k->cu) : std::nullopt}},
                               stream);
  const bool ring = kind == "ring";
  const ReleaseGil others_run;
  if (place.kind != DeviceKind::cpu)
    return with_shared_context(place, [&](DeviceContext& context) {
      ring ? ring_step(context, args, to) : all_gather_step(context, args, to);
    });
  const Stream queries = q.on_cpu();
  const Problem problem(k ? Packing(queries, k->on_cpu()) : Packing(queries), args.mask);
  const Layout layout = Layout::dual_chunk(queries, args.layout.ranks);
  write_step(
      ring ? ring_step(problem, layout, args.rank, args.step) : all_gather_step(problem, layout, args.rank, args.step),
      to);
}

void bind_device_steps(nb::module_& m) {
  const auto args_of = [](const Offsets& q, const std::optional<Offsets>& k, const Mask& mask, Index ranks, Index rank,
                          Index step) {
    DeviceStepArgs args{.mask = mask, .layout = {.kind = LayoutKind::dual_chunk, .ranks = ranks}};
    args.q = q.on_gpu();
    if (k) args.k = k->on_gpu();
    args.rank = rank;
    args.step = step;
    return args;
  };
  const auto side = [](const Side& s) { return offsets_of(std::get<0>(s), std::get<1>(s), std::get<2>(s)); };
  m.def(
      "step_capacity",
      [args_of, side](const Side& q, const std::optional<Side>& k, const Mask& mask, Index ranks, Index rank,
                      Index step) {
        return device_step_capacity(
            args_of(side(q), k ? std::optional(side(*k)) : std::nullopt, mask, ranks, rank, step));
      },
      "q"_a, "k"_a.none(), "mask"_a, "ranks"_a, "rank"_a, "step"_a);
  m.def(
      "make_step",
      [args_of, side](std::string_view kind, const Side& q, const std::optional<Side>& k, const Mask& mask, Index ranks,
                      Index rank, Index step, const Array& out, std::uintptr_t stream) {
        const Offsets queries = side(q);
        const std::optional<Offsets> keys = k ? std::optional(side(*k)) : std::nullopt;
        make_step(kind, args_of(queries, keys, mask, ranks, rank, step), queries, keys, out, stream);
      },
      "kind"_a, "q"_a, "k"_a.none(), "mask"_a, "ranks"_a, "rank"_a, "step"_a, "out"_a, "stream"_a);
}

// --- Rows that change hands ---

// Consecutive rows of an array, as many for each rank as `counts` says.
std::vector<Block> parts_of(const Array& array, std::string_view name, const std::vector<Index>& counts, Use use) {
  const RowTensor rows = rows_view(array, name, Format::thd, use);
  std::vector<Block> blocks;
  Index first = 0;
  for (const Index n : counts) {
    if (n < 0 || n > rows.rows - first)
      throw Error(text(name, " has ", rows.rows, " rows, and those for the ranks are more"),
                  "give what they add up to");
    blocks.push_back({row_of(rows, first), n, 1, rows.row_bytes, rows.row_bytes, rows.row_bytes});
    first += n;
  }
  if (first != rows.rows || !dense(rows))
    throw Error(text(name, " has ", rows.rows, " rows for ", first, ", or gaps between rows"),
                "give a contiguous array of as many rows");
  return blocks;
}

void bind_exchange(nb::module_& m) {
  m.def(
      "exchange_rows",
      [](Comm& c, const Array& send, const std::vector<Index>& send_counts, const Array& receive,
         const std::vector<Index>& receive_counts, std::uintptr_t stream) {
        const Index ranks = c.get().ranks();
        if (static_cast<Index>(send_counts.size()) != ranks || static_cast<Index>(receive_counts.size()) != ranks)
          throw Error(text(send_counts.size(), " and ", receive_counts.size(), " counts for ", ranks, " ranks"),
                      "give one a rank");
        const std::vector<Block> to = parts_of(send, "what is sent", send_counts, Use::read);
        const std::vector<Block> from = parts_of(receive, "what is received", receive_counts, Use::write);
        const Place place = place_of({{"what is sent", send}, {"what is received", receive}}, stream);
        const ReleaseGil others_run;
        const InTurn turn(c);
        if (place.kind == DeviceKind::cpu) return c.get().all_to_all(to, from).wait();
        c.get().on(place)->all_to_all(to, from).wait();
      },
      "comm"_a, "send"_a, "send_counts"_a, "receive"_a, "receive_counts"_a, "stream"_a,
      "Rows for each rank one after another, to the rows from each rank one after another.");
}

}  // namespace

void bind_rows(nb::module_& m) {
  bind_orders(m);
  bind_steps(m);
  bind_copies(m);
  bind_offsets(m);
  bind_device_steps(m);
  bind_exchange(m);
}

}  // namespace weft::python
