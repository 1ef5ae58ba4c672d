// Work lists made on the host, and their way to the device.
#pragma once

#include <span>
#include <vector>

#include "cuda/memory.h"
#include "kernel/cuda/work.h"
#include "weft/slice.h"

namespace weft::cuda {

enum class Side { query, key };

// All lists of a call, in one array of 32-bit numbers that is copied at once.
class HostLists {
 public:
  explicit HostLists(std::span<const Slice> slices);

  // Which slices touch which tile of `size` rows of Q or of K. Returns the number of tiles.
  int add_tiles(Side side, Index rows, int size);
  void add_heads(Index heads_q, Index heads_k, std::span<const Index> head_map);
  std::size_t add_zeros(std::size_t count);  // where they lie
  std::span<const int> numbers() const { return numbers_; }

  // Where all that lies once the numbers begin at `base`: lists in the order they were added.
  WorkList list(const int* base, std::size_t n) const;
  WorkHeads heads(const int* base) const;

 private:
  struct Places {
    std::size_t slices, begin, order, tiles;
  };
  std::size_t append(std::span<const int> more);

  std::vector<Slice> useful_;      // as given, without rows that see nothing and keys that nobody sees
  std::vector<WorkSlice> slices_;  // the same for the device
  std::vector<int> numbers_;
  std::vector<Places> lists_;
  std::size_t kv_head_ = 0, head_begin_ = 0, heads_ = 0;
};

// The numbers in device memory, in the order of the stream. Error while a graph is captured: the copy would be replayed
// from memory that is gone.
StreamArray<int> upload(std::span<const int> numbers, cudaStream_t stream);

}  // namespace weft::cuda
