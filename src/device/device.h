// What the executor and the checks need of a GPU apart from kernels and communicators. In a build without CUDA the
// calls throw. They return when their work is in the place's stream, unless stated otherwise.
#pragma once

#include <functional>
#include <memory>
#include <memory_resource>
#include <span>
#include <string_view>

#include "weft/attention.h"
#include "weft/communicator.h"
#include "weft/device.h"
#include "weft/state.h"
#include "weft/tensor.h"

namespace weft::device {

// Stream-ordered memory of a GPU, whose stream can be changed: freed memory is not reused before the stream gets there.
class Memory : public std::pmr::memory_resource {
 public:
  virtual void use(void* stream) = 0;
};
std::unique_ptr<Memory> make_memory(const Place& place);

void clear(const Place& place, const TensorView& view);                           // sets zeros
void add(const Place& place, const TensorView& to, const ConstTensorView& from);  // f32 += f32, same shape
void fill(const Place& place, RowState<float>* states, Index count);              // empty states
// Partial results of the same rows and heads, f32 [t, h, dim] with their states [t, h], into those of `sums`.
void merge(const Place& place, const TensorView& sums, RowState<float>* states, const ConstTensorView& from,
           const RowState<float>* from_states);
void fill(const Place& place, double* numbers, Index count, double value);

// -sum over rows of exp(sink - lse)·(out·dout), one number per head. Rows that see no key have out = 0, and their dout
// is not read.
void sink_gradient(const Place& place, const Sink& sink, const ConstTensorView& lse, const ConstTensorView& out,
                   const ConstTensorView& dout, double* gradient);
// Reduces numbers [ranks, heads] over ranks, in rank order, and rounds into `to` [heads].
void reduce(const Place& place, const double* numbers, Index ranks, Reduce how, const TensorView& to);

// Copies between two lists of blocks that hold the same number of bytes.
void copy(const Place& place, std::span<const Block> from, std::span<const Block> to);
// Makes the place's stream wait for the work in another stream.
void follow(const Place& place, void* stream);
// Memory that belongs to no stream: freeing it synchronizes the GPU.
void* take(const Place& place, Index bytes);
void give_back(void* data) noexcept;

// For checks and tools. `from` is pageable memory, and is read before the call returns.
void to_device(const Place& place, void* to, const void* from, Index bytes);
// Synchronizes the stream once.
struct HostCopy {
  void* to = nullptr;
  const void* from = nullptr;
  Index bytes = 0;
};
void to_host(const Place& place, std::span<const HostCopy> copies);
// Error while a graph is captured from the stream: `what` plans on the host, and graph memory would end with it.
void refuse_capture(const Place& place, std::string_view what);
bool is_captured(const Place& place);  // whether a graph is captured from the stream
void synchronize(const Place& place);
// GPU seconds between events around the work that `work` puts into the place's stream; synchronizes.
double seconds_of(const Place& place, const std::function<void()>& work);
// Captures as a graph what `work` puts into the place's stream; each call of the result launches the graph once.
std::function<void()> captured(const Place& place, const std::function<void()>& work);
void* thread_stream();  // each thread's own stream
// The number of GPUs that the library can use.
int count();

}  // namespace weft::device
