#include <atomic>
#include <cmath>
#include <mutex>
#include <vector>

#include "index.h"
#include "kernel/cpu/parallel.h"
#include "kernel/cpu/rows.h"
#include "kernel/cpu/target.h"

namespace weft::cpu {

float sink_logit_f32(const Sink& sink, Index head) {
  if (sink.kind == Sink::Kind::none) return kMinusInfinity<float>;
  return sink.kind == Sink::Kind::off_by_one ? 0.0f : load_number(sink.logits, 0, head);
}

void forward(const Target& target, const KernelForwardArgs& args) {
  const std::vector<Slice> slices = useful_slices(args.slices);
  const double scale = args.attention.scale.value_or(1 / std::sqrt(static_cast<double>(args.q.dim)));
  const ForwardCall call{args, slices, static_cast<float>(scale), static_cast<float>(args.attention.softcap)};
  const std::vector<HeadGroup> groups = head_groups(args.q.heads, args.k.heads, args.attention.head_map);
  const Index group = largest_group(groups), rows = target.tile_rows(call, group);
  const std::vector<RowTile> tiles = row_tiles(slices, args.q.rows, rows);
  const std::vector<Item> items = forward_items(tiles, groups);

  const std::size_t heads = at(args.q.heads);
  std::vector<float> max_logit(heads, kMinusInfinity<float>);
  std::atomic<std::size_t> next{0};
  std::mutex guard;
  Index pairs = 0;
  for (const Item& item : items) pairs += item.cost;
  on_threads(worth_threads(pairs, args.q.dim + args.v.dim), [&] {
    std::vector<float> own_max(heads, kMinusInfinity<float>);
    Scratch scratch;  // taken with the first item: a thread that comes too late costs nothing
    for (std::size_t i = next++; i < items.size(); i = next++) {
      float* memory = scratch.get(target.forward_scratch(call, rows * group));
      const Item& item = items[i];
      target.forward_tile(call, {tiles[at(item.tile)], groups[at(item.group)], memory, own_max.data()});
    }
    const std::lock_guard lock(guard);
    for (std::size_t h = 0; h < heads; ++h) max_logit[h] = max_or_nan(max_logit[h], own_max[h]);
  });
  if (args.max_logit.given())
    for (std::size_t h = 0; h < heads; ++h) store_number(args.max_logit, 0, static_cast<Index>(h), max_logit[h]);
}

}  // namespace weft::cpu
