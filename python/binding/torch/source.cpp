#include "torch/source.h"

#include <optional>

#include <nanobind/stl/optional.h>

#include "convert.h"
#include "gil.h"
#include "index.h"

namespace weft::python {
namespace {

using namespace nb::literals;

// Memory of a pass, for as long as Python is asked for something.
nb::object array_of(const ConstTensorView& view, const std::vector<std::size_t>& shape, const Place& place) {
  const nb::dlpack::dtype dtype = with_type(view.dtype, [&]<class T>(std::type_identity<T>) {
    const auto code = std::is_same_v<T, bf16> ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float;
    return nb::dlpack::dtype{static_cast<std::uint8_t>(code), 8 * sizeof(T), 1};
  });
  const bool on_gpu = place.kind != DeviceKind::cpu;
  return nb::cast(nb::ndarray<nb::array_api>(const_cast<void*>(view.data), shape.size(), shape.data(), nb::none(),
                                             nullptr, dtype, on_gpu ? nb::device::cuda::value : nb::device::cpu::value,
                                             on_gpu ? place.device : 0));
}

nb::object rows_of(const ConstTensorView& view, const Place& place) {
  return array_of(view, {at(view.rows), at(view.dim)}, place);
}

nb::object heads_of(const ConstTensorView& view, const Place& place) {
  return array_of(view, {at(view.rows), at(view.heads), at(view.dim)}, place);
}

// The functions of a Python object: expand(rows, step, first head, last head) -> arrays of K and V, reduce(rows, step,
// first head, last head, dk, dv, gradient), and `known`, a dict: step -> (rows that are seen, or None for all of them;
// their positions). Made and ended with the GIL.
class PythonSource {
 public:
  PythonSource(nb::object maker, const Array& rows) : maker_(std::move(maker)), known_(maker_.attr("known")) {
    source_.rows = view(rows, "source", Format::thd);
    source_.expand = [this](const SourceRows& asked) { return expand(asked); };
    source_.reduce = [this](const SourceRows& asked, const KeyValueViews& gradients, const TensorView& to) {
      const AcquireGil gil;
      call_python(maker_.attr("reduce"), rows_of(asked.rows, asked.place), nb::int_(asked.step),
                  nb::int_(asked.heads.begin), nb::int_(asked.heads.end), heads_of(gradients.k, asked.place),
                  heads_of(gradients.v, asked.place), rows_of(to, asked.place));
    };
  }
  PythonSource(const PythonSource&) = delete;
  PythonSource& operator=(const PythonSource&) = delete;

  const Source* get() const { return &source_; }

 private:
  KeyValueViews expand(const SourceRows& asked) {
    const AcquireGil gil;
    const nb::int_ step(asked.step);
    if (!known_.contains(step)) known_[step] = seen_in(asked);
    kept_.reset();  // before the next ones are made: those of one head group exist at a time
    kept_ = call_python(maker_.attr("expand"), rows_of(asked.rows, asked.place), step, nb::int_(asked.heads.begin),
                        nb::int_(asked.heads.end));
    return {view(nb::cast<const Array&>(kept_[0]), "k of expand", Format::thd),
            view(nb::cast<const Array&>(kept_[1]), "v of expand", Format::thd)};
  }

  static nb::tuple seen_in(const SourceRows& asked) {
    nb::object seen = nb::none();
    if (static_cast<Index>(asked.tokens.size()) < asked.rows.rows) {
      std::vector<Index> rows;
      for (const Range& r : asked.seen)
        for (Index row = r.begin; row < r.end; ++row) rows.push_back(row);
      seen = nb::cast(python::array_of(std::move(rows)));
    }
    return nb::make_tuple(seen, python::array_of(std::vector<Index>(asked.positions.begin(), asked.positions.end())));
  }

  nb::object maker_;
  nb::dict known_;
  nb::object kept_;  // K and V of the last call
  Source source_;
};

}  // namespace

void bind_source(nb::class_<HeldExecutor>& executor) {
  executor.def(
      "forward_source",
      [](HeldExecutor& e, const Array& q, const Array& source, nb::object maker, const Settings& settings,
         const Array& out, const std::optional<Array>& lse, const std::optional<Array>& max_logit,
         std::uintptr_t stream, Index layer) {
        const PythonSource made(std::move(maker), source);
        ExecutorForwardArgs args{
            .q = view(q, "q", Format::thd),
            .attention = settings.attention(),
            .out = view(out, "out", Format::thd, Use::write),
            .place = place_of({{"q", q}, {"source", source}, {"sink", settings.sink}, {"out", out}}, stream),
            .source = made.get()};
        if (lse) args.lse = token_heads_view(*lse, "lse", Format::thd, Use::write);
        if (max_logit) args.max_logit = per_head_view(*max_logit, "max_logit", Use::write);
        const ReleaseGil others_run;
        e.forward(args, layer);
      },
      "q"_a, "source"_a, "maker"_a, "settings"_a, "out"_a, "lse"_a.none(), "max_logit"_a.none(), "stream"_a = 0,
      "layer"_a = kNoLayer);
  executor.def(
      "backward_source",
      [](HeldExecutor& e, const Array& q, const Array& source, nb::object maker, const Settings& settings,
         const Array& out, const Array& lse, const Array& dout, const Array& dq, const Array& dsource,
         const std::optional<Array>& dsink, std::uintptr_t stream, Index layer) {
        const PythonSource made(std::move(maker), source);
        ExecutorBackwardArgs args{
            .q = view(q, "q", Format::thd),
            .attention = settings.attention(),
            .dout = view(dout, "dout", Format::thd),
            .out = view(out, "out", Format::thd),
            .lse = token_heads_view(lse, "lse", Format::thd),
            .dq = view(dq, "dq", Format::thd, Use::write),
            .place = place_of(
                {{"q", q}, {"source", source}, {"sink", settings.sink}, {"out", out}, {"dout", dout}, {"dq", dq}},
                stream),
            .source = made.get(),
            .dsource = view(dsource, "dsource", Format::thd, Use::write)};
        if (dsink) args.dsink = per_head_view(*dsink, "dsink", Use::write);
        const ReleaseGil others_run;
        e.backward(args, layer);
      },
      "q"_a, "source"_a, "maker"_a, "settings"_a, "out"_a, "lse"_a, "dout"_a, "dq"_a, "dsource"_a, "dsink"_a.none(),
      "stream"_a = 0, "layer"_a = kNoLayer);
}

}  // namespace weft::python
