// The work lists of a call: made on the host and uploaded, or made on the device.
#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "cuda/handle_pool.h"
#include "index.h"
#include "kernel/cuda/work/work.h"
#include "weft/device_plan.h"
#include "weft/slice.h"

namespace weft::cuda {

enum class Side { query, key };

// Tiles of `size` rows of Q or of K.
struct Tiling {
  Side side;
  Index rows;
  int size;

  int tiles() const { return static_cast<int>(ceil_div(rows, size)); }
};
struct HeadGroups {
  Index heads_q, heads_k;
  std::span<const Index> map;  // as in Attention
};

// What the device reads of a call, and the memory that holds it.
struct WorkLists {
  StreamArray<int> memory;
  std::vector<WorkList> lists;  // one for each tiling
  WorkHeads heads;
};
// From slices on the host (Error while a graph is captured) or, if there is a plan, from its slices.
WorkLists make_work_lists(std::span<const Slice> slices, DevicePlan* plan, std::span<const Tiling> tilings,
                          const HeadGroups& heads, cudaStream_t stream);

// --- On the host ---

// Slices of a call of QuerySteps: those of the same rows whose keys are adjacent become one, because a rank holds two
// chunks of a document next to each other and tiles of keys need not end between them. Other calls keep them apart:
// where tiles of keys begin decides a row's bits, which must be the same for any number of ranks.
std::vector<Slice> joined(std::span<const Slice> slices, bool in_steps);

inline constexpr std::size_t kSliceInts = sizeof(WorkSlice) / sizeof(int);

// All lists of a call, in one array of 32-bit integers that is uploaded at once.
class HostLists {
 public:
  explicit HostLists(std::span<const Slice> slices);

  // Lists which slices touch which tile: tiles of `size` rows from row 0 on, or consecutive ranges of rows. Returns the
  // number of tiles.
  int add_tiles(Side side, Index rows, int size);
  int add_tiles(Side side, std::span<const Range> tiles);
  // Tiles of at most `size` query rows that restart where no slice continues: two documents share no key, and rows of
  // both in one tile would be computed against the keys of both. Short documents share a tile nevertheless, which costs
  // as much as two tiles. `held`: rows of slices in other calls.
  std::vector<Range> cut_query_tiles(Index rows, int size, std::span<const Range> held = {}) const;
  // Of a list: its n-th tile in the order of work, the range of a tile's slices, and a slice.
  int tile_at(std::size_t list, int n) const { return numbers_[lists_[list].order + at(n)]; }
  std::pair<int, int> range(std::size_t list, int tile) const {
    const int* range = numbers_.data() + lists_[list].ranges + 2 * tile;
    return {range[0], range[1]};
  }
  std::span<const int> slice(std::size_t list, int member) const {
    return numbers().subspan(lists_[list].slices + kSliceInts * at(member), kSliceInts);
  }
  void add_heads(Index heads_q, Index heads_k, std::span<const Index> head_map);
  std::size_t add_numbers(std::span<const int> more) { return append(more); }  // returns their index
  std::span<const int> numbers() const { return numbers_; }

  // The lists, in the order they were added, once the integers begin at `base` in device memory.
  WorkList list(const int* base, std::size_t n) const;
  WorkHeads heads(const int* base) const;

 private:
  struct Places {
    std::size_t slices, ranges, order, tiles;
  };
  std::size_t append(std::span<const int> more);

  std::vector<Slice> useful_;      // trimmed to rows that see a key and keys that a row sees
  std::vector<WorkSlice> slices_;  // the same for the device
  std::vector<int> numbers_;
  std::vector<Places> lists_;
  std::size_t kv_head_ = 0, head_begin_ = 0, heads_ = 0;
};

// Uploads the integers in stream order. Error while a graph is captured, because the copy would be replayed from memory
// that is gone.
StreamArray<int> upload(std::span<const int> numbers, cudaStream_t stream);

// Entries that no plan of so many slices can exceed, if no row lies in more than `per_row` of them: a slice has one
// more entry for each tile boundary that it crosses.
inline Index work_capacity(Index slices, Index tiles, Index per_row) {
  return slices == 0 ? 0 : slices + max_of(0, tiles - 1) * per_row;
}

// The same lists as HostLists makes, except that the order of tiles, most expensive first, is exact only to a quarter.
// A memset and two launches, for up to two tilings; can be captured together with its memory. Throws what the plan's
// context has to report. Slices that do not fit (an uploaded plan that changed under a graph) are a fault, and then no
// tile has any.
WorkLists build_lists(DevicePlan& plan, std::span<const Tiling> tilings, const HeadGroups& heads, cudaStream_t stream);

// A cache of work lists: every layer of a model has the slices of the one before. Each stream's latest lists are cached
// with what they were made from, so that a call need not make and upload them again.

// What lists are made from: slices, the head map, and sizes, the first of which tells whose lists they are. A lookup
// copies nothing.
struct ListKey {
  std::span<const Slice> slices;
  std::span<const Index> head_map, sizes;
};

// The cached lists, or null; always null while a graph is captured, which would read them at every replay. Lists hold
// memory in the order of `stream`, so only calls on that stream get them.
std::shared_ptr<void> find_cached_lists(const ListKey& key, cudaStream_t stream);
void cache_lists(const ListKey& key, std::shared_ptr<void> lists, std::size_t bytes, cudaStream_t stream);

}  // namespace weft::cuda
