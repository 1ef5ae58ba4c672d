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

// The next rows of the same.
bool continues(Segment& last, const Segment& s) {
  if (last.bytes != s.bytes) return false;
  const Index from_stride = last.rows > 1 ? last.from_stride : s.from - last.from;
  const Index to_stride = last.rows > 1 ? last.to_stride : s.to - last.to;
  if (from_stride <= 0 || to_stride <= 0) return false;
  if (s.from != last.from + last.rows * from_stride || s.to != last.to + last.rows * to_stride) return false;
  if (s.rows > 1 && (s.from_stride != from_stride || s.to_stride != to_stride)) return false;
  last.from_stride = from_stride;
  last.to_stride = to_stride;
  return true;
}

}  // namespace

std::vector<Segment> segments(std::span<const Block> from, std::span<const Block> to) {
  std::vector<Segment> all;
  Pieces source(from), target(to);
  while (!source.done() && !target.done()) {
    const Index bytes = min_of(source.left(), target.left());
    Segment s{source.data(), target.data(), 1, bytes, bytes, bytes};
    // As many rows as both sides have alike; a piece that is longer than the other side's is rows side by side.
    const bool a = source.left() == bytes, b = target.left() == bytes;
    s.rows = min_of(a ? source.alike() : source.left() / bytes, b ? target.alike() : target.left() / bytes);
    if (s.rows > 1 && a) s.from_stride = source.stride();
    if (s.rows > 1 && b) s.to_stride = target.stride();
    a ? source.take_alike(s.rows) : source.take(s.rows * bytes);
    b ? target.take_alike(s.rows) : target.take(s.rows * bytes);
    if (!all.empty() && continues(all.back(), s))
      all.back().rows += s.rows;
    else
      all.push_back(s);
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
