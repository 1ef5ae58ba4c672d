// The GPU of a rank that is a process.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "device/device.h"
#include "index.h"
#include "weft/communicator.h"

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

}  // namespace weft::test
