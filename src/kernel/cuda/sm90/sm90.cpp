#include "kernel/cuda/sm90/sm90.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>

#include "cuda/check.h"
#include "cuda/memory.h"
#include "cuda/on_device.h"
#include "device/device.h"
#include "index.h"
#include "kernel/cuda/host.h"
#include "kernel/cuda/sm90/aligned_copy.h"
#include "kernel/cuda/sm90/call.h"
#include "kernel/cuda/sm90/tensor_map.h"
#include "kernel/cuda/work/list.h"
#include "kernel/cuda/work/list_cache.h"
#include "text.h"
#include "weft/error.h"

namespace weft::cuda::sm90 {
namespace {

constexpr Index kNoEnd = std::numeric_limits<Index>::max();

// Heads in equal groups, as without a map?
bool in_groups(const Attention& attention, Index heads_q, Index heads_k) {
  if (heads_q % heads_k != 0) return false;
  for (std::size_t h = 0; h < attention.head_map.size(); ++h)
    if (attention.head_map[h] != static_cast<Index>(h) / (heads_q / heads_k)) return false;
  return true;
}

// What lists are made for, beside the arguments.
struct ListSizes {
  int rows;      // of a tile
  Index call;    // of QuerySteps
  int together;  // tiles at most whose parts are computed at once; more have one block each
  int counters;  // KeyParts::arrived of one of them; 0: there are no parts

  int all_counters(int tiles) const { return 1 + (tiles <= together ? tiles * counters : 0); }
};

// What the kernel reads of its work, and the memory that holds it.
struct Tiles {
  CallLists lists;
  StreamArray<int> memory;
  WorkList list;
  const ForwardItem* items = nullptr;
  const int* kv_head = nullptr;
  int* counter = nullptr;  // KeyParts::arrived lies behind it
  int tiles = 0;
  Index longest = 0;                 // keys of a slice, from its k_first
  Index widest = 0;                  // of those, from the first to the last that a tile sees
  std::vector<int> visited, ending;  // of QuerySteps: tiles with slices, and those of them whose rows end here
};
Tiles tiles_of_plan(const KernelForwardArgs& args, const ListSizes& sizes, cudaStream_t stream) {
  Tiles made;
  const Tiling tiling[] = {{Side::query, args.q.rows, sizes.rows}};
  made.lists = make_lists({}, args.device_plan, tiling, {args.q.heads, args.k.heads, args.attention.head_map}, stream);
  const auto counters = at(sizes.all_counters(tiling[0].tiles()));
  made.memory = StreamArray<int>(counters, stream);
  WEFT_CUDA(cudaMemsetAsync(made.memory.get(), 0, counters * sizeof(int), stream));
  made.list = made.lists.lists[0];
  made.kv_head = made.lists.heads.kv_head;
  made.counter = made.memory.get();
  made.tiles = tiling[0].tiles();
  made.longest = made.widest = args.k.rows;
  return made;
}
std::span<const Range> rows_held(const KernelForwardArgs& args) {
  return args.steps != nullptr ? args.steps->rows : std::span<const Range>{};
}
// Whether rows of QuerySteps::rows[n] have keys in later calls (1), none any more (-1), or their last in this one (0).
int later_keys(const QuerySteps& steps, std::size_t n, Index call) {
  const Index end = steps.ends.empty() ? kNoEnd : steps.ends[n];
  return end > call ? 1 : end < call ? -1 : 0;
}
// The same of a tile; Error if it has slices after its end.
int later_keys(const QuerySteps& steps, const Range& tile, Index call, bool visited) {
  int later = -1;
  bool held = false;
  for (std::size_t n = 0; n < steps.rows.size(); ++n) {
    if (steps.rows[n].end <= tile.begin || steps.rows[n].begin >= tile.end) continue;
    later = std::max(later, later_keys(steps, n, call));
    held = true;
  }
  if (visited && held && later < 0)
    throw Error(text("call ", call, " of QuerySteps has slices for rows ", tile.begin, " to ", tile.end,
                     ", which ended before it"),
                "count calls from 0 in QuerySteps::ends, or leave it empty");
  return held ? later : 1;
}
// Keys from the first to the last that a tile sees, counted from where their slices begin: where parts are cut.
Index width_of_keys(const HostLists& lists, const Range& tile, int first, int last) {
  Index begin = kNoEnd, end = 0;
  for (int n = first; n < last; ++n) {
    WorkSlice s;
    std::memcpy(static_cast<void*>(&s), lists.slice(0, n).data(), sizeof(s));
    const Index top = max_of(s.q_begin, tile.begin), bottom = min_of(s.q_end, tile.end) - 1;
    const Index from = max_of(s.k_begin, top + s.lo), to = min_of(s.k_end, bottom + s.hi + 1);
    if (top > bottom || from >= to) continue;
    begin = min_of(begin, from - s.k_first);
    end = max_of(end, to - s.k_first);
  }
  return max_of(0, end - begin);
}
Tiles make_tiles(const KernelForwardArgs& args, const ListSizes& sizes, cudaStream_t stream) {
  Tiles made;
  HostLists lists(joined(args.slices, args.steps != nullptr));
  const std::vector<Range> tiles = lists.cut_query_tiles(args.q.rows, sizes.rows, rows_held(args));
  made.tiles = lists.add_tiles(Side::query, tiles);
  for (const Slice& s : args.slices) made.longest = max_of(made.longest, trimmed(s, true).k_end - s.k_begin);
  std::vector<int> items;
  for (int n = 0; n < made.tiles; ++n) {
    const int t = lists.tile_at(0, n);
    const Range& tile = tiles[at(t)];
    const auto [first, last] = lists.range(0, t);
    const bool visited = first < last;
    made.widest = max_of(made.widest, width_of_keys(lists, tile, first, last));
    const bool ends = args.steps != nullptr && later_keys(*args.steps, tile, sizes.call, visited) == 0;
    items.insert(items.end(),
                 {t, static_cast<int>(tile.begin), static_cast<int>(tile.end), first, last, ends ? 1 : 0, 0, 0});
    const std::span<const int> slice = visited ? lists.slice(0, first) : std::span<const int>{};
    items.insert(items.end(), slice.begin(), slice.end());
    items.resize(at(n + 1) * (sizeof(ForwardItem) / sizeof(int)));
    if (visited) made.visited.push_back(t);
    if (visited && ends) made.ending.push_back(t);
  }
  lists.add_heads(args.q.heads, args.k.heads, args.attention.head_map);
  const std::vector<int> zeros(at(sizes.all_counters(made.tiles)), 0);
  const std::size_t items_at = lists.add_numbers(items), zero_at = lists.add_numbers(zeros);
  made.memory = upload(lists.numbers(), stream);
  made.list = lists.list(made.memory.get(), 0);
  made.items = reinterpret_cast<const ForwardItem*>(made.memory.get() + items_at);
  made.kv_head = lists.heads(made.memory.get()).kv_head;
  made.counter = made.memory.get() + zero_at;
  return made;
}
// Kept between calls: the kernel leaves its counters at 0.
std::shared_ptr<const Tiles> tiles_of(const KernelForwardArgs& args, const ListSizes& sizes, cudaStream_t stream) {
  if (args.device_plan != nullptr) return std::make_shared<Tiles>(tiles_of_plan(args, sizes, stream));
  enum : Index { kForward = 1 };
  std::vector<Index> numbers = {kForward, args.q.rows, sizes.rows, args.q.heads, args.k.heads, sizes.counters};
  for (std::size_t n = 0; n < rows_held(args).size(); ++n) {
    const Range& r = rows_held(args)[n];
    numbers.insert(numbers.end(), {r.begin, r.end, later_keys(*args.steps, n, sizes.call)});
  }
  const ListKey key{args.slices, args.attention.head_map, numbers};
  if (const auto kept = find_lists(key, stream)) return std::static_pointer_cast<const Tiles>(kept);
  const auto made = std::make_shared<Tiles>(make_tiles(args, sizes, stream));
  keep_lists(key, made, made->memory.size() * sizeof(int), stream);
  return made;
}

// Keys in parts: their number, and the memory for what is known of each.
class Parts {
 public:
  // In whole tiles of keys of any width, and few enough that what is known of them has room. kUnlimited: no parts.
  static Index keys_of(const KernelForwardArgs& args) {
    constexpr Index kTile = 128, kMost = 512;
    if (args.steps != nullptr || args.partial.given()) return kUnlimited;  // those are parts already
    const Index asked = args.keys_per_split != 0 ? args.keys_per_split : default_keys_per_split(args.q.heads);
    if (asked >= args.k.rows) return kUnlimited;
    return ceil_div(max_of(asked, ceil_div(args.k.rows, kMost)), kTile) * kTile;
  }
  Parts(Index keys, const Tiles& work, const ListSizes& sizes, int units, int processors, ForwardShape shape,
        cudaStream_t stream) {
    constexpr Index kMostBytes = Index{1} << 30;
    if (keys >= work.longest) return;
    view_.keys = static_cast<int>(keys);
    view_.most = static_cast<int>(min_of(ceil_div(work.longest, keys), ceil_div(work.widest - 1, keys) + 1));
    const Index floats = static_cast<Index>(shape.rows()) * shape.v, lanes = 2 * shape.rows();
    const Index tiles = static_cast<Index>(work.tiles) * units;
    const Index bytes = floats * static_cast<Index>(sizeof(float)) + lanes * static_cast<Index>(sizeof(float4));
    // One after another takes the memory of one part, but leaves multiprocessors idle if tiles are fewer than those.
    view_.together = work.tiles <= sizes.together && (tiles <= processors || tiles * view_.most * bytes <= kMostBytes);
    const Index blocks = view_.together ? tiles * view_.most : min_of(tiles, processors);
    sums_ = StreamArray<float>(at(blocks * floats), stream);
    states_ = StreamArray<float4>(at(blocks * lanes), stream);
    view_.sums = sums_.get();
    view_.states = states_.get();
    view_.arrived = work.counter + 1;
  }
  const KeyParts& view() const { return view_; }

 private:
  KeyParts view_;
  StreamArray<float> sums_;
  StreamArray<float4> states_;
};

// What calls of QuerySteps leave to the next.
struct KeptSums {
  // all_visited: by the first call, which leaves the states of its tiles.
  KeptSums(const KernelForwardArgs& args, Index rows, int columns, bool all_visited, cudaStream_t stream)
      : sums(at(rows * columns), stream), states(at(rows), stream), out(args.out, args.q.dtype, stream) {
    if (!all_visited) device::fill(args.place, states.get(), rows);
  }
  // Do all rows have their out and lse after this call, the last one?
  bool all_done(const Tiles& last) {
    for (const int tile : last.visited) done[at(tile)] = true;
    return std::find(done.begin(), done.end(), false) == done.end();
  }
  StreamArray<float> sums;
  StreamArray<RowState<float>> states;
  EvenOut out;  // has rows that have ended
  Index calls = 0;
  std::vector<bool> done;  // tiles whose rows have ended
};
Index calls_before(const KernelForwardArgs& args) {
  if (args.steps != nullptr && !args.steps->ends.empty() && args.steps->ends.size() != args.steps->rows.size())
    throw Error(
        text("QuerySteps has ", args.steps->ends.size(), " ends for ", args.steps->rows.size(), " ranges of rows"),
        "give one for each of QuerySteps::rows, or none");
  if (args.steps == nullptr || args.steps->state == nullptr) return 0;
  return std::static_pointer_cast<KeptSums>(args.steps->state)->calls;
}
std::shared_ptr<KeptSums> sums_of(const KernelForwardArgs& args, Index rows, int columns, bool all_visited,
                                  cudaStream_t stream) {
  if (args.steps == nullptr) return nullptr;
  auto kept = std::static_pointer_cast<KeptSums>(args.steps->state);
  if (kept == nullptr) kept = std::make_shared<KeptSums>(args, rows, columns, all_visited, stream);
  if (kept->states.size() != at(rows))
    throw Error(text("a call of QuerySteps has ", rows, " rows of tiles after one with ", kept->states.size()),
                "give all calls the same queries and the same QuerySteps::rows");
  if (kept->out.asked().data != args.out.data)
    throw Error(text("call ", kept->calls, " of QuerySteps has another out than the first"),
                "give all calls the same out: rows that end are written before the last call");
  return kept;
}

}  // namespace

bool takes_steps(const ForwardArgs& args) {
  return args.device_plan == nullptr && !args.max_logit.given() && args.attention.softcap == 0 &&
         scale_of(args.attention, args.q.dim) > 0;
}

void forward(const KernelForwardArgs& args) {
  const OnDevice on(args.place.device);
  const cudaStream_t stream = stream_of(args.place);
  check_rows(max_of(args.q.rows, args.k.rows));
  const DType dtype = args.q.dtype;
  const Width width = width_of(dtype, args.q.dim, args.v.dim);
  const int group =
      in_groups(args.attention, args.q.heads, args.k.heads) ? static_cast<int>(args.q.heads / args.k.heads) : 1;
  const bool mapped = group == 1 && !args.attention.head_map.empty();
  const Grouping side = grouping(width, group);
  const int units = static_cast<int>(args.q.heads) / side.heads;
  const int processors = processors_of(args.place.device);
  const Index part_keys = Parts::keys_of(args);
  // Tiles for four rounds of all multiprocessors keep them busy without parts.
  const ListSizes sizes{.rows = side.rows,
                        .call = calls_before(args),
                        .together = 4 * processors / units,
                        .counters = part_keys == kUnlimited ? 0 : units * 4 * forward_shape(width).groups};
  const std::shared_ptr<const Tiles> tiles = tiles_of(args, sizes, stream);
  const Tiles& work = *tiles;
  check_grid(work.tiles, units);
  const Parts parts(part_keys, work, sizes, units, processors, forward_shape(width), stream);

  const double scale = scale_of(args.attention, args.q.dim);
  StreamArray<unsigned> orders;
  const std::shared_ptr<KeptSums> sums =
      sums_of(args, static_cast<Index>(work.tiles) * units * forward_shape(width).rows(), forward_shape(width).v,
              work.visited.size() == at(work.tiles), stream);
  std::optional<EvenOut> own;
  const EvenOut& out = sums != nullptr ? sums->out : own.emplace(args.out, dtype, stream);
  ForwardCall call{.q = {},
                   .k = {},
                   .v = {},
                   .list = work.list,
                   .items = work.items,
                   .kv_head = mapped ? work.kv_head : nullptr,
                   .tiles = work.tiles,
                   .units = units,
                   .heads = side.heads,
                   .rows = side.rows,
                   .units_of_group = group / side.heads,
                   .q_rows = static_cast<int>(args.q.rows),
                   .k_rows = static_cast<int>(args.k.rows),
                   .heads_q = static_cast<int>(args.q.heads),
                   .processors = processors,
                   .scores = scores_of(scale == 0 ? 1 : std::abs(scale), args.attention.softcap),
                   .sign = scale > 0   ? 1.0f
                           : scale < 0 ? -1.0f
                                       : 0.0f,
                   .sink = sink_of(args.attention.sink),
                   .out = out.view(),
                   .lse = args.lse,
                   .wide_out = out.wide(),
                   .partial = args.partial,
                   .steps = {},
                   .parts = parts.view(),
                   .max_logit = zeroed_orders(orders, args.max_logit, stream),
                   .counter = work.counter};
  if (sums != nullptr && sums->states.size() > 0)
    call.steps = {sums->sums.get(), sums->states.get(), args.steps->state == nullptr, args.steps->last,
                  sums->calls % 2 == 1};
  // Without rows there is nothing to describe, and nothing is read.
  const Even q(args.q, stream), k(args.k, stream), v(args.v, stream);
  if (args.q.rows > 0) call.q = tensor_map(q.view(), side.heads, side.rows);
  if (args.k.rows > 0) {
    call.k = tensor_map(k.view(), 1, forward_shape(width).keys);
    call.v = tensor_map(v.view(), 1, forward_shape(width).keys);
  }
  of_16_bits(dtype, &forward_bf16, &forward_f16)(width, call, stream);
  if (args.steps != nullptr) {
    sums->done.resize(at(work.tiles));
    for (const int tile : work.ending) sums->done[at(tile)] = true;
    ++sums->calls;
    if (args.steps->last && !sums->all_done(work)) finish_steps(width, call, dtype, stream);
    args.steps->state = args.steps->last ? nullptr : sums;
    if (!args.steps->last) return;  // out may not be written yet
  }
  out.finish();
  if (call.max_logit != nullptr) store_max_logit(call.max_logit, args.max_logit, stream);
}

}  // namespace weft::cuda::sm90
