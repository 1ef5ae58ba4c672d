// Ranks that are processes and share one GPU, or have one each: each says that it is a host of its own (NCCL_HOSTID),
// so NCCL takes sockets between them. CUDA is used after the fork only. A failed expectation in a rank becomes its
// failure.
#pragma once

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <execinfo.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/letters.h"
#include "device/device.h"
#include "refusal.h"
#include "weft/processes.h"

namespace weft::test {

// Asks in a process of its own, because one that has used CUDA cannot fork ranks.
inline int gpus() {
  static const int count = [] {
    const pid_t child = ::fork();
    if (child == 0) std::_Exit(std::min(device::count(), 100));
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
  }();
  return count;
}

// Memory of the rank's GPU.
struct OnGpu {
  explicit OnGpu(const Communicator& c)
      : place{.kind = DeviceKind::cuda, .device = static_cast<int>(c.rank() % gpus())},
        memory(device::make_memory(place)) {}

  float* put(const std::vector<float>& values) {
    const Index bytes = static_cast<Index>(values.size() * sizeof(float));
    auto* data = static_cast<float*>(memory->allocate(at(bytes)));
    device::to_device(place, data, values.data(), bytes);
    return data;
  }
  std::vector<float> get(const float* data, Index count) const {
    std::vector<float> values(at(count));
    const device::HostCopy copy{values.data(), data, count * Index{sizeof(float)}};
    device::to_host(place, {&copy, 1});
    return values;
  }

  Place place;
  std::unique_ptr<device::Memory> memory;  // ends with the process
};

inline Block floats(float* data, Index count) {
  return {.data = data, .rows = 1, .bytes = count * Index{sizeof(float)}};
}

// What a rank is at, for the alarm.
inline char at_work[100] = "starts";

// A rank that hangs says where and ends, which the test sees as its failure.
inline void hung(int) {
  const auto write = [](const char* text) {
    if (::write(STDERR_FILENO, text, std::strlen(text)) < 0) std::_Exit(98);
  };
  write("a rank hung: ");
  write(at_work);
  write("\n");
  void* stack[60];
  ::backtrace_symbols_fd(stack, ::backtrace(stack, 60), STDERR_FILENO);
  std::_Exit(99);
}

inline void set_alarm(unsigned seconds) {
  void* once[1];
  ::backtrace(once, 1);  // loads what it needs, which a signal handler must not
  std::signal(SIGALRM, hung);
  ::alarm(seconds);
}

inline int failed_parts() {
  return testing::UnitTest::GetInstance()->current_test_info()->result()->total_part_count();
}

inline void run(Index ranks, const std::function<void(Communicator&, OnGpu&)>& body,
                const ProcessRanks& how = {30, 10}) {
  const int before = failed_parts();  // of the test so far, which ranks inherit
  run_processes(
      ranks,
      [&](Communicator& c) {
        set_alarm(static_cast<unsigned>(how.time_limit) + 30);
        std::snprintf(at_work, sizeof at_work, "rank %d", static_cast<int>(c.rank()));
        ::setenv("NCCL_HOSTID", std::to_string(c.rank()).c_str(), 1);
        OnGpu gpu(c);
        body(c, gpu);
        if (failed_parts() > before) throw std::runtime_error("an expectation failed, see above");
      },
      how);
}

// all_gather and reduce_scatter of NCCL against what they must give, where blocks are contiguous and where they are
// not.
inline void check_collectives(Communicator& c, OnGpu& gpu) {
  const std::unique_ptr<DeviceCommunicator> on = c.on(gpu.place);
  ASSERT_EQ(on->name(), "nccl");
  ASSERT_TRUE(on->has_collectives());
  constexpr Index kCount = 1000;
  const Index ranks = c.ranks();
  c.reset_traffic();
  for (const Index gap : {Index{0}, Index{8}}) {
    float* mine = gpu.put(values(kCount, 1, c.rank()));
    float* all = gpu.put(std::vector<float>(at(ranks * (kCount + gap))));
    std::vector<Block> to;
    for (Index r = 0; r < ranks; ++r) to.push_back(floats(all + r * (kCount + gap), kCount));
    on->all_gather(floats(mine, kCount), to).wait();
    for (Index r = 0; r < ranks; ++r)
      EXPECT_EQ(gpu.get(all + r * (kCount + gap), kCount), values(kCount, 1, r)) << "gap " << gap;
    float* sum = gpu.put(std::vector<float>(kCount));
    on->reduce_scatter(to, floats(sum, kCount)).wait();  // every rank has the same parts
    const std::vector<float> got = gpu.get(sum, kCount), one = values(kCount, 1, c.rank());
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_NEAR(got[i], one[i] * static_cast<float>(ranks), 1e-4F) << "gap " << gap;
  }
  c.check();
  const Index each = kCount * Index{sizeof(float)} * (ranks - 1);
  EXPECT_EQ(c.traffic().bytes_sent, 4 * each);
  EXPECT_EQ(c.traffic().messages_received, 4 * (ranks - 1));
  for (int i = 0; i < 200 && c.flight_record().find("in the stream") != std::string::npos; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  expect_parts(c.flight_record(), {"all_gather", "reduce_scatter", "done after"});
}

class NcclRanks : public testing::TestWithParam<Index> {
  void SetUp() override {
    if (gpus() == 0) GTEST_SKIP() << "no GPU";
  }
};
}  // namespace weft::test
