// Work lists that are asked for again: every layer of a model has the slices of the one before. They are kept with what
// they were made of, the last ones of each stream, so that a call need not make and send them anew.
#pragma once

#include <memory>
#include <span>

#include <cuda_runtime_api.h>

#include "weft/slice.h"

namespace weft::cuda {

// What lists are made of: slices, the heads' map, and sizes, the first of which says whose lists they are. Nothing is
// copied to look for them.
struct ListKey {
  std::span<const Slice> slices;
  std::span<const Index> head_map, sizes;
};

// What was kept, or null; always null while a graph is captured, which would go on reading it. Lists hold memory in the
// order of `stream`: only calls in that stream get them, one after another.
std::shared_ptr<void> find_cached_lists(const ListKey& key, cudaStream_t stream);
void cache_lists(const ListKey& key, std::shared_ptr<void> lists, std::size_t bytes, cudaStream_t stream);

}  // namespace weft::cuda
