// A build without CUDA: what needs a GPU links, and says what is missing.
#ifndef WEFT_WITH_CUDA

#include "device/device.h"
#include "plan/shared_context.h"
#include "rows/round.h"
#include "weft/device_rows.h"
#include "weft/error.h"

namespace weft {
namespace detail {
struct ContextData {};
struct DevicePlanData {};
}  // namespace detail

namespace {
[[noreturn]] void absent() { throw Error("this libweft was built without CUDA", "configure it with -DWEFT_CUDA=ON"); }
}  // namespace

// There is never a context, so nothing that takes one is reached.
DeviceContext::DeviceContext(const Place&) { absent(); }
DeviceContext::~DeviceContext() = default;
DeviceContext::DeviceContext(DeviceContext&&) noexcept = default;
DeviceContext& DeviceContext::operator=(DeviceContext&&) noexcept = default;
const Place& DeviceContext::place() const { absent(); }
void DeviceContext::check() { absent(); }

DevicePlan::DevicePlan(DeviceContext&, Index) { absent(); }
DevicePlan::~DevicePlan() = default;
DevicePlan::DevicePlan(DevicePlan&&) noexcept = default;
DevicePlan& DevicePlan::operator=(DevicePlan&&) noexcept = default;
void DevicePlan::plan(const DevicePlanArgs&) { absent(); }
void DevicePlan::upload(const Plan&) { absent(); }
const Place& DevicePlan::place() const { absent(); }
DeviceSlices DevicePlan::slices() const { absent(); }
std::vector<Slice> DevicePlan::download() const { absent(); }
void with_shared_context(const Place&, const std::function<void(DeviceContext&)>&) { absent(); }
void check_shared_contexts(int) {}

void sequence_to_rank_order(DeviceContext&, const DeviceStream&, const DeviceLayout&, const RowTensor&,
                            const RowTensor&, OtherRows) {
  absent();
}
void rank_to_sequence_order(DeviceContext&, const DeviceStream&, const DeviceLayout&, const RowTensor&,
                            const RowTensor&, OtherRows) {
  absent();
}
void shard(DeviceContext&, const DeviceStream&, const DeviceLayout&, Index, const RowTensor&, const RowTensor&) {
  absent();
}
void unshard(DeviceContext&, const DeviceStream&, const DeviceLayout&, Index, const RowTensor&, const RowTensor&,
             OtherRows) {
  absent();
}
void partition_indices(DeviceContext&, const DeviceStream&, const DeviceLayout&, Index, Index, std::int32_t*) {
  absent();
}
void cu_seqlens_on_rank(DeviceContext&, const DeviceStream&, const DeviceLayout&, Index, const DeviceRankOffsets&) {
  absent();
}
void copy_valid_rows(DeviceContext&, const DeviceStream&, const RowTensor&, const RowTensor&, OtherRows) { absent(); }
void copy_valid_rows(DeviceContext&, const DeviceStream&, const DeviceLayout&, Index, const RowTensor&,
                     const RowTensor&, OtherRows) {
  absent();
}
void valid_rows(DeviceContext&, const DeviceStream&, std::uint8_t*) { absent(); }
void valid_rows(DeviceContext&, const DeviceStream&, const DeviceLayout&, Index, Index, std::uint8_t*) { absent(); }
void copy_row_ranges(DeviceContext&, const DeviceRanges&, const RowTensor&, const RowTensor&) { absent(); }
void add_row_ranges(DeviceContext&, const DeviceRanges&, const RowTensor&, const RowTensor&) { absent(); }
void round_rows(DeviceContext&, const ConstTensorView&, const TensorView&, bool) { absent(); }
void round_on_device(const Place&, const Rounding&, const Rounding*) { absent(); }
void sequences_to_chunks(DeviceContext&, const DeviceStream&, Index, const DeviceChunks&) { absent(); }
void all_gather_step(DeviceContext&, const DeviceStepArgs&, const DeviceStep&) { absent(); }
void ring_step(DeviceContext&, const DeviceStepArgs&, const DeviceStep&) { absent(); }

namespace device {
namespace {

[[noreturn]] void refuse() {
  throw Error("tensors on a GPU, and a build of Weft without CUDA", "build it with -DWEFT_CUDA=ON, or use the CPU");
}

}  // namespace

std::unique_ptr<Memory> make_memory(const Place&) { refuse(); }
void clear(const Place&, const TensorView&) { refuse(); }
void add(const Place&, const TensorView&, const ConstTensorView&) { refuse(); }
void merge(const Place&, const TensorView&, RowState<float>*, const ConstTensorView&, const RowState<float>*) {
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
bool is_captured(const Place&) { return false; }
void synchronize(const Place&) { refuse(); }
double seconds_of(const Place&, const std::function<void()>&) { refuse(); }
std::function<void()> captured(const Place&, const std::function<void()>&) { refuse(); }
void* thread_stream() { refuse(); }
int count() { return 0; }

}  // namespace device
}  // namespace weft

#endif
