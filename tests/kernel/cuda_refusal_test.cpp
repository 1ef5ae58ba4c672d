// What GPU kernels refuse, asked of GPUs that are not there.
#include <string>
#include <tuple>
#include <utility>

#include <gtest/gtest.h>

#include "kernel/cuda_kernels.h"

namespace weft::test {
namespace {

constexpr GpuProperties gpu(int major, int minor, Index kib) { return {{}, major, minor, kib * 1024}; }

KernelRequest on_gpu(DType dtype = DType::bf16, Index dim_qk = 128, Index dim_v = 128, Pass pass = Pass::forward) {
  return {.pass = pass, .dtype = dtype, .dim_qk = dim_qk, .dim_v = dim_v, .device = DeviceKind::cuda};
}

void expect_refused(const GpuProperties& on, const KernelRequest& request, const std::string& part,
                    decltype(&portable_refusal) by = portable_refusal) {
  const auto reason = by(on, request);
  ASSERT_TRUE(reason.has_value()) << part;
  EXPECT_NE(reason->find(part), std::string::npos) << *reason;
}

TEST(CudaRefusal, TensorsOfTheCpu) {
  KernelRequest request = on_gpu();
  request.device = DeviceKind::cpu;
  expect_refused(gpu(9, 0, 227), request, "must lie on a GPU");
}

TEST(CudaRefusal, NoGpuOrAnOldOne) {
  expect_refused({.missing = "no CUDA-capable device is detected"}, on_gpu(), "no CUDA-capable device");
  expect_refused(gpu(7, 5, 64), on_gpu(), "7.5");
}

// Whatever the numbers behind the point: machine code for 8.0, 8.6, 8.9 and 9.0, and PTX that newer ones compile.
TEST(CudaRefusal, TakesEveryGpuFromComputeCapability8On) {
  for (const auto& [major, minor] : {std::pair{3, 5}, {6, 1}, {7, 0}, {7, 5}}) {
    for (const Pass pass : {Pass::forward, Pass::backward})
      expect_refused(gpu(major, minor, 227), on_gpu(DType::bf16, 64, 64, pass), "compute capability 8.0");
    expect_refused(gpu(major, minor, 227), on_gpu(), std::to_string(major) + "." + std::to_string(minor));
  }
  for (const auto& [major, minor, kib] : {std::tuple{8, 0, 163},
                                          {8, 6, 99},
                                          {8, 7, 163},
                                          {8, 9, 99},
                                          {9, 0, 227},
                                          {10, 0, 227},
                                          {10, 3, 227},
                                          {11, 0, 227},
                                          {12, 0, 99},
                                          {12, 1, 99}}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16})
      for (const Pass pass : {Pass::forward, Pass::backward})
        if (dtype != DType::f32 || pass == Pass::forward || kib > 99) {  // the f32 backward has no tiles that small
          EXPECT_EQ(portable_refusal(gpu(major, minor, kib), on_gpu(dtype, 64, 64, pass)), std::nullopt)
              << major << "." << minor << " " << name(dtype);
        }
  }
}

// What a block needs decides, not the number of the GPU.
TEST(CudaRefusal, SharedMemoryAtItsEdge) {
  const KernelRequest request = on_gpu(DType::f32, 256, 256, Pass::backward);
  const auto reason = portable_refusal(gpu(9, 0, 1), request);
  ASSERT_TRUE(reason.has_value());
  const std::string words = "need ";
  const Index needed = std::stoll(reason->substr(reason->find(words) + words.size()));
  EXPECT_EQ(portable_refusal({{}, 8, 0, needed}, request), std::nullopt);
  expect_refused({{}, 9, 0, needed - 1}, request, std::to_string(needed));
}

TEST(CudaRefusal, DTypesAndWidths) {
  expect_refused(gpu(9, 0, 227), on_gpu(DType::f64), "f64");
  expect_refused(gpu(9, 0, 227), on_gpu(DType::bf16, 577, 16), "577");
  expect_refused(gpu(9, 0, 227), on_gpu(DType::f32, 16, 513, Pass::backward), "513");
}

// On data-center GPUs everything up to 256; with the shared memory of others the widest are refused, and say so.
TEST(CudaRefusal, SharedMemory) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      for (const Index dim : {1, 64, 128, 192, 256}) {
        EXPECT_EQ(portable_refusal(gpu(9, 0, 227), on_gpu(dtype, dim, dim, pass)), std::nullopt) << dim;
        EXPECT_EQ(portable_refusal(gpu(8, 0, 163), on_gpu(dtype, dim, dim, pass)), std::nullopt) << dim;
        const auto reason = portable_refusal(gpu(8, 6, 99), on_gpu(dtype, dim, dim, pass));
        if (reason) {
          EXPECT_NE(reason->find("shared memory"), std::string::npos) << *reason;
        }
        if (pass == Pass::forward || (dtype != DType::f32 && dim <= 128)) {
          EXPECT_EQ(reason, std::nullopt) << dim;
        }
      }
    }
  }
}

// Above 256: on the GPUs of data centers, f32's backward with 227 KiB alone.
TEST(CudaRefusal, WidthsAbove256) {
  for (const auto& [dim_qk, dim_v] : {std::pair<Index, Index>{257, 8}, {8, 257}, {576, 512}}) {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        const KernelRequest request = on_gpu(dtype, dim_qk, dim_v, pass);
        EXPECT_EQ(portable_refusal(gpu(9, 0, 227), request), std::nullopt);
        if (dtype == DType::f32 && pass == Pass::backward)
          expect_refused(gpu(8, 0, 163), request, "shared memory");
        else
          EXPECT_EQ(portable_refusal(gpu(8, 0, 163), request), std::nullopt);
        expect_refused(gpu(8, 6, 99), request, "shared memory");
      }
    }
    EXPECT_EQ(sm90_refusal(gpu(9, 0, 227), on_gpu(DType::bf16, dim_qk, dim_v)), std::nullopt);
    expect_refused(gpu(9, 0, 227), on_gpu(DType::bf16, dim_qk, dim_v, Pass::backward), "cuda.portable", sm90_refusal);
  }
}

TEST(CudaRefusal, Sm90IsForHopperAlone) {
  const auto refused = [](const GpuProperties& on, const KernelRequest& request, const std::string& part) {
    expect_refused(on, request, part, sm90_refusal);
  };
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const Index dim : {8, 64, 128, 192, 256})
      EXPECT_EQ(sm90_refusal(gpu(9, 0, 227), on_gpu(dtype, dim, dim)), std::nullopt) << dim;
  for (const auto& [major, minor] : {std::pair{8, 0}, {8, 9}, {10, 0}, {12, 0}})
    refused(gpu(major, minor, 227), on_gpu(), "compute capability 9.0");
  refused(gpu(9, 0, 227), on_gpu(DType::f32), "f32");
  refused(gpu(9, 0, 227), on_gpu(DType::f64), "f64");
  refused(gpu(9, 0, 227), on_gpu(DType::bf16, 584, 128), "584");
  refused({.missing = "no CUDA-capable device is detected"}, on_gpu(), "no CUDA-capable device");
  KernelRequest on_cpu = on_gpu();
  on_cpu.device = DeviceKind::cpu;
  refused(gpu(9, 0, 227), on_cpu, "must lie on a GPU");
}

}  // namespace
}  // namespace weft::test
