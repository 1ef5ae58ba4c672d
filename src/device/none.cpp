// A build without CUDA.
#include "device/device.h"
#include "weft/error.h"

namespace weft::device {
namespace {

[[noreturn]] void refuse() {
  throw Error("tensors on a GPU, and a build of Weft without CUDA", "build it with -DWEFT_CUDA=ON, or use the CPU");
}

}  // namespace

std::unique_ptr<Memory> make_memory(const Place&) { refuse(); }
void clear(const Place&, const TensorView&) { refuse(); }
void add(const Place&, const TensorView&, const ConstTensorView&) { refuse(); }
void round_to(const Place&, const TensorView&, const ConstTensorView&) { refuse(); }
void round_to(const Place&, const TensorView&, const ConstTensorView&, const TensorView&, const ConstTensorView&) {
  refuse();
}
void fill(const Place&, RowState<float>*, Index) { refuse(); }
void fill(const Place&, double*, Index, double) { refuse(); }
void sink_gradient(const Place&, const Sink&, const ConstTensorView&, const ConstTensorView&, const ConstTensorView&,
                   double*) {
  refuse();
}
void reduce(const Place&, const double*, Index, Reduce, const TensorView&) { refuse(); }
void copy(const Place&, std::span<const Block>, std::span<const Block>) { refuse(); }
void follow(const Place&, void*) { refuse(); }
void* take(const Place&, Index) { refuse(); }
void give_back(void*) noexcept {}
void to_device(const Place&, void*, const void*, Index) { refuse(); }
void to_host(const Place&, std::span<const HostCopy>) { refuse(); }
void refuse_capture(const Place&, std::string_view) {}
void synchronize(const Place&) { refuse(); }
double seconds_of(const Place&, const std::function<void()>&) { refuse(); }
std::function<void()> captured(const Place&, const std::function<void()>&) { refuse(); }
void* thread_stream() { refuse(); }
int count() { return 0; }

}  // namespace weft::device
