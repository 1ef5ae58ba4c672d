// Calls a kernel on tensors in host memory. A CPU kernel is given them as they are; a GPU kernel is given copies in
// device memory, and its outputs are copied back.
#pragma once

#include <cstring>
#include <list>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "device/device.h"
#include "index.h"
#include "kernel/check_args.h"
#include "weft/kernel.h"

namespace weft::test {

inline DeviceKind device_of(std::string_view kernel) {
  return kernel.starts_with("cuda") ? DeviceKind::cuda : DeviceKind::cpu;
}

inline std::size_t spanned_bytes(const ConstTensorView& view) {
  Index last = 0;
  for (Index row = 0; row < view.rows; ++row) last = max_of(last, view.offset(row, view.heads - 1) + view.dim);
  return at(last * size_of(view.dtype));
}

// A copy in device memory of exactly the bytes a view spans: a memory checker sees an access to one byte more.
class DeviceBytes {
 public:
  DeviceBytes(const Place& place, const void* host, std::size_t bytes)
      : place_(place), before_(static_cast<const char*>(host), static_cast<const char*>(host) + bytes) {
    if (bytes == 0) return;
    data_ = device::take(place, static_cast<Index>(bytes));
    device::to_device(place, data_, host, static_cast<Index>(bytes));
  }
  ~DeviceBytes() { device::give_back(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  void* data() const { return data_; }
  const std::vector<char>& before() const { return before_; }
  std::vector<char> read() const {
    std::vector<char> result(before_.size());
    const device::HostCopy copy{result.data(), data_, static_cast<Index>(result.size())};
    if (!result.empty()) device::to_host(place_, {&copy, 1});
    return result;
  }

 private:
  Place place_;
  std::vector<char> before_;
  void* data_ = nullptr;
};

class OnDevice {
 public:
  explicit OnDevice(std::string_view kernel) : place_{.kind = device_of(kernel)} {
    if (on_gpu()) place_.stream = device::thread_stream();
  }
  const Place& place() const { return place_; }

  ConstTensorView in(ConstTensorView view) {
    if (on_gpu() && view.data != nullptr) view.data = copy(view);
    return view;
  }
  TensorView out(TensorView view) {
    if (!on_gpu() || view.data == nullptr) return view;
    const TensorView host = view;
    view.data = copy(view);
    outputs_.push_back({host, &copies_.back()});
    return view;
  }
  KernelForwardArgs bind(const KernelForwardArgs& host) {
    KernelForwardArgs args = bind_inputs(host);
    args.out = out(host.out);
    args.lse = out(host.lse);
    args.max_logit = out(host.max_logit);
    args.partial.sums = out(host.partial.sums);
    if (on_gpu() && host.partial.states != nullptr) {
      static_assert(sizeof(RowState<float>) == sizeof(double));
      const Index states = host.partial.sums.rows * host.partial.sums.heads;
      const TensorView view = thd(reinterpret_cast<double*>(host.partial.states), DType::f64, states, 1, 1);
      args.partial.states = static_cast<RowState<float>*>(out(view).data);
    }
    return args;
  }
  KernelBackwardArgs bind(const KernelBackwardArgs& host) {
    KernelBackwardArgs args = bind_inputs(host);
    args.dout = in(host.dout);
    args.out = in(host.out);
    args.lse = in(host.lse);
    args.dq = out(host.dq);
    args.dk = out(host.dk);
    args.dv = out(host.dv);
    args.dsink = out(host.dsink);
    return args;
  }

  // Waits for the device and copies the outputs back. The bytes between their elements must be as they were.
  void finish() {
    for (const Output& o : outputs_) {
      const std::vector<char> now = o.device->read();
      char* host = static_cast<char*>(o.host.data);
      const Index size = size_of(o.host.dtype);
      std::vector<char> between = o.device->before();
      for (Index row = 0; row < o.host.rows; ++row)
        for (Index head = 0; head < o.host.heads; ++head) {
          const std::size_t begin = at(o.host.offset(row, head) * size), bytes = at(o.host.dim * size);
          std::memcpy(host + begin, now.data() + begin, bytes);
          std::memcpy(between.data() + begin, now.data() + begin, bytes);
        }
      EXPECT_TRUE(between == now) << "something was written between the elements";
    }
    if (on_gpu()) device::synchronize(place_);
    outputs_.clear();
    copies_.clear();
  }

 private:
  struct Output {
    TensorView host;
    const DeviceBytes* device;
  };
  bool on_gpu() const { return place_.kind == DeviceKind::cuda; }
  void* copy(const ConstTensorView& view) {
    return copies_.emplace_back(place_, view.data, spanned_bytes(view)).data();
  }
  template <class Args>
  Args bind_inputs(Args args) {
    args.q = in(args.q);
    const void* const keys = args.k.data;
    args.k = in(args.k);
    if (args.v.data == keys && args.v.dim <= args.k.dim)  // V may be the first columns of K
      args.v.data = args.k.data;
    else
      args.v = in(args.v);
    args.attention.sink.logits = in(args.attention.sink.logits);
    args.place = place_;
    return args;
  }

  Place place_;
  std::list<DeviceBytes> copies_;
  std::vector<Output> outputs_;
};

inline void attend_on(std::string_view kernel, const KernelForwardArgs& host) {
  OnDevice device(kernel);
  attend(device.bind(host), kernel);
  device.finish();
}
inline void attend_backward_on(std::string_view kernel, const KernelBackwardArgs& host) {
  OnDevice device(kernel);
  attend_backward(device.bind(host), kernel);
  device.finish();
}
inline void finish_partial_on(std::string_view kernel, const KernelForwardArgs& host) {
  OnDevice device(kernel);
  finish_partial(finish_args(device.bind(host)));
  device.finish();
}

}  // namespace weft::test
