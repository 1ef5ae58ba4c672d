#include <algorithm>
#include <cstdint>

#include "comm/cuda/segments.h"
#include "comm/pieces.h"
#include "cuda/launch.h"

namespace weft::cuda {
namespace {

// As many as fit the 4 KB that a kernel's parameters may have.
constexpr int kBatch = 64;
struct Batch {
  Segment segments[kBatch];
};

constexpr int kThreads = 256;

template <class Word, bool kAdd>
__global__ void move_segments(Batch batch) {
  const Segment s = batch.segments[blockIdx.y];
  const Index words = s.bytes / Index{sizeof(Word)}, count = s.rows * words;
  const Index step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index at = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; at < count; at += step) {
    const Index row = at / words, word = at % words;
    const Word value = reinterpret_cast<const Word*>(s.from + row * s.from_stride)[word];
    Word& to = reinterpret_cast<Word*>(s.to + row * s.to_stride)[word];
    if constexpr (kAdd)
      to += value;
    else
      to = value;
  }
}

// The widest word that every address and size is a multiple of.
std::uintptr_t bits_of(const Segment& s) {
  const auto strides = static_cast<std::uintptr_t>(s.rows > 1 ? s.from_stride | s.to_stride : 0);
  return reinterpret_cast<std::uintptr_t>(s.from) | reinterpret_cast<std::uintptr_t>(s.to) |
         static_cast<std::uintptr_t>(s.bytes) | strides;
}

template <class Word, bool kAdd>
void launch_batch(std::span<const Segment> some, cudaStream_t stream) {
  Batch batch{};
  Index largest = 0;
  for (std::size_t i = 0; i < some.size(); ++i) {
    batch.segments[i] = some[i];
    largest = max_of(largest, some[i].rows * some[i].bytes / Index{sizeof(Word)});
  }
  constexpr Index kPerThread = 4, kMost = 512;
  const Index blocks = max_of(1, min_of((largest + kThreads * kPerThread - 1) / (kThreads * kPerThread), kMost));
  launch(move_segments<Word, kAdd>,
         {.blocks = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(some.size())), .threads = dim3(kThreads)},
         stream, batch);
}

}  // namespace

std::vector<Segment> segments(std::span<const Block> from, std::span<const Block> to) {
  std::vector<Segment> all;
  Pieces source(from), target(to);
  while (!source.done() && !target.done()) {
    const Index bytes = min_of(source.left(), target.left());
    const char* a = source.data();
    char* b = target.data();
    source.take(bytes);
    target.take(bytes);
    if (!all.empty() && all.back().bytes == bytes) {  // one more row of the last one?
      Segment& last = all.back();
      const Index from_stride = a - last.from, to_stride = b - last.to;
      if (last.rows == 1 && from_stride > 0 && to_stride > 0) {
        last.from_stride = from_stride;
        last.to_stride = to_stride;
      }
      if (from_stride == last.rows * last.from_stride && to_stride == last.rows * last.to_stride) {
        ++last.rows;
        continue;
      }
      if (last.rows == 1) last.from_stride = last.to_stride = bytes;
    }
    all.push_back({a, b, 1, bytes, bytes, bytes});
  }
  return all;
}

void copy(std::span<const Segment> all, cudaStream_t stream) {
  for (std::size_t first = 0; first < all.size(); first += kBatch) {
    const auto some = all.subspan(first, std::min<std::size_t>(kBatch, all.size() - first));
    std::uintptr_t bits = 0;
    for (const Segment& s : some) bits |= bits_of(s);
    if (bits % 16 == 0)
      launch_batch<uint4, false>(some, stream);
    else if (bits % 4 == 0)
      launch_batch<std::uint32_t, false>(some, stream);
    else if (bits % 2 == 0)
      launch_batch<std::uint16_t, false>(some, stream);
    else
      launch_batch<std::uint8_t, false>(some, stream);
  }
}

void add_f32(std::span<const Segment> all, cudaStream_t stream) {
  for (std::size_t first = 0; first < all.size(); first += kBatch)
    launch_batch<float, true>(all.subspan(first, std::min<std::size_t>(kBatch, all.size() - first)), stream);
}

}  // namespace weft::cuda
