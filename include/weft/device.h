// Where tensors are, and the stream that orders work on them.
#pragma once

#include <string>

#include "weft/config.h"

namespace weft {

// The kind of a device.
enum class DeviceKind { cpu, cuda };

// The place of all tensors of a call. On a GPU the call returns when its work is in the stream.
struct Place {
  DeviceKind kind = DeviceKind::cpu;
  int device = 0;          // index of the GPU
  void* stream = nullptr;  // a cudaStream_t; null: the default stream

  friend bool operator==(const Place&, const Place&) = default;
};
// The place in words of error messages.
WEFT_API std::string name(const Place& place);  // "the CPU", "GPU 0"

}  // namespace weft
