// The CUDA runtime with errors checked: calls, the current device, captures, work that fails halfway.
#pragma once

#include <new>
#include <utility>

#include <cuda_runtime_api.h>

namespace weft::cuda {

// Error with the call's name and CUDA's own message.
void check(cudaError_t result, const char* call);

// The error quotes the call as it is written.
#define WEFT_CUDA(call) ::weft::cuda::check((call), #call)

// For destructors and queries: a sticky error shows up in the next call; any other must not stay CUDA's last error,
// which the caller may query after a call of its own.
inline void clear_last_error(cudaError_t result) noexcept {
  if (result != cudaSuccess) cudaGetLastError();
}

// If `work`, which puts work into a stream, throws, synchronizes the stream first, so that nothing in flight touches
// memory that is freed on the way out.
template <class Work>
void synchronize_on_failure(cudaStream_t stream, Work&& work) {
  try {
    std::forward<Work>(work)();
  } catch (...) {
    clear_last_error(cudaStreamSynchronize(stream));
    throw;
  }
}

// Is a graph being captured from the stream?
inline bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  WEFT_CUDA(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

// Sets the current device of this thread, and restores it in the destructor.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    WEFT_CUDA(cudaGetDevice(&before_));
    if (device != before_) WEFT_CUDA(cudaSetDevice(device));
    changed_ = device != before_;
  }
  // For destructors: if the current device cannot be queried, it is taken to be the right one.
  DeviceGuard(int device, std::nothrow_t) noexcept : before_(device) {
    clear_last_error(cudaGetDevice(&before_));
    if (device == before_) return;
    clear_last_error(cudaSetDevice(device));
    changed_ = true;
  }
  ~DeviceGuard() {
    if (changed_) clear_last_error(cudaSetDevice(before_));
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace weft::cuda
