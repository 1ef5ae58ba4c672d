// What the executor and the checks need of a GPU beside kernels and communicators. Without CUDA calls for a GPU throw.
// Calls return when their work is in the place's stream, unless they say otherwise.
#pragma once

#include <functional>
#include <memory>
#include <memory_resource>
#include <span>
#include <string_view>

#include "weft/attention.h"
#include "weft/communicator.h"
#include "weft/device.h"
#include "weft/tensor.h"

namespace weft::device {

// Memory of a GPU, in the order of a stream that can be changed: what was given back is not used before the stream has
// come to that point.
class Memory : public std::pmr::memory_resource {
 public:
  virtual void use(void* stream) = 0;
};
std::unique_ptr<Memory> make_memory(const Place& place);

void clear(const Place& place, const TensorView& view);                                // zeros
void add(const Place& place, const TensorView& to, const ConstTensorView& from);       // f32 += f32, same shape
void round_to(const Place& place, const TensorView& to, const ConstTensorView& from);  // from f32, rounded once
void round_to(const Place& place, const TensorView& to_a, const ConstTensorView& from_a, const TensorView& to_b,
              const ConstTensorView& from_b);                         // .. two in one launch
void fill(const Place& place, RowState<float>* states, Index count);  // no keys
void fill(const Place& place, double* numbers, Index count, double value);

// -sum over rows of exp(sink - lse)·(out·dout), a number a head. Rows that see no key have out = 0, and their dout is
// not looked at.
void sink_gradient(const Place& place, const BackwardArgs& args, double* gradient);
// numbers [ranks, heads] to one a head, in the order of ranks, rounded into `to` [heads].
void reduce(const Place& place, const double* numbers, Index ranks, Reduce how, const TensorView& to);

// Bytes of one list of blocks to those of another, which hold as many.
void copy(const Place& place, std::span<const Block> from, std::span<const Block> to);
// The place's stream waits for what is in another one.
void follow(const Place& place, void* stream);
// Memory that belongs to no stream: giving it back waits for all work of the GPU.
void* take(const Place& place, Index bytes);
void give_back(void* data) noexcept;

// For checks and tools. `from` is not pinned memory, and is read before the call returns.
void to_device(const Place& place, void* to, const void* from, Index bytes);
// Waits for the stream, once.
struct HostCopy {
  void* to = nullptr;
  const void* from = nullptr;
  Index bytes = 0;
};
void to_host(const Place& place, std::span<const HostCopy> copies);
// Error while a graph is captured from the stream: `what` plans on the host, and memory of the graph would end with it.
void refuse_capture(const Place& place, std::string_view what);
void synchronize(const Place& place);
// Seconds of the GPU between events around what `work` puts into the place's stream; waits for it.
double seconds_of(const Place& place, const std::function<void()>& work);
// Captures as a graph what `work` puts into the place's stream; each call of the result launches the graph once.
std::function<void()> captured(const Place& place, const std::function<void()>& work);
void* thread_stream();  // a stream that each thread has for itself while it lives
// GPUs of this machine that the library can use.
int count();

}  // namespace weft::device
