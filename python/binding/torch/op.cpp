// The kernels of the operators weft::run and weft::run_backward, which weft.torch calls below autograd.
#include <exception>
#include <stdexcept>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "index.h"
#include "module.h"
#include "text.h"
#include "torch/runs.h"
#include "torch/shim.h"

namespace weft::python::torch {
void bind_runs(nb::module_& m);

namespace {

using namespace nb::literals;

// What a kernel threw last in this thread. torch would make a RuntimeError of it; Python raises it as it is.
thread_local std::exception_ptr kept;

DType statistics(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

std::string_view packing_bytes(const Array& packing) {
  // Others are left to Python, which says what is wrong with them.
  if (packing.place.kind != DeviceKind::cpu || packing.shape.size() != 1 || packing.floating ||
      (packing.shape[0] > 1 && packing.strides[0] != 1))
    throw AskPython{};
  return {static_cast<const char*>(packing.data), at(packing.shape[0] * packing.item_bytes)};
}

// The number of settings, and whether the sink is one.
struct Number {
  explicit Number(StackValue value) : settings(static_cast<Index>(value >> 1)), sink((value & 1) != 0) {}
  Index settings;
  bool sink;
};

// Inputs that both passes have.
struct Call {
  Call(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& sink_, const Tensor& packing_, Number number)
      : call(settings_numbered(number.settings)), q(q_.array()), k(k_.array()), v(v_.array()) {
    if (!call) throw Error(text("there are no settings ", number.settings), "call weft::attention instead");
    settings = call->settings;
    if (number.sink) settings.sink = sink_.array();
    for (const auto& [array, name] : {std::pair(&q, "q"), std::pair(&k, "k"), std::pair(&v, "v")})
      view(*array, name, call->format);  // checks how many dimensions it has
    const Index heads = q.shape[q.shape.size() - 2];
    if (settings.sink && settings.sink->shape != std::vector<Index>{heads}) throw AskPython{};
    const Array packing = packing_.array();
    run = call->runs->find({call->problem, heads, k.shape[k.shape.size() - 2], q.dtype, q.shape.back(), v.shape.back(),
                            q.place.kind == DeviceKind::cpu ? -1 : q.place.device, packing_bytes(packing)});
    if (!run) throw AskPython{.missing = true};
    if (run->one == nullptr && run->executor == nullptr) throw AskPython{};
    stream = current_stream(q.place);
  }

  std::shared_ptr<const CallSettings> call;
  Array q, k, v;
  Settings settings;
  std::shared_ptr<Run> run;
  std::uintptr_t stream = 0;
};

std::vector<Index> with_last(std::vector<Index> shape, Index last) {
  shape.back() = last;
  return shape;
}

// (q, k, v, sink, packing, number) to (out, lse, max_logit). Without a sink q stands in for it; max_logit that nobody
// asked for is lse.
void forward(const std::vector<Tensor>& in, Number number, StackValue* stack) {
  const Call c(in[0], in[1], in[2], in[3], in[4], number);
  const std::vector<Index> rows(c.q.shape.begin(), c.q.shape.end() - 1);
  Tensor out = Tensor::empty(with_last(c.q.shape, c.v.shape.back()), c.q.dtype, c.q);
  Tensor lse = Tensor::empty(rows, statistics(c.q.dtype), c.q);
  Tensor largest = c.call->max_logit ? Tensor::empty({rows.back()}, statistics(c.q.dtype), c.q) : lse.again();
  const Array to = out.array(true);
  const std::optional<Array> to_lse = lse.array(true);
  const std::optional<Array> to_largest = c.call->max_logit ? std::optional(largest.array(true)) : std::nullopt;
  const auto pass = [&]<class Run>(Run& run) {
    auto args = forward_args<typename Run::Forward>(c.q, c.k, c.v, c.call->format, c.settings, to, to_lse, to_largest,
                                                    c.stream);
    run.forward(args, c.call->layer);
  };
  c.run->one != nullptr ? pass(*c.run->one) : pass(*c.run->executor);
  stack[0] = out.release();
  stack[1] = lse.release();
  stack[2] = largest.release();
}

// (dout, q, k, v, sink, out, lse, packing, number) to (dq, dk, dv, dsink). dsink without a sink is dq.
void backward(const std::vector<Tensor>& in, Number number, StackValue* stack) {
  const Tensor &dout = in[0], &out = in[5], &lse = in[6];
  const Call c(in[1], in[2], in[3], in[4], in[7], number);
  Tensor dq = Tensor::empty(c.q.shape, c.q.dtype, c.q), dk = Tensor::empty(c.k.shape, c.k.dtype, c.q),
         dv = Tensor::empty(c.v.shape, c.v.dtype, c.q);
  Tensor dsink = c.settings.sink ? Tensor::empty(c.settings.sink->shape, statistics(c.q.dtype), c.q) : dq.again();
  const Array to_dq = dq.array(true), to_dk = dk.array(true), to_dv = dv.array(true);
  const std::optional<Array> to_dsink = c.settings.sink ? std::optional(dsink.array(true)) : std::nullopt;
  const Array from = dout.array(), result = out.array(), statistic = lse.array();
  const auto pass = [&]<class Run>(Run& run) {
    auto args = backward_args<typename Run::Backward>(c.q, c.k, c.v, c.call->format, c.settings, result, statistic,
                                                      from, {to_dq, to_dk, to_dv, to_dsink}, c.stream);
    run.backward(args, c.call->layer);
  };
  c.run->one != nullptr ? pass(*c.run->one) : pass(*c.run->executor);
  stack[0] = dq.release();
  stack[1] = dk.release();
  stack[2] = dv.release();
  stack[3] = dsink.release();
}

// As torch calls it, without the GIL. What is left to Python is no exception, which takes 80 us through torch: the
// results mean nothing then, and torch_asked() says so.
template <auto kPass>
void kernel(StackValue* stack, std::uint64_t inputs, std::uint64_t outputs) {
  kept = nullptr;
  std::vector<Tensor> tensors;  // all inputs but the number
  for (std::uint64_t i = 0; i + 1 < inputs; ++i) tensors.emplace_back(stack[i]);
  try {
    kPass(tensors, Number(stack[inputs - 1]), stack);
  } catch (const AskPython&) {
    kept = std::current_exception();
    for (std::uint64_t i = 0; i < outputs; ++i) stack[i] = tensors.front().again().release();
  } catch (const std::exception& e) {
    kept = std::current_exception();
    throw std::runtime_error(e.what());
  }
}

void register_kernels(const char* key) {
  LibraryObject* library = nullptr;  // never deleted: that would take the kernels back
  if (shim().library_init_impl("weft", key, __FILE_NAME__, __LINE__, &library) != 0 ||
      shim().library_impl(library, "run", kernel<forward>) != 0 ||
      shim().library_impl(library, "run_backward", kernel<backward>) != 0)
    throw Error(text("torch takes no kernels for ", key), "report it, with the version of torch");
}

}  // namespace

void bind_op(nb::module_& m) {
  bind_runs(m);
  m.def("torch_load", &load, "libraries"_a,
        "Looks up torch's C interface; returns the name of a function that is missing, or nothing.");
  m.def("torch_register", &register_kernels, "key"_a,
        "Gives torch the kernels of weft::run and weft::run_backward, which are defined, for CPU or CUDA.");
  m.def(
      "torch_asked", [] { return kept != nullptr; }, "Whether the last kernel of this thread left its work to Python.");
  m.def(
      "torch_raise",
      [] {
        const std::exception_ptr last = std::exchange(kept, nullptr);
        if (!last) return std::string("unknown");
        try {
          std::rethrow_exception(last);
        } catch (const AskPython& ask) {
          return std::string(ask.missing ? "missing" : "ask");
        }
      },
      "Raises what the last kernel of this thread threw, or says what Python has to do.");
}

}  // namespace weft::python::torch
