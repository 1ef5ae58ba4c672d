// The K/V buffer with its tensors on a GPU: every document as if it were alone, on ranks that share the GPU.
#include "weft/kv_buffer.h"

#include <cstdlib>

#include "device/device.h"
#include "prepare/kv_alone.h"
#include "refusal.h"
#include "weft/error.h"

namespace weft::test {
namespace {

constexpr const char* kKernel = "cuda.portable";

class DeviceKvBuffer : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (device::count() == 0) GTEST_SKIP() << "no GPU";
  }
};
INSTANTIATE_TEST_SUITE_P(DTypes, DeviceKvBuffer, testing::Values(DType::f32, DType::bf16, DType::f16),
                         [](const auto& at) { return std::string(name(at.param)); });

TEST_P(DeviceKvBuffer, EqualsEachDocumentAlone) {
  constexpr Index kCounts[] = {1, 2, 4};  // of micro-sequences, of ranks
  constexpr unsigned kSettings = 54;
  const char* asked = std::getenv("WEFT_GPU_PROBLEMS");
  const unsigned settings = asked != nullptr ? static_cast<unsigned>(std::atoi(asked)) : kSettings;
  for (unsigned i = 0; i < settings; ++i) {
    const unsigned n = i * 23 % kSettings;  // so that a few are already of all kinds
    std::mt19937_64 engine(i);
    const Index micros = kCounts[n / 18], ranks = kCounts[n / 6 % 3];
    const Mask mask = masks()[n / 2 % 3];
    Setting r = random_setting(engine, micros, ranks, mask, n % 2 == 1);
    r.dtype = GetParam();
    expect_alone(r, r.dtype == DType::f32 ? 1e-5 : 2e-2, kKernel);
    if (HasFailure()) return;
  }
}

TEST_P(DeviceKvBuffer, RefusesTensorsOfTheOtherPlace) {
  run_ranks(1, [](Communicator& comm) {
    Setting r{.lengths = {8}};
    r.dtype = GetParam();
    KvBufferOptions options = options_of(r, micros_of(r));
    options.place = check::place_of(kKernel);
    KvBuffer buffer(comm, options);
    buffer.begin(micros_of(r), r.mask);
    Tensors t(r);
    expect_refusal([&] { buffer.forward(0, forward_args(r, t, {0, 8})); }, {"the CPU", "GPU 0"});
  });
}

}  // namespace
}  // namespace weft::test
