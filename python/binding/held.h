// Order between the streams in which one object is called.
#pragma once

#include "device/device.h"
#include "weft/device.h"

namespace weft::python {

// An object keeps GPU memory between calls: a call in another stream than the last one first waits for that stream.
class LastStream {
 public:
  explicit LastStream(const Place& place) : last_(place) {}
  void use(const Place& place) {
    const bool same_gpu = place.kind != DeviceKind::cpu && place.kind == last_.kind && place.device == last_.device;
    // A call that is captured uses none of that memory, and must not wait for work outside of the graph.
    if (!same_gpu || place.stream == last_.stream || device::is_captured(place)) return;
    device::follow(place, last_.stream);
    last_ = place;
  }

 private:
  Place last_;
};

}  // namespace weft::python
