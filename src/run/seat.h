// Where an object's calls run: its communicator and its memory, on the CPU or on a GPU.
#pragma once

#include <memory>
#include <memory_resource>
#include <string_view>

#include "device/device.h"
#include "weft/communicator.h"

namespace weft::run {

class Seat {
 public:
  // Collective if the place is a GPU. `memory`: the caller's, or null.
  Seat(Communicator& ranks, const Place& place, std::pmr::memory_resource* memory);

  Communicator& communicator() const { return on_device_ != nullptr ? *on_device_ : ranks_; }
  std::pmr::memory_resource* memory() const { return own_memory_ != nullptr ? own_memory_.get() : memory_; }
  // The call's stream becomes that of everything. Error, in the name of `what`, if its tensors lie elsewhere.
  void use(const Place& place, std::string_view what) const;

 private:
  Communicator& ranks_;
  Place place_;
  std::pmr::memory_resource* memory_;
  std::unique_ptr<device::Memory> own_memory_;
  std::unique_ptr<DeviceCommunicator> on_device_;
};

}  // namespace weft::run
