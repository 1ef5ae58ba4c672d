#include <atomic>

#include "cuda/runtime.h"
#include "plan/cuda/context.h"
#include "text.h"

namespace weft {
namespace detail {
namespace {

void* page_memory() {
  void* memory = nullptr;
  WEFT_CUDA(cudaHostAlloc(&memory, sizeof(FaultPage), cudaHostAllocMapped | cudaHostAllocPortable));
  return memory;
}

const Place& on_gpu(const Place& place) {
  if (place.kind != DeviceKind::cuda)
    throw Error("a device context was asked for on the CPU", "give a Place with kind = DeviceKind::cuda");
  WEFT_CUDA(cudaSetDevice(place.device));
  return place;
}

// Never run: its attributes tell for which architecture all kernels were compiled, which may be older than the GPU.
__global__ void compiled() {}

bool compiled_for_bulk_copy() {
  cudaFuncAttributes attributes = {};
  WEFT_CUDA(cudaFuncGetAttributes(&attributes, compiled));
  return attributes.ptxVersion >= 90;
}

}  // namespace

ContextData::ContextData(const Place& where)
    : place(on_gpu(where)), state(1, stream()), has_bulk_copy(compiled_for_bulk_copy()) {
  WEFT_CUDA(cudaMemsetAsync(state.get(), 0, sizeof(ScanState), stream()));
  page.reset(new (page_memory()) FaultPage{});
  WEFT_CUDA(cudaHostGetDevicePointer(reinterpret_cast<void**>(&device_page), page.get(), 0));
}

void ContextData::enter() {
  if (faults_wait)
    WEFT_CUDA(cudaSetDevice(place.device));
  else
    check();
}

void ContextData::check() {
  WEFT_CUDA(cudaSetDevice(place.device));
  const std::atomic_ref<int> code(page->fault.code);
  if (code.load(std::memory_order_acquire) == OffsetFault::none) return;
  const OffsetFault fault = page->fault;
  // In a capture nothing is cleared: the fault stays, and the next call outside throws it too.
  if (!cuda::is_captured(stream())) {
    // In this order: if the memset fails, the fault stays, since no other would be written.
    WEFT_CUDA(cudaMemsetAsync(&state.get()->claimed, 0, sizeof(unsigned), stream()));
    page->fault = OffsetFault{};
  }
  throw error_of(fault);
}

}  // namespace detail

DeviceContext::DeviceContext(const Place& place) : data_(std::make_unique<detail::ContextData>(place)) {}
DeviceContext::~DeviceContext() = default;
DeviceContext::DeviceContext(DeviceContext&&) noexcept = default;
DeviceContext& DeviceContext::operator=(DeviceContext&&) noexcept = default;

const Place& DeviceContext::place() const { return data_->place; }
void DeviceContext::check() { data_->check(); }

}  // namespace weft
