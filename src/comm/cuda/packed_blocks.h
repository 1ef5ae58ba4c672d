// Blocks, one for each rank, as one contiguous piece of GPU memory in the order of ranks, as collectives take them.
#pragma once

#include <span>
#include <vector>

#include "comm/blocks.h"
#include "comm/cuda/segments.h"
#include "cuda/handle_pool.h"
#include "index.h"

namespace weft::cuda {

class PackedBlocks {
 public:
  // The callers' memory if the blocks lie there one after another, else memory of the stream's.
  PackedBlocks(std::span<const Block> blocks, cudaStream_t stream) : blocks_(blocks.begin(), blocks.end()) {
    for (const Block& b : blocks_) size_ += b.size();
    data_ = in_place();
    if (data_ != nullptr || size_ == 0) return;
    own_ = StreamArray<char>(at(size_), stream);
    data_ = own_.get();
  }

  char* data() const { return data_; }
  Index size() const { return size_; }
  void pack(cudaStream_t stream) const {
    const Block all = whole();
    if (own_.size() > 0) copy(segments(blocks_, {&all, 1}), stream);
  }
  void unpack(cudaStream_t stream) const {
    const Block all = whole();
    if (own_.size() > 0) copy(segments({&all, 1}, blocks_), stream);
  }

 private:
  Block whole() const { return {data_, 1, 1, size_, size_, size_}; }
  char* in_place() const {
    char *first = nullptr, *next = nullptr;
    for (const Block& given : blocks_) {
      if (given.size() == 0) continue;
      const Block b = merged(given);
      char* begin = static_cast<char*>(b.data);
      if (b.rows != 1 || b.parts != 1 || (next != nullptr && begin != next)) return nullptr;
      if (first == nullptr) first = begin;
      next = begin + b.bytes;
    }
    return first;
  }

  std::vector<Block> blocks_;
  Index size_ = 0;
  StreamArray<char> own_;
  char* data_ = nullptr;
};

}  // namespace weft::cuda
