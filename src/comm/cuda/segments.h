// Copies between lists of blocks on a GPU, in few launches and without uploads.
#pragma once

#include <span>
#include <vector>

#include <cuda_runtime_api.h>

#include "weft/communicator.h"

namespace weft::cuda {

// rows x bytes from one place to another.
struct Segment {
  const char* from = nullptr;
  char* to = nullptr;
  Index rows = 0, bytes = 0;
  Index from_stride = 0, to_stride = 0;
};

// Both lists hold the same number of bytes.
std::vector<Segment> segments(std::span<const Block> from, std::span<const Block> to);

void copy(std::span<const Segment> all, cudaStream_t stream);
void add_f32(std::span<const Segment> all, cudaStream_t stream);  // to += from

// Equal except for `from`.
bool alike(std::span<const Segment> a, std::span<const Segment> b);
// Sums of at least one list, all alike: to = from of the first + from of the second + ..., or to += all of them. Each
// element is read and written once.
void sum_f32(std::span<const std::vector<Segment>> lists, bool replace, cudaStream_t stream);

}  // namespace weft::cuda
