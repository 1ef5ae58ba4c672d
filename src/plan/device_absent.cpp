// Plans on a device in a build without CUDA: they link, and say what is missing.
#ifndef WEFT_WITH_CUDA

#include "weft/device_plan.h"
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

}  // namespace weft

#endif
