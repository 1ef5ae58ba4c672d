// Tensors on the host and their twins where a kernel wants them: on a GPU, or, for kernels of CPUs, the tensors
// themselves.
#pragma once

#include <string_view>
#include <vector>

#include "device/device.h"
#include "weft/attention.h"

namespace weft::check {

// Where a kernel's tensors lie; each thread has a stream of its own.
weft::Place place_of(std::string_view kernel);

class Twins {
 public:
  explicit Twins(const weft::Place& place);
  ~Twins();
  Twins(const Twins&) = delete;
  Twins& operator=(const Twins&) = delete;

  ConstTensorView in(const ConstTensorView& host);
  TensorView out(const TensorView& host);  // with what is in it
  Attention in(const Attention& host);
  PartialView out(const PartialView& host);
  // Before the call: all twins since the last time get what their tensors hold.
  void send();
  // After it: brings back what was written. Error if anything but outputs was.
  void fetch();
  const weft::Place& place() const { return place_; }

 private:
  struct Copy {
    std::size_t at;  // in its block
    void* host;
    Index bytes;
    bool written;
  };
  // Many tensors, some bytes apart, that go there and back in one copy.
  struct Block {
    char* twin = nullptr;
    std::size_t room = 0, sent = 0;
    std::vector<char> before = {};  // what was put; the bytes between tensors too
    std::vector<Copy> copies = {};
  };
  void* put(const void* host, Index bytes, bool written);
  static void compare(const Block& block, const std::vector<char>& now);

  weft::Place place_;
  std::unique_ptr<device::Memory> memory_;
  std::vector<Block> blocks_;
};

}  // namespace weft::check
