#include "run/head_numbers.h"

#include <algorithm>
#include <vector>

#include "comm/flight.h"
#include "device/device.h"
#include "kernel/convert.h"

namespace weft::run {

HeadNumbers::HeadNumbers(const Place& place, Workspace& workspace, Index heads, Index ranks, double value)
    : place_(place),
      heads_(heads),
      numbers_(static_cast<double*>(workspace.bytes(Slot::numbers, (1 + ranks) * heads * Index{sizeof(double)}))) {
  if (place.kind == DeviceKind::cpu)
    std::uninitialized_fill_n(numbers_, heads, value);
  else
    device::fill(place, numbers_, heads, value);
}

TensorView HeadNumbers::view() const { return per_head(numbers_, DType::f64, heads_); }

void HeadNumbers::reduce_into(Communicator& communicator, Reduce how, const TensorView& to) {
  detail::label_step(-1);  // of the whole pass
  if (place_.kind == DeviceKind::cpu) {
    communicator.all_reduce(numbers_, DType::f64, heads_, how).wait();
    for (Index h = 0; h < to.heads; ++h) store_row(to, 0, h, numbers_ + h);
    return;
  }
  // Nothing moves, so that a graph can be captured whatever the transport.
  if (communicator.ranks() == 1) return device::reduce(place_, numbers_, 1, how, to);
  const Index bytes = heads_ * Index{sizeof(double)};
  std::vector<Block> all;
  for (Index rank = 0; rank < communicator.ranks(); ++rank)
    all.push_back({.data = numbers_ + (1 + rank) * heads_, .rows = 1, .bytes = bytes});
  communicator.all_gather({.data = numbers_, .rows = 1, .bytes = bytes}, all).wait();
  device::reduce(place_, numbers_ + heads_, communicator.ranks(), how, to);
}

}  // namespace weft::run
