// The device's entry points in a build without CUDA: they link, and say what is missing.
#ifndef WEFT_WITH_CUDA

#include "weft/device_plan.h"
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

// Nobody has a context, so nothing after it is ever reached.
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

void sequence_to_rank_order(DeviceContext&, const DeviceStream&, const DeviceLayout&, const RowTensor&,
                            const RowTensor&) {
  absent();
}
void rank_to_sequence_order(DeviceContext&, const DeviceStream&, const DeviceLayout&, const RowTensor&,
                            const RowTensor&) {
  absent();
}
void shard(DeviceContext&, const DeviceStream&, const DeviceLayout&, Index, const RowTensor&, const RowTensor&) {
  absent();
}
void unshard(DeviceContext&, const DeviceStream&, const DeviceLayout&, Index, const RowTensor&, const RowTensor&) {
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
void sequences_to_chunks(DeviceContext&, const DeviceStream&, Index, const DeviceChunks&) { absent(); }
void all_gather_step(DeviceContext&, const DeviceStepArgs&, const DeviceStep&) { absent(); }
void ring_step(DeviceContext&, const DeviceStepArgs&, const DeviceStep&) { absent(); }

}  // namespace weft

#endif
