// Where the calls of an executor or a K/V buffer run: communicator, memory and stream, on the CPU or on a GPU.
#pragma once

#include <atomic>
#include <memory>
#include <memory_resource>
#include <string_view>

#include "device/device.h"
#include "text.h"
#include "weft/communicator.h"

namespace weft::run {

class ExecutionContext {
 public:
  // Collective if the place is a GPU. `memory`: the caller's, or null for the default of the place.
  ExecutionContext(Communicator& ranks, const Place& place, std::pmr::memory_resource* memory);

  Communicator& communicator() const { return on_device_ != nullptr ? *on_device_ : ranks_; }
  std::pmr::memory_resource* memory() const { return own_memory_ != nullptr ? own_memory_.get() : memory_; }
  // Communicator and memory use the stream of `place` from now on. Error, which names `what`, if it is another device,
  // and in the capture of a graph unless plans are made on the device and messages go in the order of the stream.
  void use(const Place& place, std::string_view what, bool device_plans = false) const;

 private:
  Communicator& ranks_;
  Place place_;
  std::pmr::memory_resource* memory_;
  std::unique_ptr<device::Memory> own_memory_;
  std::unique_ptr<DeviceCommunicator> on_device_;
};

// An object that keeps workspaces belongs to one thread at a time: a call that comes while another is inside is
// refused.
class InUse {
 public:
  // The object is in use while this lives. `what` names it in the Error, for example "executor".
  class Call {
   public:
    Call(InUse& object, std::string_view what) : object_(object) {
      if (object.busy_.exchange(true, std::memory_order_acquire))
        throw Error(
            text("a call of this ", what, " began while another one, of another thread or its observer, is in it"),
            text("give each thread a communicator and ", what, " of its own, or let calls wait for each other"));
    }
    ~Call() { object_.busy_.store(false, std::memory_order_release); }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    InUse& object_;
  };

 private:
  std::atomic<bool> busy_ = false;
};

}  // namespace weft::run
