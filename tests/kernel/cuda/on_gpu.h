// Calls on host tensors, done on a GPU: inputs are copied there, outputs back; what lies between elements must stay.
#pragma once

#include <cstring>
#include <list>
#include <string_view>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "cuda/check.h"
#include "kernel/check_args.h"
#include "weft/kernel.h"

namespace weft::test {

inline constexpr const char* kPortable = "cuda.portable";
// The one that is tested: tests of every kernel set it.
inline std::string_view gpu_kernel = kPortable;

class CudaStream {
 public:
  CudaStream() { WEFT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~CudaStream() { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// Just the bytes that a view spans, so that a memory checker sees one too many.
class DeviceBytes {
 public:
  DeviceBytes(const void* host, std::size_t bytes)
      : before_(static_cast<const char*>(host), static_cast<const char*>(host) + bytes), bytes_(bytes) {
    if (bytes == 0) return;
    WEFT_CUDA(cudaMalloc(&data_, bytes));
    WEFT_CUDA(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice));
    WEFT_CUDA(cudaDeviceSynchronize());  // a small copy may return early, and the call's stream does not wait for it
  }
  ~DeviceBytes() { cudaFree(data_); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  void* data() const { return data_; }
  const std::vector<char>& before() const { return before_; }
  std::vector<char> read() const {
    std::vector<char> result(bytes_);
    if (bytes_ > 0) WEFT_CUDA(cudaMemcpy(result.data(), data_, bytes_, cudaMemcpyDeviceToHost));
    return result;
  }

 private:
  std::vector<char> before_;
  void* data_ = nullptr;
  std::size_t bytes_;
};

inline std::size_t spanned_bytes(const ConstTensorView& view) {
  Index last = 0;
  for (Index row = 0; row < view.rows; ++row) last = max_of(last, view.offset(row, view.heads - 1) + view.dim);
  return static_cast<std::size_t>(last * size_of(view.dtype));
}

class OnGpu {
 public:
  ConstTensorView in(ConstTensorView view) {
    if (view.data == nullptr) return view;
    view.data = copies_.emplace_back(view.data, spanned_bytes(view)).data();
    return view;
  }
  TensorView out(TensorView view) {
    if (view.data == nullptr) return view;
    const TensorView host = view;
    view.data = copies_.emplace_back(view.data, spanned_bytes(view)).data();
    outputs_.push_back({host, &copies_.back()});
    return view;
  }
  RowState<float>* states(RowState<float>* host, Index count) {
    if (host == nullptr) return host;
    return static_cast<RowState<float>*>(out(thd(reinterpret_cast<double*>(host), DType::f64, count, 1, 1)).data);
  }
  Place place() const { return {DeviceKind::cuda, 0, stream_.get()}; }

  void finish() {
    WEFT_CUDA(cudaStreamSynchronize(stream_.get()));
    for (const Output& o : outputs_) {
      const std::vector<char> now = o.device->read();
      char* host = static_cast<char*>(o.host.data);
      const Index size = size_of(o.host.dtype);
      std::vector<char> between = o.device->before();
      for (Index row = 0; row < o.host.rows; ++row)
        for (Index head = 0; head < o.host.heads; ++head) {
          const std::size_t at = static_cast<std::size_t>(o.host.offset(row, head) * size);
          const std::size_t bytes = static_cast<std::size_t>(o.host.dim * size);
          std::memcpy(host + at, now.data() + at, bytes);
          std::memcpy(between.data() + at, now.data() + at, bytes);
        }
      EXPECT_TRUE(between == now) << "something was written between the elements";
    }
    outputs_.clear();
    copies_.clear();
  }

 private:
  struct Output {
    TensorView host;
    const DeviceBytes* device;
  };
  CudaStream stream_;
  std::list<DeviceBytes> copies_;
  std::vector<Output> outputs_;
};

inline KernelForwardArgs on_gpu(OnGpu& gpu, KernelForwardArgs args) {
  args.q = gpu.in(args.q);
  args.k = gpu.in(args.k);
  args.v = gpu.in(args.v);
  args.attention.sink.logits = gpu.in(args.attention.sink.logits);
  args.out = gpu.out(args.out);
  args.lse = gpu.out(args.lse);
  args.max_logit = gpu.out(args.max_logit);
  const Index states = args.partial.sums.rows * args.partial.sums.heads;
  args.partial.sums = gpu.out(args.partial.sums);
  args.partial.states = gpu.states(args.partial.states, states);
  args.place = gpu.place();
  return args;
}

inline KernelBackwardArgs on_gpu(OnGpu& gpu, KernelBackwardArgs args) {
  args.q = gpu.in(args.q);
  args.k = gpu.in(args.k);
  args.v = gpu.in(args.v);
  args.attention.sink.logits = gpu.in(args.attention.sink.logits);
  args.dout = gpu.in(args.dout);
  args.out = gpu.in(args.out);
  args.lse = gpu.in(args.lse);
  args.dq = gpu.out(args.dq);
  args.dk = gpu.out(args.dk);
  args.dv = gpu.out(args.dv);
  args.dsink = gpu.out(args.dsink);
  args.place = gpu.place();
  return args;
}

inline void gpu_attend(OnGpu& gpu, const KernelForwardArgs& args) {
  attend(on_gpu(gpu, args), gpu_kernel);
  gpu.finish();
}
inline void gpu_attend(const KernelForwardArgs& args) {
  OnGpu gpu;
  gpu_attend(gpu, args);
}
inline void gpu_attend_backward(OnGpu& gpu, const KernelBackwardArgs& args) {
  attend_backward(on_gpu(gpu, args), gpu_kernel);
  gpu.finish();
}
inline void gpu_attend_backward(const KernelBackwardArgs& args) {
  OnGpu gpu;
  gpu_attend_backward(gpu, args);
}
inline void gpu_finish_partial(const KernelForwardArgs& args) {
  OnGpu gpu;
  finish_partial(finish_args(on_gpu(gpu, args)));
  gpu.finish();
}

}  // namespace weft::test
