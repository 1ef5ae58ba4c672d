// Packing, Mask and Problem.
#include "problem.h"

#include <functional>
#include <string>
#include <tuple>
#include <utility>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "convert.h"
#include "module.h"
#include "text.h"
#include "weft/error.h"

namespace weft::python {
namespace {

using namespace nb::literals;

struct SideArrays {
  std::string_view name;
  nb::handle cu_seqlens, padded, used;
  std::optional<Index> tokens;

  bool given() const { return !cu_seqlens.is_none() || !padded.is_none() || !used.is_none(); }
  std::string called(std::string_view what) const { return text(what, "_", name); }
};

Stream stream_of(const SideArrays& side, const Stream* other) {
  const auto cu = optional_indices(side.cu_seqlens, side.called("cu_seqlens"));
  const auto padded = optional_indices(side.padded, text("cu_seqlens_", side.name, "_padded"));
  const auto used = optional_indices(side.used, side.called("seqused"));
  if (used) {
    if (cu && padded)
      throw Error(text("cu_seqlens_", side.name, ", cu_seqlens_", side.name, "_padded and seqused_", side.name,
                       " are all given"),
                  "give where sequences begin once, and either cu_seqlens or seqused for how long they are");
    if (!cu && !padded && other == nullptr)
      throw Error(text("seqused_", side.name, " is given without offsets"),
                  text("give cu_seqlens_", side.name, " or cu_seqlens_", side.name, "_padded too"));
    const std::vector<Index> offsets = padded ? *padded
                                       : cu   ? *cu
                                              : std::vector<Index>(other->offsets().begin(), other->offsets().end());
    return Stream::from_used(offsets, *used, side.tokens);
  }
  const std::vector<Index>& lengths = cu ? *cu : padded.value();
  return Stream::from_cu_seqlens(
      {lengths, padded ? std::span<const Index>(*padded) : std::span<const Index>(), side.tokens});
}

Packing packing_of(nb::handle cu_q, nb::handle cu_k, nb::handle cu_q_padded, nb::handle cu_k_padded, nb::handle used_q,
                   nb::handle used_k, std::optional<Index> tokens_q, std::optional<Index> tokens_k) {
  const SideArrays q{"q", cu_q, cu_q_padded, used_q, tokens_q}, k{"k", cu_k, cu_k_padded, used_k, tokens_k};
  if (cu_q.is_none() && cu_q_padded.is_none())
    throw Error("cu_seqlens_q is not given", "give the prefix sums of the lengths: [0, len0, len0 + len1, ...]");
  Stream streams = stream_of(q, nullptr);
  if (!k.given() && (!tokens_k || tokens_k == tokens_q)) return {std::move(streams)};
  if (!k.given()) {
    // As the queries, in a buffer of another size.
    Stream keys = Stream::from_used(streams.offsets(), streams.used_lengths(), tokens_k);
    return {std::move(streams), std::move(keys)};
  }
  Stream keys = stream_of(k, &streams);
  return {std::move(streams), std::move(keys)};
}

auto prefix_sums(std::span<const Index> lengths) {
  std::vector<Index> sums{0};
  for (const Index n : lengths) sums.push_back(sums.back() + n);
  return array_of(std::move(sums));
}
auto array_from(std::span<const Index> values) { return array_of(std::vector<Index>(values.begin(), values.end())); }

std::string lengths_text(const Stream& stream) {
  std::string all = "[";
  const Index shown = min_of(stream.sequences(), 8);
  for (Index i = 0; i < shown; ++i) all += text(i == 0 ? "" : ", ", stream.used(i));
  return all + (shown < stream.sequences() ? text(", ... ", stream.sequences(), " sequences]") : "]");
}

std::string packing_text(const Packing& p) {
  std::string keys = p.self() ? "" : text(", k ", lengths_text(p.k()), " in ", p.k().tokens(), " tokens");
  return text("Packing(", lengths_text(p.q()), " in ", p.q().tokens(), " tokens", keys, ")");
}

Mask mask_of(nb::handle causal, nb::handle bottom_right, nb::handle window, nb::handle chunk, nb::handle slices) {
  constexpr std::string_view kWindow = "(left, right): two whole numbers, with -1 for no limit";
  const bool pair = (PyTuple_Check(window.ptr()) || PyList_Check(window.ptr())) && nb::len(window) == 2;
  if (!pair) throw Error(text("window is ", nb::repr(window).c_str()), text("give ", kWindow));
  Mask mask{.causal = flag(causal, "causal"),
            .align = flag(bottom_right, "bottom_right") ? Align::bottom_right : Align::top_left,
            .left = whole_number(window[0], "window", kWindow),
            .right = whole_number(window[1], "window", kWindow)};
  if (!chunk.is_none()) mask.chunk = whole_number(chunk, "chunk_size", "a whole number, or None");
  if (slices.is_none()) return mask;
  if (mask.causal || mask.align == Align::bottom_right || mask.left != -1 || mask.right != -1 || mask.chunk)
    throw Error("slices are given together with causal, bottom_right, window or chunk_size",
                "slices are the whole mask: leave the others out");
  mask.slices = slices_from(slices);
  return mask;
}

std::string mask_text(const Mask& m) {
  if (m.slices) return text("Mask(slices=", m.slices->size(), ")");
  std::string all = text("Mask(causal=", m.causal ? "True" : "False");
  if (m.align == Align::bottom_right) all += ", bottom_right=True";
  if (m.left != -1 || m.right != -1) all += text(", window=(", m.left, ", ", m.right, ")");
  if (m.chunk) all += text(", chunk_size=", *m.chunk);
  return all + ")";
}

// What pickle and copy make a packing or a mask of anew: data loaders make packings in processes of their own, and
// modules hold masks.
nb::tuple packing_again(const Packing& p) {
  return nb::make_tuple(nb::type<Packing>(),
                        nb::make_tuple(nb::none(), nb::none(), array_from(p.q().offsets()), array_from(p.k().offsets()),
                                       array_from(p.q().used_lengths()), array_from(p.k().used_lengths()),
                                       p.q().tokens(), p.k().tokens()));
}

nb::object slices_or_none(const Mask& m) { return m.slices ? nb::cast(slices_array(*m.slices)) : nb::none(); }

nb::tuple mask_again(const Mask& m) {
  return nb::make_tuple(nb::type<Mask>(), nb::make_tuple(m.causal, m.align == Align::bottom_right,
                                                         nb::make_tuple(m.left, m.right), m.chunk, slices_or_none(m)));
}

bool same_mask(const Mask& a, const Mask& b) {
  const auto all = [](const Mask& m) { return std::tie(m.causal, m.align, m.left, m.right, m.chunk, m.slices); };
  return all(a) == all(b);
}

// Masks are keys of settings that are looked up in every call: no text is made.
Py_hash_t mask_hash(const Mask& m) {
  RowHash hash;
  for (const Index x : {Index{m.causal}, static_cast<Index>(m.align), m.left, m.right, m.chunk.value_or(-1),
                        m.slices ? static_cast<Index>(m.slices->size()) : -1})
    hash.add(x);
  return static_cast<Py_hash_t>(hash.value());
}

// A hash of where sequences begin, whatever part of them is real: layouts of two packings may place the same rows.
std::uint64_t fingerprint(const Stream& stream) {
  RowHash hash;
  for (const Index x : stream.offsets()) hash.add(x);
  hash.add(stream.tokens());
  return hash.value();
}

void bind_packing(nb::module_& m) {
  nb::class_<Packing>(m, "Packing", R"(Which sequences lie where in the packed streams of query and key tokens.

    >>> import weft
    >>> weft.Packing([0, 7, 10, 16])
    Packing([7, 3, 6] in 16 tokens)
    >>> weft.Packing.from_lengths([7, 3, 6], multiple=8).cu_seqlens_q_padded.tolist()
    [0, 8, 16, 24]
)")
      .def(
          "__init__",
          [](Packing* self, nb::object cu_q, nb::object cu_k, nb::object cu_q_padded, nb::object cu_k_padded,
             nb::object used_q, nb::object used_k, std::optional<Index> tokens_q, std::optional<Index> tokens_k) {
            new (self) Packing(packing_of(cu_q, cu_k, cu_q_padded, cu_k_padded, used_q, used_k, tokens_q, tokens_k));
          },
          "cu_seqlens_q"_a.none() = nb::none(), "cu_seqlens_k"_a.none() = nb::none(),
          "cu_seqlens_q_padded"_a.none() = nb::none(), "cu_seqlens_k_padded"_a.none() = nb::none(),
          "seqused_q"_a.none() = nb::none(), "seqused_k"_a.none() = nb::none(), "tokens_q"_a.none() = nb::none(),
          "tokens_k"_a.none() = nb::none())
      .def_static(
          "from_lengths",
          [](nb::object lengths, nb::object lengths_k, Index multiple) {
            const Stream q = Stream::from_lengths(indices(lengths, "lengths"));
            const Packing packing =
                lengths_k.is_none() ? Packing(q) : Packing(q, Stream::from_lengths(indices(lengths_k, "lengths_k")));
            return multiple == 1 ? packing : packing.padded_to(multiple);
          },
          "lengths"_a, "lengths_k"_a.none() = nb::none(), "multiple"_a = 1,
          "Sequences of these lengths one after another, each padded to a multiple.")
      .def_static(
          "from_batch",
          [](Index batch, Index length, std::optional<Index> length_k, nb::object used_q, nb::object used_k) {
            const auto q_used = optional_indices(used_q, "seqused_q"), k_used = optional_indices(used_k, "seqused_k");
            Stream q =
                Stream::from_batch(batch, length, q_used ? std::span<const Index>(*q_used) : std::span<const Index>());
            if (!length_k && !k_used) return Packing(std::move(q));
            Stream k = Stream::from_batch(batch, length_k.value_or(length),
                                          k_used ? std::span<const Index>(*k_used) : std::span<const Index>());
            return Packing(std::move(q), std::move(k));
          },
          "batch"_a, "length"_a, "length_k"_a.none() = nb::none(), "seqused_q"_a.none() = nb::none(),
          "seqused_k"_a.none() = nb::none(), "A batch of sequences of one length, of which seqused rows each are real.")
      .def("padded_to", &Packing::padded_to, "multiple"_a,
           "The same real lengths laid out anew, each padded to a multiple.")
      .def_prop_ro("sequences", &Packing::sequences)
      .def_prop_ro("tokens_q", [](const Packing& p) { return p.q().tokens(); })
      .def_prop_ro("tokens_k", [](const Packing& p) { return p.k().tokens(); })
      .def_prop_ro("self_attention", &Packing::self)
      .def_prop_ro(
          "fingerprints", [](const Packing& p) { return std::pair{fingerprint(p.q()), fingerprint(p.k())}; },
          "Numbers of where sequences begin, of queries and of keys.")
      .def_prop_ro(
          "cu_seqlens_q", [](const Packing& p) { return prefix_sums(p.q().used_lengths()); }, kNew)
      .def_prop_ro(
          "cu_seqlens_k", [](const Packing& p) { return prefix_sums(p.k().used_lengths()); }, kNew)
      .def_prop_ro(
          "cu_seqlens_q_padded", [](const Packing& p) { return array_from(p.q().offsets()); }, kNew)
      .def_prop_ro(
          "cu_seqlens_k_padded", [](const Packing& p) { return array_from(p.k().offsets()); }, kNew)
      .def_prop_ro(
          "lengths_q", [](const Packing& p) { return array_from(p.q().used_lengths()); }, kNew)
      .def_prop_ro(
          "lengths_k", [](const Packing& p) { return array_from(p.k().used_lengths()); }, kNew)
      .def(
          "__eq__", [](const Packing& a, const Packing& b) { return a.q() == b.q() && a.k() == b.k(); },
          nb::is_operator())
      .def("__hash__", [](const Packing& p) { return std::hash<std::string>{}(packing_text(p)); })
      .def("__reduce__", packing_again)
      .def("__repr__", packing_text);
}

void bind_mask(nb::module_& m) {
  nb::class_<Mask>(m, "Mask", R"(Which keys a query may see.

    >>> import weft
    >>> weft.Mask(causal=True, window=(512, 0))
    Mask(causal=True, window=(512, 0))
)")
      .def(
          "__init__",
          [](Mask* self, nb::object causal, nb::object bottom_right, nb::object window, nb::object chunk,
             nb::object slices) { new (self) Mask(mask_of(causal, bottom_right, window, chunk, slices)); },
          nb::sig("def __init__(self, causal: bool = False, bottom_right: bool = False, window: tuple[int, int] = (-1, "
                  "-1), "
                  "chunk_size: int | None = None, slices: object | None = None) -> None"),
          "causal"_a.none() = false, "bottom_right"_a.none() = false, "window"_a.none() = nb::make_tuple(-1, -1),
          "chunk_size"_a.none() = nb::none(), "slices"_a.none() = nb::none())
      .def_ro("causal", &Mask::causal)
      .def_prop_ro("bottom_right", [](const Mask& mask) { return mask.align == Align::bottom_right; })
      .def_prop_ro("window", [](const Mask& mask) { return std::pair{mask.left, mask.right}; })
      .def_ro("chunk_size", &Mask::chunk)
      .def_prop_ro("slices", slices_or_none, kNew,
                   nb::for_getter(nb::sig("def slices(self) -> numpy.typing.NDArray[numpy.int64] | None")))
      .def("__eq__", same_mask, nb::is_operator())
      .def("__hash__", mask_hash)
      .def("__reduce__", mask_again)
      .def("__repr__", mask_text);

  nb::class_<Problem>(m, "Problem", "A checked question, the same on every rank: a Packing and a Mask.")
      .def(nb::init<Packing, Mask>(), "packing"_a, "mask"_a)
      .def_prop_ro("packing", &Problem::packing)
      .def_prop_ro("mask", &Problem::mask)
      .def_prop_ro("visible_pairs", &Problem::visible_pairs)
      .def_prop_ro(
          "slices", [](const Problem& p) { return slices_array(p.global_slices()); },
          "[n, 6]: q_begin, q_end, k_begin, k_end, lo, hi, in global tokens. A mask's own slices are joined here where "
          "fewer show the same pairs.",
          kNew);

  m.def("usual_mask", &usual_mask, "packing"_a);
  m.attr("UNLIMITED") = kUnlimited;
}

}  // namespace

Mask usual_mask(const Packing& packing) { return Mask{.causal = packing.self()}; }

void bind_problem(nb::module_& m) {
  bind_packing(m);
  bind_mask(m);
}

}  // namespace weft::python
