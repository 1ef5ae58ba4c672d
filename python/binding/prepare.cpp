// Packs, micro-sequences, the K/V buffer, decoding on a cache.
#include "weft/prepare.h"

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include "attention.h"
#include "communicator.h"
#include "convert.h"
#include "gil.h"
#include "held.h"
#include "index.h"
#include "module.h"
#include "problem.h"
#include "tensor.h"
#include "text.h"
#include "weft/error.h"
#include "weft/kv_buffer.h"
#include "weft/kv_cache.h"

namespace weft::python {
namespace {

using namespace nb::literals;

void check_pack(const Packs& packs, Index pack) {
  if (pack < 0 || pack >= static_cast<Index>(packs.packs.size()))
    throw Error(text("there is no pack ", pack, " of ", packs.packs.size()), "use 0 <= pack < len(packs)");
}

// A K/V buffer with the communicator it needs.
struct HeldKvBuffer {
  HeldKvBuffer(Comm& comm, KvBufferOptions options)
      : comm(comm), last(options.place), buffer(comm.get(), std::move(options)) {}

  void use(const Place& place) {
    last.use(place);
    buffer.use(place);
  }

  Comm& comm;  // kept alive by Python
  LastStream last;
  KvBuffer buffer;
};

// start_gather or gather_again of a buffer, in a stream.
auto gather_with(void (KvBuffer::*gather)(Index, const ConstTensorView&, const ConstTensorView&)) {
  return [gather](HeldKvBuffer& b, Index micro, const Array& k, const Array& v, std::uintptr_t stream) {
    const InTurn turn(b.comm);
    b.use(place_of({{"k", k}, {"v", v}}, stream));
    (b.buffer.*gather)(micro, view(k, "k", Format::thd), view(v, "v", Format::thd));
  };
}

template <class Args>  // of a K/V buffer or of a cache
Args forward_args(const Array& q, const Settings& settings, const Array& out, const std::optional<Array>& lse,
                  const Place& place) {
  Args args{.q = view(q, "q", Format::thd),
            .attention = settings.attention(),
            .out = view(out, "out", Format::thd, Use::write),
            .place = place};
  if (lse) args.lse = token_heads_view(*lse, "lse", Format::thd, Use::write);
  return args;
}

void bind_packs(nb::module_& m) {
  nb::class_<Packs>(m, "Packs", "Documents dealt out to packs of one size.")
      .def("__len__", [](const Packs& p) { return p.packs.size(); })
      .def(
          "pieces",
          [](const Packs& p, Index pack) {
            check_pack(p, pack);
            std::vector<Index> flat;
            for (const Piece& piece : p.packs[at(pack)])
              flat.insert(flat.end(), {piece.document, piece.begin, piece.length});
            return array_of(std::move(flat), 3);
          },
          "pack"_a, "[n, 3]: document, first token of it, tokens.")
      .def(
          "packing",
          [](const Packs& p, Index pack) {
            check_pack(p, pack);
            return Packing(p.stream(pack));
          },
          "pack"_a, "The packing of one pack.")
      .def_prop_ro("report", [](const Packs& p) {
        const PackReport& r = p.report;
        return dict_of("tokens", r.tokens, "padding", r.padding, "empty", r.empty, "packs", r.packs, "least_packs",
                       r.least_packs, "split_documents", r.split_documents, "waste", r.waste, "token_balance",
                       r.token_balance, "pair_balance", r.pair_balance);
      });
  m.def(
      "pack_documents",
      [](nb::object lengths, Index budget, Index multiple, bool keep_order, bool split, double pair_limit) {
        return pack_documents(indices(lengths, "lengths"),
                              {.budget = budget,
                               .multiple = multiple,
                               .keep_order = keep_order,
                               .too_long = split ? PackOptions::TooLong::split : PackOptions::TooLong::refuse,
                               .pair_limit = pair_limit});
      },
      "lengths"_a, "budget"_a, "multiple"_a = 1, "keep_order"_a = false, "split"_a = false, "pair_limit"_a = 0.0,
      R"(Packs documents of these lengths into packs of `budget` rows: best fit, longest first.

pair_limit: no pack has more visible pairs of a causal mask than so many times the mean (1.1, say), or than the longest document.

    >>> import weft
    >>> packs = weft.prepare.pack_documents([700, 300, 600, 400], budget=1000)
    >>> len(packs), packs.packing(0)
    (2, Packing([700, 300] in 1000 tokens))
)");
}

void bind_micro_sequences(nb::module_& m) {
  nb::class_<Window>(m, "Window", "The queries that one rank attends in one micro-sequence.")
      .def_ro("begin", &Window::begin)
      .def_ro("end", &Window::end)
      .def_ro("first_document_begin", &Window::first_document_begin)
      .def_prop_ro("documents", copy_of(&Window::documents), kNew)
      .def_prop_ro("lengths", copy_of(&Window::lengths), kNew)
      .def_prop_ro("cu_seqlens_q", copy_of(&Window::cu_seqlens_q), kNew)
      .def_prop_ro("cu_seqlens_k", copy_of(&Window::cu_seqlens_k), kNew)
      .def_prop_ro(
          "position_ids", [](const Window& w) { return array_of(w.position_index()); }, kNew)
      .def_prop_ro(
          "document_index_q", [](const Window& w) { return array_of(w.document_index_q()); }, kNew)
      .def_prop_ro("document_index_k", [](const Window& w) { return array_of(w.document_index_k()); }, kNew);

  nb::class_<MicroSequences>(m, "MicroSequences", R"(A pack processed in M micro-sequences by ranks that gather K and V.

    >>> import weft
    >>> micros = weft.prepare.MicroSequences(weft.Packing([0, 5, 12]), ranks=2, micros=2, pad=True)
    >>> micros.local, micros.window(0, 1).position_ids.tolist()
    (3, [1, 2, 3])
)")
      .def(
          "__init__",
          [](MicroSequences* self, const Packing& packing, Index ranks, Index micros, bool pad,
             std::optional<Index> first_document_begin, std::optional<Mask> even_work) {
            if (!packing.self())
              throw Error("micro-sequences of a packing whose keys are not where its queries are",
                          "micro-sequences are for self-attention");
            new (self) MicroSequences(packing.q(),
                                      {.ranks = ranks,
                                       .micros = micros,
                                       .remainder = pad ? MicroSplit::Remainder::pad : MicroSplit::Remainder::refuse,
                                       .first_document_begin = first_document_begin,
                                       .even_work = std::move(even_work)});
          },
          "packing"_a, nb::kw_only(), "ranks"_a = 1, "micros"_a, "pad"_a = false,
          "first_document_begin"_a.none() = nb::none(), "even_work"_a.none() = nb::none())
      .def_prop_ro("ranks", &MicroSequences::ranks)
      .def_prop_ro("micros", &MicroSequences::micros)
      .def_prop_ro(
          "local", [](const MicroSequences& s) { return s.local(); },
          "Rows of a window; of the largest, if work is even.")
      .def_prop_ro("padding", &MicroSequences::padding, "Rows added because the tokens do not divide.")
      .def(
          "rows",
          [](const MicroSequences& s, Index rank, Index micro) {
            const Range r = s.rows(rank, micro);
            return nb::make_tuple(r.begin, r.end);
          },
          "rank"_a, "micro"_a, "Tokens [begin, end) of a rank's window.")
      .def("window", &MicroSequences::window, "rank"_a, "micro"_a, "What one rank attends in one micro-sequence.")
      .def(
          "slices",
          [](const MicroSequences& s, const Mask& mask, Index rank, Index micro) {
            const Window w = s.window(rank, micro);
            return slices_array(s.slices(s.problem(mask), rank, micro, {w.first_document_begin, w.end}));
          },
          "mask"_a, "rank"_a, "micro"_a, "[n, 6]; key rows counted from the window's first_document_begin.")
      .def(
          "work",
          [](const MicroSequences& s, const Mask& mask) { return array_of(s.work(s.problem(mask)), s.ranks()); },
          "mask"_a, "[micros, ranks]: visible pairs of each window.")
      .def(
          "key_rows",
          [](const MicroSequences& s, const Mask& mask, bool drop, bool ahead) {
            return key_rows(s, mask, {.drop = drop, .ahead = ahead});
          },
          "mask"_a, "drop"_a = false, "ahead"_a = false, "Rows that a K/V buffer needs.");
}

void bind_passes(nb::class_<HeldKvBuffer>& buffer) {
  buffer
      .def(
          "forward",
          [](HeldKvBuffer& b, Index micro, const Array& q, const std::optional<Array>& k, const std::optional<Array>& v,
             const Settings& settings, const Array& out, const std::optional<Array>& lse, std::uintptr_t stream) {
            const InTurn turn(b.comm);
            const Place place =
                place_of({{"q", q}, {"k", k}, {"v", v}, {"sink", settings.sink}, {"out", out}, {"lse", lse}}, stream);
            b.last.use(place);
            auto args = forward_args<KvBufferForwardArgs>(q, settings, out, lse, place);
            if (k) args.k = view(*k, "k", Format::thd);
            if (v) args.v = view(*v, "v", Format::thd);
            b.buffer.forward(micro, args);
          },
          "micro"_a, "q"_a, "k"_a.none(), "v"_a.none(), "settings"_a, "out"_a, "lse"_a.none(), "stream"_a = 0,
          nb::call_guard<ReleaseGil>())
      .def(
          "backward",
          [](HeldKvBuffer& b, Index micro, const Array& q, const Array& out, const Array& lse, const Array& dout,
             const Settings& settings, const Array& dq, const Array& dk, const Array& dv,
             const std::optional<Array>& dsink, std::uintptr_t stream, bool deterministic, bool deferred) {
            const InTurn turn(b.comm);
            const Place place = place_of({{"q", q},
                                          {"out", out},
                                          {"lse", lse},
                                          {"dout", dout},
                                          {"sink", settings.sink},
                                          {"dq", dq},
                                          {"dk", dk},
                                          {"dv", dv},
                                          {"dsink", dsink}},
                                         stream);
            b.last.use(place);
            b.buffer.backward(micro, {.q = view(q, "q", Format::thd),
                                      .attention = settings.attention(),
                                      .dout = view(dout, "dout", Format::thd),
                                      .out = view(out, "out", Format::thd),
                                      .lse = token_heads_view(lse, "lse", Format::thd),
                                      .dq = view(dq, "dq", Format::thd, Use::write),
                                      .dk = view(dk, "dk", Format::thd, Use::write),
                                      .dv = view(dv, "dv", Format::thd, Use::write),
                                      .dsink = dsink ? per_head_view(*dsink, "dsink", Use::write) : TensorView{},
                                      .place = place,
                                      .deterministic = deterministic,
                                      .deferred = deferred});
          },
          "micro"_a, "q"_a, "out"_a, "lse"_a, "dout"_a, "settings"_a, "dq"_a, "dk"_a, "dv"_a, "dsink"_a.none(),
          "stream"_a = 0, "deterministic"_a = false, "deferred"_a = false, nb::call_guard<ReleaseGil>());
}

void bind_kv_buffer(nb::module_& m) {
  nb::class_<HeldKvBuffer> buffer(m, "KvBuffer",
                                  "Keys and values of one layer while a pack goes through it in micro-sequences.");
  buffer
      .def(
          "__init__",
          [](HeldKvBuffer* self, Comm& comm, Index rows, Index heads, Index dim_qk, Index dim_v, DType dtype, bool drop,
             std::string kernel, std::optional<int> device, std::uintptr_t stream, bool checked, Index layer) {
            const ReleaseGil others_run;  // checked, or on a GPU: ranks meet
            const InTurn turn(comm);
            new (self) HeldKvBuffer(comm, {.rows = rows,
                                           .heads = heads,
                                           .dim_qk = dim_qk,
                                           .dim_v = dim_v,
                                           .dtype = dtype,
                                           .drop = drop,
                                           .kernel = std::move(kernel),
                                           .place = place_on(device, stream),
                                           .checked = checked,
                                           .layer = layer});
          },
          "comm"_a, "rows"_a, "heads"_a, "dim_qk"_a, "dim_v"_a, "dtype"_a, "drop"_a = false, "kernel"_a = "",
          "device"_a.none() = nb::none(), "stream"_a = 0, "checked"_a = false, "layer"_a = kNoLayer,
          nb::keep_alive<1, 2>())
      .def(
          "begin",
          [](HeldKvBuffer& b, const MicroSequences& s, const Mask& mask) {
            const InTurn turn(b.comm);
            b.buffer.begin(s, mask);
          },
          "sequence"_a, "mask"_a, nb::call_guard<ReleaseGil>())
      .def("start_gather", gather_with(&KvBuffer::start_gather), "micro"_a, "k"_a, "v"_a, "stream"_a = 0,
           nb::call_guard<ReleaseGil>())
      .def(
          "missing",
          [](const HeldKvBuffer& b, Index micro) {
            b.comm.get();
            return b.buffer.missing(micro);
          },
          "micro"_a)
      .def("gather_again", gather_with(&KvBuffer::gather_again), "micro"_a, "k"_a, "v"_a, "stream"_a = 0,
           nb::call_guard<ReleaseGil>())
      .def_prop_ro("bytes_held", [](const HeldKvBuffer& b) { return b.buffer.use().bytes_held; })
      .def_prop_ro("bytes_gathered", [](const HeldKvBuffer& b) { return b.buffer.use().bytes_gathered; });
  bind_passes(buffer);
}

// A cache points at the caller's tensors, which it keeps alive.
struct HeldCache {
  Array k, v;
  KvCache cache;
  std::unique_ptr<std::mutex> calls = std::make_unique<std::mutex>();  // attend runs without the GIL
};

void bind_kv_cache(nb::module_& m) {
  nb::class_<HeldCache>(m, "KvCache", "K and V of earlier tokens, in rows set aside for each sequence: decoding.")
      .def(
          "__init__",
          [](HeldCache* self, const Array& k, const Array& v, nb::object offsets, nb::object used) {
            const auto filled = optional_indices(used, "used").value_or(std::vector<Index>{});
            new (self) HeldCache{k, v,
                                 KvCache(view(k, "k", Format::thd, Use::write), view(v, "v", Format::thd, Use::write),
                                         indices(offsets, "offsets"), filled)};
          },
          "k"_a, "v"_a, "offsets"_a, "used"_a.none())
      .def_prop_ro("sequences", [](const HeldCache& c) { return c.cache.sequences(); })
      .def(
          "used", [](const HeldCache& c, Index i) { return c.cache.used(i); }, "sequence"_a)
      .def(
          "room", [](const HeldCache& c, Index i) { return c.cache.room(i); }, "sequence"_a)
      .def(
          "keep",
          [](HeldCache& c, Index i, Index used) {
            const std::lock_guard alone(*c.calls);
            c.cache.keep(i, used);
          },
          "sequence"_a, "used"_a)
      .def(
          "append",
          [](HeldCache& c, nb::object counts, const Array& k, const Array& v, std::uintptr_t stream) {
            const Place place = place_of({{"k", k}, {"v", v}, {"the cache's k", c.k}, {"its v", c.v}}, stream);
            const std::vector<Index> n = indices(counts, "counts");
            const std::lock_guard alone(*c.calls);
            c.cache.append(n, view(k, "k", Format::thd), view(v, "v", Format::thd), place);
          },
          "counts"_a, "k"_a, "v"_a, "stream"_a = 0)
      .def(
          "attend",
          [](const HeldCache& c, nb::object counts, const Array& q, const Mask& mask, const Settings& settings,
             const Array& out, const std::optional<Array>& lse, const std::string& kernel, std::uintptr_t stream) {
            const std::vector<Index> n = indices(counts, "counts");
            const Place place = place_of(
                {{"q", q}, {"sink", settings.sink}, {"out", out}, {"lse", lse}, {"the cache's k", c.k}, {"its v", c.v}},
                stream);
            const auto args = forward_args<KvCacheArgs>(q, settings, out, lse, place);
            const ReleaseGil others_run;
            const std::lock_guard alone(*c.calls);
            c.cache.attend(n, args, mask, kernel);
          },
          "counts"_a, "q"_a, "mask"_a, "settings"_a, "out"_a, "lse"_a.none(), "kernel"_a, "stream"_a = 0);
}

}  // namespace

void bind_prepare(nb::module_& m) {
  bind_packs(m);
  bind_micro_sequences(m);
  bind_kv_buffer(m);
  bind_kv_cache(m);
}

}  // namespace weft::python
