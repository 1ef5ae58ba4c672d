// NCCL with the one rank that a single GPU allows: what a rank sends to itself, packed, unpacked and added.
#ifdef WEFT_WITH_NCCL
#include "comm/nccl/nccl.h"

#include <vector>

#include <gtest/gtest.h>

#include "device/device.h"

namespace weft {
namespace {

TEST(Nccl, OneRankSendsToItself) {
  if (device::count() == 0) GTEST_SKIP() << "no GPU";
  const Place place{.kind = DeviceKind::cuda, .device = 0, .stream = device::thread_stream()};
  run_ranks(1, [&](Communicator& ranks) {
    const auto on = make_nccl(ranks, place);
    on->use(place.stream);
    const auto memory = device::make_memory(place);
    std::vector<float> values{1, 2, 3, 4, 5, 6, 7, 8}, got(8, 100.0F);
    auto* from = static_cast<float*>(memory->allocate(32));
    auto* to = static_cast<float*>(memory->allocate(32));
    device::to_device(place, from, values.data(), 32);
    device::to_device(place, to, got.data(), 32);
    const Block strided{.data = from, .rows = 2, .parts = 1, .bytes = 8, .row_stride = 16};  // 1 2 5 6
    const Block whole{.data = to, .rows = 1, .bytes = 16}, rest{.data = to + 4, .rows = 1, .bytes = 16};
    on->exchange({{0, {strided}}}, {{0, {whole}}}).wait();
    on->exchange({{0, {strided}}}, {{.peer = 0, .blocks = {rest}, .combine = Message::Combine::add}}).wait();
    const device::HostCopy copy{got.data(), to, 32};
    device::to_host(place, {&copy, 1});
    EXPECT_EQ(got, (std::vector<float>{1, 2, 5, 6, 101, 102, 105, 106}));
    memory->deallocate(from, 32);
    memory->deallocate(to, 32);
  });
}

}  // namespace
}  // namespace weft
#endif
