// A cache of work lists: every layer of a model has the slices of the one before. Each stream's latest lists are cached
// with what they were made from, so that a call need not make and upload them again.
#pragma once

#include <memory>
#include <span>

#include <cuda_runtime_api.h>

#include "weft/slice.h"

namespace weft::cuda {

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
