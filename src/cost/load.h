// What a rank has to move in one exchange, level by level, and how long that takes.
#pragma once

#include <array>

#include "weft/cost.h"

namespace weft::cost {

inline constexpr std::size_t kMaxLevels = 4;

struct Load {
  std::array<double, kMaxLevels> in = {}, out = {};  // bytes
  std::array<Index, kMaxLevels> messages = {};       // that come in
  std::array<double, kMaxLevels> up = {};            // bytes out of, or into, the whole group below; the larger
  Index bytes_in = 0, bytes_out = 0;
  double copied = 0;  // bytes that the rank itself copies, its own included

  bool any() const { return bytes_in > 0 || bytes_out > 0; }
};

// The level that joins two ranks.
class Topology {
 public:
  explicit Topology(const Machine& machine) : machine_(machine) {}

  std::size_t level(Index a, Index b) const {
    for (std::size_t l = 0; l + 1 < machine_.levels.size(); ++l)
      if (a / machine_.levels[l].ranks == b / machine_.levels[l].ranks) return l;
    return machine_.levels.size() - 1;
  }
  std::size_t levels() const { return machine_.levels.size(); }
  // Ranks of the groups that level l joins: those of the level below.
  Index below(std::size_t l) const { return l == 0 ? 1 : machine_.levels[l - 1].ranks; }

  void receive(Load& load, Index me, Index peer, double bytes) const {
    const std::size_t l = level(me, peer);
    load.in[l] += bytes;
    ++load.messages[l];
    load.bytes_in += static_cast<Index>(bytes);
  }
  void send(Load& load, Index me, Index peer, double bytes) const {
    load.out[level(me, peer)] += bytes;
    load.bytes_out += static_cast<Index>(bytes);
  }

  // Levels are links of their own, so the slowest one counts.
  double seconds(const Load& load) const;
  // Fraction of a kernel's rate that is lost while it goes on.
  double interference(const Load& load) const;

 private:
  const Machine& machine_;
};

}  // namespace weft::cost
