// Where the calls of an executor or a K/V buffer run: communicator, memory and stream, on the CPU or on a GPU.
#pragma once

#include <memory>
#include <memory_resource>
#include <string_view>

#include "device/device.h"
#include "weft/communicator.h"

namespace weft::run {

class ExecutionContext {
 public:
  // Collective if the place is a GPU. `memory`: the caller's, or null for the default of the place.
  ExecutionContext(Communicator& ranks, const Place& place, std::pmr::memory_resource* memory);

  Communicator& communicator() const { return on_device_ != nullptr ? *on_device_ : ranks_; }
  std::pmr::memory_resource* memory() const { return own_memory_ != nullptr ? own_memory_.get() : memory_; }
  // Communicator and memory use the stream of `place` from now on. Error, which names `what`, if it is another device.
  void use(const Place& place, std::string_view what) const;

 private:
  Communicator& ranks_;
  Place place_;
  std::pmr::memory_resource* memory_;
  std::unique_ptr<device::Memory> own_memory_;
  std::unique_ptr<DeviceCommunicator> on_device_;
};

}  // namespace weft::run
