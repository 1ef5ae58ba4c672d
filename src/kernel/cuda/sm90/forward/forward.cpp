#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>

#include "cuda/handle_pool.h"
#include "cuda/runtime.h"
#include "device/device.h"
#include "index.h"
#include "kernel/cuda/host.h"
#include "kernel/cuda/sm90/aligned_copy.h"
#include "kernel/cuda/sm90/forward/params.h"
#include "kernel/cuda/sm90/lists/device_tiles.h"
#include "kernel/cuda/work/list.h"
#include "kernel/cuda_kernels.h"
#include "text.h"

namespace weft::cuda::sm90 {
namespace {

constexpr Index kNoEnd = std::numeric_limits<Index>::max();

// Are the heads in equal groups, as without a map?
bool in_groups(const Attention& attention, Index heads_q, Index heads_k) {
  if (heads_q % heads_k != 0) return false;
  for (std::size_t h = 0; h < attention.head_map.size(); ++h)
    if (attention.head_map[h] != static_cast<Index>(h) / (heads_q / heads_k)) return false;
  return true;
}

// What the work lists depend on, apart from the arguments.
struct ListSizes {
  int rows;                  // rows of a tile
  Index call_index;          // index of the call in QuerySteps
  int max_concurrent_tiles;  // with more tiles, one block runs all splits of a tile
  int counters;              // counters KeySplits::arrived of a tile; 0: no splits

  int all_counters(int tiles) const { return 1 + (tiles <= max_concurrent_tiles ? tiles * counters : 0); }
};

// What the kernel reads of its work, and the memory that holds it.
struct ForwardWork {
  StreamArray<int> memory;
  const WorkSlice* slices = nullptr;
  const ForwardItem* items = nullptr;
  const int* kv_head = nullptr;
  int* counter = nullptr;            // KeySplits::arrived lies behind it
  int tiles = 0;                     // with a device_plan the most there can be
  const int* tile_count = nullptr;   // of a device_plan
  Index longest_slice = 0;           // keys of the longest slice, from its k_first
  Index widest_tile = 0;             // keys from the first to the last that a tile sees
  std::vector<int> visited, ending;  // QuerySteps: tiles with slices, and those of them whose rows end in this call
};
ForwardWork work_of_plan(const KernelForwardArgs& args, const ListSizes& sizes, cudaStream_t stream) {
  ForwardWork work;
  const int counters = sizes.all_counters(most_forward_tiles(*args.device_plan, sizes.rows));
  DeviceForwardTiles made = build_forward_tiles(
      *args.device_plan, sizes.rows, {args.q.heads, args.k.heads, args.attention.head_map}, counters, stream);
  work.memory = std::move(made.memory);
  work.slices = made.tiles.slices;
  work.items = made.tiles.items;
  work.kv_head = made.heads.kv_head;
  work.counter = made.counters;
  work.tiles = made.tiles.most;
  work.tile_count = made.tiles.count;
  work.longest_slice = work.widest_tile = args.k.rows;
  return work;
}
std::span<const Range> held_rows(const KernelForwardArgs& args) {
  return args.steps != nullptr ? args.steps->rows : std::span<const Range>{};
}
// Whether rows of QuerySteps::rows[n] have keys in later calls (1), their last keys in this call (0), or none any more
// (-1).
int later_keys(const QuerySteps& steps, std::size_t n, Index call_index) {
  const Index end = steps.ends.empty() ? kNoEnd : steps.ends[n];
  return end > call_index ? 1 : end < call_index ? -1 : 0;
}
// The same of a tile. Error if it has slices after its end.
int later_keys(const QuerySteps& steps, const Range& tile, Index call_index, bool visited) {
  int later = -1;
  bool held = false;
  for (std::size_t n = 0; n < steps.rows.size(); ++n) {
    if (steps.rows[n].end <= tile.begin || steps.rows[n].begin >= tile.end) continue;
    later = std::max(later, later_keys(steps, n, call_index));
    held = true;
  }
  if (visited && held && later < 0)
    throw Error(text("call ", call_index, " of QuerySteps has slices for rows ", tile.begin, " to ", tile.end,
                     ", which ended before it"),
                "count calls from 0 in QuerySteps::ends, or leave it empty");
  return held ? later : 1;
}
// Keys from the first to the last that a tile sees, relative to their slices' first keys, as splits are.
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
ForwardWork make_work(const KernelForwardArgs& args, const ListSizes& sizes, cudaStream_t stream) {
  ForwardWork work;
  HostLists lists(joined(args.slices, args.steps != nullptr));
  const std::vector<Range> tiles = lists.cut_query_tiles(args.q.rows, sizes.rows, held_rows(args));
  work.tiles = lists.add_tiles(Side::query, tiles);
  for (const Slice& s : args.slices)
    work.longest_slice = max_of(work.longest_slice, trimmed(s, true).k_end - s.k_begin);
  std::vector<int> items;
  for (int n = 0; n < work.tiles; ++n) {
    const int t = lists.tile_at(0, n);
    const Range& tile = tiles[at(t)];
    const auto [first, last] = lists.range(0, t);
    const bool visited = first < last;
    work.widest_tile = max_of(work.widest_tile, width_of_keys(lists, tile, first, last));
    const bool ends = args.steps != nullptr && later_keys(*args.steps, tile, sizes.call_index, visited) == 0;
    items.insert(items.end(),
                 {t, static_cast<int>(tile.begin), static_cast<int>(tile.end), first, last, ends ? 1 : 0, 0, 0});
    const std::span<const int> slice = visited ? lists.slice(0, first) : std::span<const int>{};
    items.insert(items.end(), slice.begin(), slice.end());
    items.resize(at(n + 1) * (sizeof(ForwardItem) / sizeof(int)));
    if (visited) work.visited.push_back(t);
    if (visited && ends) work.ending.push_back(t);
  }
  lists.add_heads(args.q.heads, args.k.heads, args.attention.head_map);
  const std::vector<int> zeros(at(sizes.all_counters(work.tiles)), 0);
  const std::size_t items_at = lists.add_numbers(items), zero_at = lists.add_numbers(zeros);
  work.memory = upload(lists.numbers(), stream);
  work.slices = lists.list(work.memory.get(), 0).slices;
  work.items = reinterpret_cast<const ForwardItem*>(work.memory.get() + items_at);
  work.kv_head = lists.heads(work.memory.get()).kv_head;
  work.counter = work.memory.get() + zero_at;
  return work;
}
// Cached between calls, because the kernel resets its counters to 0.
std::shared_ptr<const ForwardWork> work_of(const KernelForwardArgs& args, const ListSizes& sizes, cudaStream_t stream) {
  if (args.device_plan != nullptr) return std::make_shared<ForwardWork>(work_of_plan(args, sizes, stream));
  enum : Index { kForward = 1 };
  std::vector<Index> numbers = {kForward, args.q.rows, sizes.rows, args.q.heads, args.k.heads, sizes.counters};
  for (std::size_t n = 0; n < held_rows(args).size(); ++n) {
    const Range& r = held_rows(args)[n];
    numbers.insert(numbers.end(), {r.begin, r.end, later_keys(*args.steps, n, sizes.call_index)});
  }
  const ListKey key{args.slices, args.attention.head_map, numbers};
  if (const auto saved = find_cached_lists(key, stream)) return std::static_pointer_cast<const ForwardWork>(saved);
  const auto work = std::make_shared<ForwardWork>(make_work(args, sizes, stream));
  cache_lists(key, work, work->memory.size() * sizeof(int), stream);
  return work;
}

// The number of splits, and the memory for their states.
class KeySplitMemory {
 public:
  // Keys of a split: whole tiles of keys for every width, and few enough splits that their states fit in memory.
  // kUnlimited: no splits.
  static Index keys_of(const KernelForwardArgs& args) {
    constexpr Index kTile = 128, kMost = 512;
    if (args.steps != nullptr || args.partial.given()) return kUnlimited;  // those calls split the keys already
    const Index asked = args.keys_per_split != 0 ? args.keys_per_split : default_keys_per_split(args.q.heads);
    if (asked >= args.k.rows) return kUnlimited;
    return ceil_div(max_of(asked, ceil_div(args.k.rows, kMost)), kTile) * kTile;
  }
  KeySplitMemory(Index keys, const ForwardWork& work, const ListSizes& sizes, int units, int sm_count,
                 ForwardShape shape, cudaStream_t stream) {
    constexpr Index kMostBytes = Index{1} << 30;
    if (keys >= work.longest_slice) return;
    view_.keys = static_cast<int>(keys);
    view_.max_splits =
        static_cast<int>(min_of(ceil_div(work.longest_slice, keys), ceil_div(work.widest_tile - 1, keys) + 1));
    const Index floats = static_cast<Index>(shape.rows()) * shape.dim_v, lanes = 2 * shape.rows();
    const Index tiles = static_cast<Index>(work.tiles) * units;
    const Index bytes = floats * static_cast<Index>(sizeof(float)) + lanes * static_cast<Index>(sizeof(float4));
    // Splits in order need the memory of one split only, but leave SMs idle if there are fewer tiles than SMs.
    view_.concurrent = work.tiles <= sizes.max_concurrent_tiles &&
                       (tiles <= sm_count || tiles * view_.max_splits * bytes <= kMostBytes);
    const Index blocks = view_.concurrent ? tiles * view_.max_splits : min_of(tiles, sm_count);
    sums_ = StreamArray<float>(at(blocks * floats), stream);
    states_ = StreamArray<float4>(at(blocks * lanes), stream);
    view_.sums = sums_.get();
    view_.states = states_.get();
    view_.arrived = work.counter + 1;
  }
  const KeySplits& view() const { return view_; }

 private:
  KeySplits view_;
  StreamArray<float> sums_;
  StreamArray<float4> states_;
};

// What a call of QuerySteps leaves to the next.
struct StepMemory {
  // all_visited: the first call visits all tiles, and so writes their states.
  StepMemory(const KernelForwardArgs& args, Index rows, int columns, bool all_visited, cudaStream_t stream)
      : sums(at(rows * columns), stream), states(at(rows), stream), out(args.out, args.q.dtype, stream) {
    if (!all_visited) device::fill(args.place, states.get(), rows);
  }
  // Have all rows been written after this call, the last one?
  bool all_done(const ForwardWork& last) {
    for (const int tile : last.visited) done[at(tile)] = true;
    return std::find(done.begin(), done.end(), false) == done.end();
  }
  StreamArray<float> sums;
  StreamArray<RowState<float>> states;
  AlignedOutput out;  // holds rows that have ended
  Index calls = 0;
  std::vector<bool> done;  // tiles whose rows have ended
};
Index calls_before(const KernelForwardArgs& args) {
  if (args.steps != nullptr && !args.steps->ends.empty() && args.steps->ends.size() != args.steps->rows.size())
    throw Error(
        text("QuerySteps has ", args.steps->ends.size(), " ends for ", args.steps->rows.size(), " ranges of rows"),
        "give one for each of QuerySteps::rows, or none");
  if (args.steps == nullptr || args.steps->state == nullptr) return 0;
  return std::static_pointer_cast<StepMemory>(args.steps->state)->calls;
}
std::shared_ptr<StepMemory> sums_of(const KernelForwardArgs& args, Index rows, int columns, bool all_visited,
                                    cudaStream_t stream) {
  if (args.steps == nullptr) return nullptr;
  auto saved = std::static_pointer_cast<StepMemory>(args.steps->state);
  if (saved == nullptr) saved = std::make_shared<StepMemory>(args, rows, columns, all_visited, stream);
  if (saved->states.size() != at(rows))
    throw Error(text("a call of QuerySteps has ", rows, " rows of tiles after one with ", saved->states.size()),
                "give all calls the same queries and the same QuerySteps::rows");
  if (saved->out.asked().data != args.out.data)
    throw Error(text("call ", saved->calls, " of QuerySteps has another out than the first"),
                "give all calls the same out: rows that end are written before the last call");
  return saved;
}

// Is V the first columns of K, as in absorbed latent attention?
bool v_is_k(const ConstTensorView& k, const ConstTensorView& v) {
  return k.data == v.data && k.dim >= v.dim && k.head_stride == v.head_stride && k.row_stride == v.row_stride &&
         k.inner == v.inner && (k.inner == 0 || k.outer_stride == v.outer_stride);
}

}  // namespace

bool takes_steps(const ForwardArgs& args) {
  return args.device_plan == nullptr && !args.max_logit.given() && args.attention.softcap == 0 &&
         width_of(args.q.dtype, args.q.dim, args.v.dim) != Width::w576_512 && scale_of(args.attention, args.q.dim) > 0;
}

void forward(const KernelForwardArgs& args) {
  if (width_of(args.q.dtype, args.q.dim, args.v.dim) == Width::w576_512)
    return forward_by_head(args, kWideSm90Shape.rows, [&](const cuda::ForwardParams& params, cudaStream_t stream) {
      select_16bit(args.q.dtype, &run_wide_forward<Bf16>, &run_wide_forward<F16>)(v_is_k(args.k, args.v), params,
                                                                                  stream);
    });
  const DeviceGuard on(args.place.device);
  const cudaStream_t stream = stream_of(args.place);
  check_rows(max_of(args.q.rows, args.k.rows));
  const DType dtype = args.q.dtype;
  const Width width = width_of(dtype, args.q.dim, args.v.dim);
  const int group =
      in_groups(args.attention, args.q.heads, args.k.heads) ? static_cast<int>(args.q.heads / args.k.heads) : 1;
  const bool mapped = group == 1 && !args.attention.head_map.empty();
  const Grouping side = grouping(width, group);
  const int units = static_cast<int>(args.q.heads) / side.heads;
  const int sm_count = sm_count_of(args.place.device);
  const Index split_keys = KeySplitMemory::keys_of(args);
  // Four tiles per SM keep all SMs busy without splits.
  const ListSizes sizes{.rows = side.rows,
                        .call_index = calls_before(args),
                        .max_concurrent_tiles = 4 * sm_count / units,
                        .counters = split_keys == kUnlimited ? 0 : units * 4 * forward_shape(width).consumers};
  const std::shared_ptr<const ForwardWork> tiles = work_of(args, sizes, stream);
  const ForwardWork& work = *tiles;
  check_grid(work.tiles, units);
  const KeySplitMemory splits(split_keys, work, sizes, units, sm_count, forward_shape(width), stream);

  const double scale = scale_of(args.attention, args.q.dim);
  StreamArray<unsigned> ordered_max;
  const std::shared_ptr<StepMemory> sums =
      sums_of(args, static_cast<Index>(work.tiles) * units * forward_shape(width).rows(), forward_shape(width).dim_v,
              work.visited.size() == at(work.tiles), stream);
  std::optional<AlignedOutput> own;
  const AlignedOutput& out = sums != nullptr ? sums->out : own.emplace(args.out, dtype, stream);
  ForwardParams params{.q = {},
                       .k = {},
                       .v = {},
                       .slices = work.slices,
                       .items = work.items,
                       .kv_head = mapped ? work.kv_head : nullptr,
                       .tiles = work.tiles,
                       .tile_count = work.tile_count,
                       .units = units,
                       .heads = side.heads,
                       .rows = side.rows,
                       .units_of_group = group / side.heads,
                       .k_rows = static_cast<int>(args.k.rows),
                       .heads_q = static_cast<int>(args.q.heads),
                       .sm_count = sm_count,
                       .scores = score_scale_of(scale == 0 ? 1 : std::abs(scale), args.attention.softcap),
                       .sign = sign_of(scale),
                       .sink = sink_of(args.attention.sink),
                       .out = out.view(),
                       .lse = args.lse,
                       .vec8_out = out.vec8(),
                       .partial = args.partial,
                       .steps = {},
                       .splits = splits.view(),
                       .max_logit = zeroed_max_logit(ordered_max, args.max_logit, stream),
                       .counter = work.counter};
  if (sums != nullptr && sums->states.size() > 0)
    params.steps = {sums->sums.get(), sums->states.get(), args.steps->state == nullptr, args.steps->last,
                    sums->calls % 2 == 1};
  // Without rows there is no tensor to describe, and nothing is read.
  const AlignedInput q(args.q, stream), k(args.k, stream), v(args.v, stream);
  if (args.q.rows > 0) params.q = tensor_map(q.view(), side.heads, side.rows);
  if (args.k.rows > 0) {
    params.k = tensor_map(k.view(), 1, forward_shape(width).keys);
    params.v = tensor_map(v.view(), 1, forward_shape(width).keys);
  }
  select_16bit(dtype, &run_forward<Bf16>, &run_forward<F16>)(width, params, stream);
  if (args.steps != nullptr) {
    sums->done.resize(at(work.tiles));
    for (const int tile : work.ending) sums->done[at(tile)] = true;
    ++sums->calls;
    if (args.steps->last && !sums->all_done(work)) finish_steps(width, params, dtype, stream);
    args.steps->state = args.steps->last ? nullptr : sums;
    if (!args.steps->last) return;  // out may not be written yet
  }
  out.finish();
  if (params.max_logit != nullptr) store_max_logit(params.max_logit, args.max_logit, stream);
}

}  // namespace weft::cuda::sm90
