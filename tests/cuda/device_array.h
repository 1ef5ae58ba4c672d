// Memory of a device, and random problems with their offsets in it.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "check/cases/random_case.h"
#include "index.h"
#include "weft/device_plan.h"

namespace weft {

inline void expect_ok(cudaError_t result) { ASSERT_EQ(result, cudaSuccess) << cudaGetErrorString(result); }

template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(std::size_t n) : size_(n) { expect_ok(cudaMalloc(&data_, (n == 0 ? 1 : n) * sizeof(T))); }
  explicit DeviceArray(std::span<const T> from) : DeviceArray(from.size()) { set(from); }
  explicit DeviceArray(const std::vector<T>& from) : DeviceArray(std::span<const T>(from)) {}
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  T* get() const { return data_; }
  std::size_t size() const { return size_; }
  void set(std::span<const T> from) {
    expect_ok(cudaMemcpy(data_, from.data(), from.size_bytes(), cudaMemcpyHostToDevice));
    expect_ok(cudaDeviceSynchronize());  // other streams do not wait for the default one
  }
  std::vector<T> host() const {
    std::vector<T> out(size_);
    expect_ok(cudaMemcpy(out.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

// Offsets in 32 or 64 bits.
inline std::vector<std::uint8_t> offset_bytes(const std::vector<Index>& offsets, bool wide) {
  std::vector<std::uint8_t> out;
  for (const Index v : offsets) {
    const auto narrow = static_cast<std::int32_t>(v);
    const auto* from =
        wide ? reinterpret_cast<const std::uint8_t*>(&v) : reinterpret_cast<const std::uint8_t*>(&narrow);
    out.insert(out.end(), from, from + (wide ? 8 : 4));
  }
  return out;
}

// One side's offsets in device memory, in 32 or 64 bits, with `spare` empty sequences behind.
class DeviceOffsets {
 public:
  DeviceOffsets(std::vector<Index> cu, std::vector<Index> padded, Index tokens, bool wide, Index spare = 0)
      : sequences_(static_cast<Index>(cu.size()) - 1 + spare),
        tokens_(tokens),
        wide_(wide),
        padded_(!padded.empty()),
        cu_(bytes(std::move(cu), wide, spare)),
        cu_padded_(bytes(std::move(padded), wide, padded_ ? spare : 0)) {}
  DeviceOffsets(const check::Side& side, const Stream& stream, bool wide, Index spare = 0)
      : DeviceOffsets(side.cu_seqlens, side.cu_seqlens_padded, stream.tokens(), wide, spare) {}

  DeviceStream stream() const {
    return {cu_.get(), padded_ ? cu_padded_.get() : nullptr, wide_ ? OffsetType::i64 : OffsetType::i32, sequences_,
            tokens_};
  }

 private:
  static std::vector<std::uint8_t> bytes(std::vector<Index> values, bool wide, Index spare) {
    if (!values.empty()) values.insert(values.end(), at(spare), values.back());
    return offset_bytes(values, wide);
  }

  Index sequences_, tokens_;
  bool wide_, padded_;
  DeviceArray<std::uint8_t> cu_, cu_padded_;
};

// So that a slow checker can be given fewer.
inline unsigned long long random_problems(unsigned long long usual) {
  const char* wanted = std::getenv("WEFT_DEVICE_PROBLEMS");
  return wanted == nullptr ? usual : std::strtoull(wanted, nullptr, 10);
}

inline Place gpu(cudaStream_t stream = nullptr) { return {DeviceKind::cuda, 0, stream}; }

// A stream of its own, since the default one cannot be captured.
struct TestStream {
  cudaStream_t stream = nullptr;
  TestStream() { expect_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
  ~TestStream() { cudaStreamDestroy(stream); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  void wait() const { expect_ok(cudaStreamSynchronize(stream)); }
};

// What `work` puts into the stream, as a graph. In this mode a call that waits for the device, or could, fails.
template <class F>
cudaGraph_t captured(cudaStream_t stream, F&& work) {
  cudaGraph_t graph = nullptr;
  expect_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  work();
  expect_ok(cudaStreamEndCapture(stream, &graph));
  return graph;
}
template <class F>
cudaGraphExec_t capture(cudaStream_t stream, F&& work) {
  cudaGraphExec_t exec = nullptr;
  cudaGraph_t graph = captured(stream, work);
  expect_ok(cudaGraphInstantiate(&exec, graph, 0));
  cudaGraphDestroy(graph);
  return exec;
}

}  // namespace weft
