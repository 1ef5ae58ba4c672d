#include "cost/load.h"

#include <algorithm>

namespace weft::cost {

double Topology::seconds(const Load& load) const {
  double longest = 0;
  for (std::size_t l = 0; l < levels(); ++l) {
    const Level& level = machine_.levels[l];
    if (load.messages[l] == 0 && load.out[l] == 0) continue;
    const double out = level.limits_sends ? load.out[l] : 0;
    const double bytes = level.full_duplex ? std::max(load.in[l], out) : load.in[l] + out;
    double seconds = level.latency + static_cast<double>(load.messages[l]) * level.message_seconds;
    double moving = level.bandwidth > 0 ? bytes / level.bandwidth : 0;
    if (level.uplink > 0) moving = std::max(moving, load.up[l] / level.uplink);
    longest = std::max(longest, seconds + moving);
  }
  return longest;
}

double Topology::interference(const Load& load) const {
  double most = 0;
  for (std::size_t l = 0; l < levels(); ++l)
    if (load.messages[l] > 0 || load.out[l] > 0) most = std::max(most, machine_.levels[l].interference);
  return most;
}

}  // namespace weft::cost
