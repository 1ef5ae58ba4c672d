// What objects that hold memory of a GPU between calls need.
#pragma once

#include "device/device.h"
#include "weft/device.h"

namespace weft::python {

// Memory of an object is used in one stream after another: a call in another stream than the last one waits for that.
class LastStream {
 public:
  explicit LastStream(const Place& place) : last_(place) {}
  void now(const Place& place) {
    const bool same_gpu = place.kind != DeviceKind::cpu && place.kind == last_.kind && place.device == last_.device;
    if (!same_gpu || place.stream == last_.stream) return;
    device::follow(place, last_.stream);
    last_ = place;
  }

 private:
  Place last_;
};

}  // namespace weft::python
