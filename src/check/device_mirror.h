// Host tensors mirrored where a kernel reads them: copies on a GPU, or for CPU kernels the tensors themselves.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "device/device.h"
#include "weft/kernel.h"

namespace weft::check {

// Where a kernel's tensors lie; each thread has a stream of its own. Ranks that are processes take the GPUs in turn.
weft::Place place_of(std::string_view kernel, Index rank = 0);

class DeviceMirror {
 public:
  explicit DeviceMirror(const weft::Place& place);
  ~DeviceMirror();
  DeviceMirror(const DeviceMirror&) = delete;
  DeviceMirror& operator=(const DeviceMirror&) = delete;

  ConstTensorView in(ConstTensorView host);
  TensorView out(TensorView host);  // starts with what the host tensor holds
  Attention in(Attention host);
  PartialView out(const PartialView& host);
  // Before the call: copies the tensors that were added since the last time to the device.
  void send();
  // After the call: copies the outputs back. Error if any other byte was changed, between tensors too.
  void fetch();
  const weft::Place& place() const { return place_; }

 private:
  struct Copy {
    std::size_t offset;  // in its block
    void* host;
    Index bytes;
    bool written;
  };
  // Many tensors, some bytes apart, that are copied together.
  struct Block {
    char* device = nullptr;
    std::size_t room = 0, sent = 0;
    std::vector<char> before = {};  // the bytes that are sent, those between tensors too
    std::vector<Copy> copies = {};
  };
  void* put(const void* host, Index bytes, bool written);
  static void compare(const Block& block, const std::vector<char>& now);

  weft::Place place_;
  std::unique_ptr<device::Memory> memory_;
  std::vector<Block> blocks_;
};

}  // namespace weft::check
