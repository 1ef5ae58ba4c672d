#include "run/execution_context.h"

#include "text.h"
#include "weft/error.h"

namespace weft {

std::string name(const Place& place) { return place.kind == DeviceKind::cpu ? "the CPU" : text("GPU ", place.device); }

namespace run {

ExecutionContext::ExecutionContext(Communicator& ranks, const Place& place, std::pmr::memory_resource* memory)
    : ranks_(ranks), place_(place), memory_(memory) {
  if (place.kind == DeviceKind::cpu) return;
  if (memory == nullptr) own_memory_ = device::make_memory(place);
  on_device_ = ranks.on(place);
}

void ExecutionContext::use(const Place& place, std::string_view what) const {
  if (place.kind != place_.kind || place.device != place_.device)
    throw Error(text("the tensors lie on ", name(place), ", and the ", what, " was made for ", name(place_)),
                "give its options the place of the tensors");
  device::refuse_capture(place, what);
  if (own_memory_ != nullptr) own_memory_->use(place.stream);
  if (on_device_ != nullptr) on_device_->use(place.stream);
}

}  // namespace run
}  // namespace weft
