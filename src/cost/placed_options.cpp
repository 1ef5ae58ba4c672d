// What layout `placed` weighs, from a machine's rates and links.
#include "cost/tiles.h"
#include "weft/placed.h"

namespace weft {
namespace {

double half_of(Index tile) { return static_cast<double>(tile - 1) / 2; }

}  // namespace

PlacedOptions placed_options(const Machine& machine, Index heads_q, Index heads_k, const TensorShape& shape,
                             bool backward) {
  const double q = static_cast<double>(heads_q), k = static_cast<double>(heads_k);
  const Index group = heads_k > 0 ? max_of(1, heads_q / heads_k) : 1;
  constexpr Index kGroups = 4;  // that `auto` tries
  PlacedOptions o{.head_groups = max_of(1, min_of(kGroups, heads_k)),
                  .pair_seconds = 0,
                  .row_seconds = 0,
                  .merge_seconds = 0,
                  .near_seconds = 0,
                  .far_seconds = 0};
  double kv_bytes = 0, state_bytes = 0;
  const double dims = static_cast<double>(shape.dim_qk + shape.dim_v),
               element = static_cast<double>(size_of(shape.dtype));
  constexpr double kSum = sizeof(float);
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    if (pass == Pass::backward && !backward) continue;
    const KernelRate& rate = kernel_rate(machine, pass, shape);
    const double pair = cost::flops_a_pair(shape, pass) / rate.flops;
    const Index tokens = max_of(1, rate.tile_q / group);
    o.pair_seconds += q * pair;
    // A tile goes as far as its farthest row, half a tile more than the mean row, and its last tile of keys is half
    // empty.
    o.row_seconds += q * (pair * (half_of(tokens) + half_of(rate.tile_k)) + rate.row_seconds);
    o.row_seconds += q / static_cast<double>(group) * rate.tile_seconds / static_cast<double>(tokens);
    if (rate.copy_rows > 0) {  // each block of rows copies the keys that it sees
      const Index block = max_of(1, rate.copy_rows / group);
      const double copied = k * rate.key_seconds / static_cast<double>(block);
      o.pair_seconds += copied;
      o.row_seconds += copied * half_of(block);
    }
    kv_bytes += k * dims * element;
    // Two steps: sums and states there and back in each, and one pass over them at the end; backward two times dQ
    // written, three in the sum, and one rounded.
    const double width = static_cast<double>(shape.dim_v), width_qk = static_cast<double>(shape.dim_qk);
    if (pass == Pass::forward)
      state_bytes += q * (4 * (width * kSum + 2 * kSum) + width * (kSum + element) + 4 * kSum);
    else
      state_bytes += q * width_qk * (5 * kSum + kSum + element);
    if (pass == Pass::backward) kv_bytes += k * dims * kSum;  // gradients return as sums
  }
  if (machine.row_bandwidth > 0) o.merge_seconds = state_bytes / machine.row_bandwidth;
  const auto seconds = [&](const Level& level) {
    const double copied = machine.copy_bandwidth > 0 ? kv_bytes / machine.copy_bandwidth : 0;
    return (level.bandwidth > 0 ? kv_bytes / level.bandwidth : 0) + copied;
  };
  if (machine.levels.empty()) return o;
  o.near_seconds = seconds(machine.levels.front());
  o.far_seconds = seconds(machine.levels.back());
  // One level joins all ranks: any number of them is near.
  o.node = machine.levels.size() > 1 ? machine.levels.front().ranks : kMaxTokens;
  return o;
}

}  // namespace weft
