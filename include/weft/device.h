// Where tensors lie, and the order in which work on them is done.
#pragma once

#include <string>

#include "weft/config.h"

namespace weft {

enum class DeviceKind { cpu, cuda };

// All tensors of a call lie in one place. On a GPU the call returns when its work is in the stream.
struct Place {
  DeviceKind kind = DeviceKind::cpu;
  int device = 0;          // of several GPUs
  void* stream = nullptr;  // a cudaStream_t; null: the default stream

  friend bool operator==(const Place&, const Place&) = default;
};
WEFT_API std::string name(const Place& place);  // "the CPU", "GPU 0"

}  // namespace weft
