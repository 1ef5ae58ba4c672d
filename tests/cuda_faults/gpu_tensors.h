// Tensors of the host with a copy on the GPU that stays from call to call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <list>
#include <string>
#include <vector>

#include "cuda/device_array.h"
#include "cuda/runtime.h"
#include "cuda_faults/each_in_turn.h"
#include "kernel/attention_problem.h"
#include "kernel/convert.h"
#include "kernel/on_device.h"

namespace weft::test {

struct Result {
  TensorView view;  // its data lies in
  std::vector<char> bytes;
};
using Results = std::vector<Result>;

class GpuTensors {
 public:
  ConstTensorView in(ConstTensorView view) {
    if (view.data != nullptr) view.data = put(view);
    return view;
  }
  TensorView out(TensorView view) {
    if (view.data == nullptr) return view;
    const TensorView host = view;
    view.data = put(view);
    outputs_.push_back({host, all_.back().data()});
    return view;
  }
  template <class Args>
  Args bind(Args args) {
    read_from(args, in(args.q), in(args.k), in(args.v));
    args.attention.sink.logits = in(args.attention.sink.logits);
    args.place = place();
    args.out = out(args.out);
    args.lse = out(args.lse);
    args.max_logit = out(args.max_logit);
    return args;
  }
  // Of the same inputs, and of what the forward writes.
  template <class Args, class Forward>
  Args bind(Args args, const Forward& forward) {
    read_from(args, forward.q, forward.k, forward.v);
    args.attention = forward.attention;
    args.out = forward.out;
    args.lse = forward.lse;
    args.place = place();
    args.dout = in(args.dout);
    args.dq = out(args.dq);
    args.dk = out(args.dk);
    args.dv = out(args.dv);
    args.dsink = out(args.dsink);
    return args;
  }
  Place place() const { return {DeviceKind::cuda, 0, stream_.stream}; }
  cudaStream_t stream() const { return stream_.stream; }

  // All outputs, and what lies between their elements: NaN.
  void poison() const {
    for (const Output& o : outputs_) WEFT_CUDA(cudaMemsetAsync(o.device, 0xff, spanned_bytes(o.host), stream_.stream));
  }
  Results read() const {
    WEFT_CUDA(cudaStreamSynchronize(stream_.stream));
    Results all;
    for (const Output& o : outputs_) {
      std::vector<char> bytes(spanned_bytes(o.host));
      if (!bytes.empty()) WEFT_CUDA(cudaMemcpy(bytes.data(), o.device, bytes.size(), cudaMemcpyDeviceToHost));
      all.push_back({o.host, std::move(bytes)});
    }
    return all;
  }

 private:
  struct Output {
    TensorView host;
    void* device;
  };
  void* put(const ConstTensorView& view) { return all_.emplace_back(place(), view.data, spanned_bytes(view)).data(); }

  TestStream stream_;
  std::list<DeviceBytes> all_;
  std::vector<Output> outputs_;
};

// A call whose outputs are NaN before each time.
inline Case poisoned(std::string name, const GpuTensors& gpu, std::function<void()> call, std::function<bool()> right) {
  return {std::move(name), [&gpu](long) { gpu.poison(); }, std::move(call), std::move(right)};
}

inline std::vector<double> values_of(const Result& r) {
  TensorView view = r.view;
  view.data = const_cast<char*>(r.bytes.data());
  return to_f64(view);
}

inline bool same_bytes(const Results& a, const Results& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Result& x, const Result& y) { return x.bytes == y.bytes; });
}
// Sums in another order, or by another kernel.
inline bool is_close(const std::vector<double>& a, const std::vector<double>& b, double limit = 0.03) {
  if (a.size() != b.size()) return false;
  double most = 0;
  for (const double x : b)
    if (std::isfinite(x)) most = std::max(most, std::abs(x));
  for (std::size_t i = 0; i < a.size(); ++i)
    if (!(a[i] == b[i] || std::abs(a[i] - b[i]) <= limit * most)) return false;
  return true;
}
inline bool is_close(const Results& a, const Results& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Result& x, const Result& y) { return is_close(values_of(x), values_of(y)); });
}

}  // namespace weft::test
