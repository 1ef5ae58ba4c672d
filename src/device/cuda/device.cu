#include <cstring>
#include <new>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "comm/cuda/segments.h"
#include "cuda/handle_pool.h"
#include "cuda/launch.h"
#include "cuda/runtime.h"
#include "device/device.h"
#include "index.h"
#include "text.h"

namespace weft::device {
namespace {

constexpr int kThreads = 256;

cudaStream_t stream_of(const Place& place) { return static_cast<cudaStream_t>(place.stream); }

class CudaMemory final : public Memory {
 public:
  explicit CudaMemory(const Place& place) : device_(place.device), stream_(stream_of(place)) {}
  void use(void* stream) override { stream_ = static_cast<cudaStream_t>(stream); }

 private:
  void* do_allocate(std::size_t bytes, std::size_t) override {
    const cuda::DeviceGuard here(device_);
    return cuda::allocate_async(bytes > 0 ? bytes : 1, stream_);
  }
  void do_deallocate(void* data, std::size_t, std::size_t) override {
    const cuda::DeviceGuard here(device_, std::nothrow);
    cuda::free_async(data, stream_);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  int device_;
  cudaStream_t stream_;
};

template <class T>
__device__ T* element(const TensorView& view, Index row, Index head) {
  return static_cast<T*>(view.data) + view.offset(row, head);
}
template <class T>
__device__ const T* element(const ConstTensorView& view, Index row, Index head) {
  return static_cast<const T*>(view.data) + view.offset(row, head);
}

__device__ void store(const TensorView& view, Index row, Index head, Index i, float value) {
  switch (view.dtype) {
    case DType::f64:
      element<double>(view, row, head)[i] = value;
      break;
    case DType::f32:
      element<float>(view, row, head)[i] = value;
      break;
    case DType::bf16:
      element<__nv_bfloat16>(view, row, head)[i] = __float2bfloat16_rn(value);
      break;
    case DType::f16:
      element<__half>(view, row, head)[i] = __float2half_rn(value);
      break;
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      break;  // check_tensor has refused them
  }
}
__device__ double load(const ConstTensorView& view, Index row, Index head, Index i) {
  switch (view.dtype) {
    case DType::f64:
      return element<double>(view, row, head)[i];
    case DType::f32:
      return element<float>(view, row, head)[i];
    case DType::bf16:
      return __bfloat162float(element<__nv_bfloat16>(view, row, head)[i]);
    case DType::f16:
      return __half2float(element<__half>(view, row, head)[i]);
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      break;  // check_tensor has refused them
  }
  return 0;
}

// Calls what(row, head, i) for every element; neighbouring threads have neighbouring elements.
template <class Do>
__device__ void each_element(Index rows, Index heads, Index dim, Do what) {
  const Index count = rows * heads * dim, step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index at = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; at < count; at += step)
    what(at / (heads * dim), at / dim % heads, at % dim);
}

__global__ void clear_elements(TensorView view) {
  each_element(view.rows, view.heads, view.dim, [&](Index row, Index head, Index i) { store(view, row, head, i, 0); });
}
__global__ void add_elements(TensorView to, ConstTensorView from) {
  each_element(to.rows, to.heads, to.dim, [&](Index row, Index head, Index i) {
    element<float>(to, row, head)[i] += element<float>(from, row, head)[i];
  });
}

// Sums first, states afterwards: all elements of a row and head need the states as they were.
__global__ void merge_sums(TensorView sums, const RowState<float>* states, ConstTensorView from,
                           const RowState<float>* from_states) {
  each_element(sums.rows, sums.heads, sums.dim, [&](Index row, Index head, Index i) {
    const Index n = row * sums.heads + head;
    const RowState<float> a = states[n], b = from_states[n];
    if (is_empty(b)) return;
    float& sum = element<float>(sums, row, head)[i];
    const float more = element<float>(from, row, head)[i];
    sum = is_empty(a) ? more : merge(a, b)(sum, more);
  });
}
__global__ void merge_states(RowState<float>* states, const RowState<float>* from, Index count) {
  each_element(count, 1, 1, [&](Index n, Index, Index) {
    if (!is_empty(from[n])) states[n] = merge(states[n], from[n]).state;
  });
}

template <class T>
__global__ void fill_numbers(T* to, Index count, T value) {
  each_element(count, 1, 1, [&](Index at, Index, Index) { to[at] = value; });
}

cuda::Shape shape_of(Index elements) {
  constexpr Index kMost = 132 * 16;  // some blocks per SM; the loop does the rest
  const Index blocks = min_of((elements + kThreads - 1) / kThreads, kMost);
  return {.blocks = dim3(static_cast<unsigned>(blocks)), .threads = dim3(kThreads)};
}
Index elements_of(const TensorView& view) { return view.rows * view.heads * view.dim; }
cuda::Shape shape_of(const TensorView& view) { return shape_of(elements_of(view)); }

template <class... Parameters, class... Arguments>
void launch(const Place& place, void (*kernel)(Parameters...), const cuda::Shape& shape, Arguments&&... arguments) {
  const cuda::DeviceGuard on(place.device);
  cuda::launch(kernel, shape, stream_of(place), std::forward<Arguments>(arguments)...);
}

// One block per head: each thread sums its rows in order, then a tree, so that the order is fixed.
__global__ void sum_sink_gradient(ConstTensorView sink, bool learnable, ConstTensorView lse, ConstTensorView out,
                                  ConstTensorView dout, double* gradient) {
  __shared__ double sums[kThreads];
  const Index head = blockIdx.x;
  const double logit = learnable ? load(sink, 0, head, 0) : 0;
  double sum = 0;
  for (Index row = threadIdx.x; row < out.rows; row += kThreads) {
    double dot = 0;
    for (Index i = 0; i < out.dim; ++i) {
      const double o = load(out, row, head, i);
      if (o != 0) dot += o * load(dout, row, head, i);
    }
    if (dot != 0) sum -= exp(logit - load(lse, row, head, 0)) * dot;
  }
  sums[threadIdx.x] = sum;
  for (int width = kThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) sums[threadIdx.x] += sums[threadIdx.x + width];
  }
  if (threadIdx.x == 0) gradient[head] = sums[0];
}

__global__ void reduce_ranks(const double* numbers, Index ranks, bool sum, TensorView to) {
  each_element(1, to.heads, 1, [&](Index, Index head, Index) {
    double value = numbers[head];
    for (Index rank = 1; rank < ranks; ++rank) {
      const double next = numbers[rank * to.heads + head];
      if (sum)
        value += next;
      else if (next > value || isnan(next))
        value = next;
    }
    if (to.dtype == DType::f64)
      *element<double>(to, 0, head) = value;
    else
      *element<float>(to, 0, head) = static_cast<float>(value);
  });
}

}  // namespace

std::unique_ptr<Memory> make_memory(const Place& place) { return std::make_unique<CudaMemory>(place); }

void clear(const Place& place, const TensorView& view) { launch(place, clear_elements, shape_of(view), view); }
void add(const Place& place, const TensorView& to, const ConstTensorView& from) {
  launch(place, add_elements, shape_of(to), to, from);
}
void merge(const Place& place, const TensorView& sums, RowState<float>* states, const ConstTensorView& from,
           const RowState<float>* from_states) {
  if (sums.rows == 0) return;
  const Index count = sums.rows * sums.heads;
  launch(place, merge_sums, shape_of(sums), sums, states, from, from_states);
  launch(place, merge_states, shape_of(count), states, from_states, count);
}
void fill(const Place& place, RowState<float>* states, Index count) {
  launch(place, fill_numbers<RowState<float>>, shape_of(count), states, count, RowState<float>{});
}
void fill(const Place& place, double* numbers, Index count, double value) {
  launch(place, fill_numbers<double>, shape_of(count), numbers, count, value);
}

void sink_gradient(const Place& place, const Sink& sink, const ConstTensorView& lse, const ConstTensorView& out,
                   const ConstTensorView& dout, double* gradient) {
  launch(place, sum_sink_gradient,
         {.blocks = dim3(static_cast<unsigned>(sink.logits.heads)), .threads = dim3(kThreads)}, sink.logits,
         sink.kind == Sink::Kind::learnable, lse, out, dout, gradient);
}

void reduce(const Place& place, const double* numbers, Index ranks, Reduce how, const TensorView& to) {
  launch(place, reduce_ranks, shape_of(to.heads), numbers, ranks, how == Reduce::sum, to);
}

void copy(const Place& place, std::span<const Block> from, std::span<const Block> to) {
  const cuda::DeviceGuard on(place.device);
  cuda::copy(cuda::segments(from, to), stream_of(place));
}

void follow(const Place& place, void* stream) {
  const cuda::DeviceGuard on(place.device);
  const cuda::PooledEvent here;
  WEFT_CUDA(cudaEventRecord(here.get(), static_cast<cudaStream_t>(stream)));
  WEFT_CUDA(cudaStreamWaitEvent(stream_of(place), here.get()));
}

void* take(const Place& place, Index bytes) {
  const cuda::DeviceGuard on(place.device);
  void* data = nullptr;
  WEFT_CUDA(cudaMalloc(&data, at(max_of(bytes, 1))));
  return data;
}
void give_back(void* data) noexcept { cuda::clear_last_error(cudaFree(data)); }

void to_device(const Place& place, void* to, const void* from, Index bytes) {
  const cuda::DeviceGuard on(place.device);
  WEFT_CUDA(cudaMemcpyAsync(to, from, at(bytes), cudaMemcpyHostToDevice, stream_of(place)));
}

// Through pinned memory, because only copies to pinned memory are asynchronous.
void to_host(const Place& place, std::span<const HostCopy> copies) {
  const cuda::DeviceGuard on(place.device);
  std::size_t bytes = 1;
  for (const HostCopy& c : copies) bytes += at(c.bytes);
  const cuda::PooledPinned pinned(bytes);
  cuda::synchronize_on_failure(stream_of(place), [&] {
    char* to = pinned.get();
    for (const HostCopy& c : copies) {
      WEFT_CUDA(cudaMemcpyAsync(to, c.from, at(c.bytes), cudaMemcpyDeviceToHost, stream_of(place)));
      to += c.bytes;
    }
    WEFT_CUDA(cudaStreamSynchronize(stream_of(place)));
  });
  const char* from = pinned.get();
  for (const HostCopy& c : copies) {
    std::memcpy(c.to, from, at(c.bytes));
    from += c.bytes;
  }
}
bool is_captured(const Place& place) { return place.kind == DeviceKind::cuda && cuda::is_captured(stream_of(place)); }
void refuse_capture(const Place& place, std::string_view what) {
  if (is_captured(place))
    throw Error(text("the ", what, " is used while a CUDA graph is captured"),
                "call it outside the capture; attend with a device_plan can be captured");
}

void synchronize(const Place& place) {
  const cuda::DeviceGuard on(place.device);
  WEFT_CUDA(cudaStreamSynchronize(stream_of(place)));
}

double seconds_of(const Place& place, const std::function<void()>& work) {
  struct Timed {
    Timed() { WEFT_CUDA(cudaEventCreateWithFlags(&event, cudaEventDefault)); }
    ~Timed() { cudaEventDestroy(event); }
    Timed(const Timed&) = delete;
    Timed& operator=(const Timed&) = delete;
    cudaEvent_t event = nullptr;
  };
  const cuda::DeviceGuard on(place.device);
  const Timed begin, end;
  WEFT_CUDA(cudaEventRecord(begin.event, stream_of(place)));
  work();
  WEFT_CUDA(cudaEventRecord(end.event, stream_of(place)));
  WEFT_CUDA(cudaEventSynchronize(end.event));
  float milliseconds = 0;
  WEFT_CUDA(cudaEventElapsedTime(&milliseconds, begin.event, end.event));
  return 1e-3 * static_cast<double>(milliseconds);
}

std::function<void()> captured(const Place& place, const std::function<void()>& work) {
  const cuda::DeviceGuard on(place.device);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  WEFT_CUDA(cudaStreamSynchronize(stream_of(place)));
  WEFT_CUDA(cudaStreamBeginCapture(stream_of(place), cudaStreamCaptureModeThreadLocal));
  work();
  WEFT_CUDA(cudaStreamEndCapture(stream_of(place), &graph));
  WEFT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  WEFT_CUDA(cudaGraphDestroy(graph));
  const std::shared_ptr<CUgraphExec_st> owned(exec, [](cudaGraphExec_t e) { cudaGraphExecDestroy(e); });
  return [place, owned] {
    const cuda::DeviceGuard there(place.device);
    WEFT_CUDA(cudaGraphLaunch(owned.get(), stream_of(place)));
  };
}

void* thread_stream() {
  thread_local const cuda::PooledStream mine;
  return mine.get();
}

int count() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) {
    cudaGetLastError();  // no GPU is not an error
    return 0;
  }
  return devices;
}

}  // namespace weft::device
