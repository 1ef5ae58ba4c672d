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
  TensorView out(const TensorView& host);  // with what is in it; fetch() brings back what was written
  Attention in(const Attention& host);
  PartialView out(const PartialView& host);
  void fetch();
  const weft::Place& place() const { return place_; }

 private:
  struct Copy {
    void* twin;
    void* host;
    Index bytes;
    bool written;
  };
  void* put(const void* host, Index bytes, bool written);

  weft::Place place_;
  std::unique_ptr<device::Memory> memory_;
  std::vector<Copy> copies_;
};

}  // namespace weft::check
