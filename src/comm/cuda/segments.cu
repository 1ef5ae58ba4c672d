#include <algorithm>
#include <cstdint>

#include "comm/blocks.h"
#include "comm/cuda/segments.h"
#include "cuda/launch.h"

namespace weft::cuda {
namespace {

// As many as fit into the 4 KB of kernel parameters.
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

// Several lists with the same destinations.
constexpr int kStack = 30, kLists = 8;
struct Stacks {
  Segment segments[kStack];
  const char* more[kStack][kLists - 1];
};
static_assert(sizeof(Stacks) <= 4000);

__device__ void add_to(float& sum, float value) { sum += value; }
__device__ void add_to(float4& sum, const float4& value) {
  sum = {sum.x + value.x, sum.y + value.y, sum.z + value.z, sum.w + value.w};
}

template <class Word>
__global__ void sum_stacks(Stacks stacks, int lists, bool replace) {
  const Segment s = stacks.segments[blockIdx.y];
  const Index words = s.bytes / Index{sizeof(Word)}, count = s.rows * words;
  const Index step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index at = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; at < count; at += step) {
    const Index row = at / words, word = at % words;
    const auto load = [&](const char* from) { return reinterpret_cast<const Word*>(from + row * s.from_stride)[word]; };
    Word more[kLists - 1];
#pragma unroll
    for (int i = 0; i < kLists - 1; ++i)
      if (i + 1 < lists) more[i] = load(stacks.more[blockIdx.y][i]);
    Word& to = reinterpret_cast<Word*>(s.to + row * s.to_stride)[word];
    Word sum = load(s.from);
    if (!replace) {
      Word before = to;
      add_to(before, sum);
      sum = before;
    }
#pragma unroll
    for (int i = 0; i < kLists - 1; ++i)
      if (i + 1 < lists) add_to(sum, more[i]);
    to = sum;
  }
}

// Bits below the widest word that divides every address and size are 0.
std::uintptr_t bits_of(const Segment& s) {
  const auto strides = static_cast<std::uintptr_t>(s.rows > 1 ? s.from_stride | s.to_stride : 0);
  return reinterpret_cast<std::uintptr_t>(s.from) | reinterpret_cast<std::uintptr_t>(s.to) |
         static_cast<std::uintptr_t>(s.bytes) | strides;
}

// A grid for the largest segment, with as many blocks for each of the others.
template <class Word>
Shape shape_of(std::span<const Segment> some) {
  Index largest = 0;
  for (const Segment& s : some) largest = max_of(largest, s.rows * s.bytes / Index{sizeof(Word)});
  constexpr Index kPerThread = 4, kMost = 512;
  const Index blocks = max_of(1, min_of((largest + kThreads * kPerThread - 1) / (kThreads * kPerThread), kMost));
  return {.blocks = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(some.size())), .threads = dim3(kThreads)};
}

template <class Word, bool kAdd>
void launch_batch(std::span<const Segment> some, cudaStream_t stream) {
  Batch batch{};
  std::copy(some.begin(), some.end(), batch.segments);
  launch(move_segments<Word, kAdd>, shape_of<Word>(some), stream, batch);
}

// Segments [first, first + kStack) of at most kLists lists.
void launch_stacks(std::span<const std::vector<Segment>> lists, std::size_t first, bool replace, cudaStream_t stream) {
  const std::span<const Segment> all = lists.front();
  const auto some = all.subspan(first, std::min<std::size_t>(kStack, all.size() - first));
  Stacks stacks{};
  std::copy(some.begin(), some.end(), stacks.segments);
  std::uintptr_t bits = 0;
  for (std::size_t list = 0; list < lists.size(); ++list) {
    for (std::size_t i = 0; i < some.size(); ++i) {
      bits |= bits_of(lists[list][first + i]);
      if (list > 0) stacks.more[i][list - 1] = lists[list][first + i].from;
    }
  }
  const auto count = static_cast<int>(lists.size());
  if (bits % sizeof(float4) == 0)
    launch(sum_stacks<float4>, shape_of<float4>(some), stream, stacks, count, replace);
  else
    launch(sum_stacks<float>, shape_of<float>(some), stream, stacks, count, replace);
}

// Extends `last` by the next rows if the strides continue.
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
    // As many rows as both sides have alike. A piece longer than the other side's becomes several adjacent rows.
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

bool alike(std::span<const Segment> a, std::span<const Segment> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Segment& s, const Segment& t) {
    return s.to == t.to && s.rows == t.rows && s.bytes == t.bytes && s.from_stride == t.from_stride &&
           s.to_stride == t.to_stride;
  });
}

void sum_f32(std::span<const std::vector<Segment>> lists, bool replace, cudaStream_t stream) {
  for (; !lists.empty(); lists = lists.subspan(std::min<std::size_t>(kLists, lists.size())), replace = false) {
    const auto some = lists.first(std::min<std::size_t>(kLists, lists.size()));
    for (std::size_t first = 0; first < some.front().size(); first += kStack)
      launch_stacks(some, first, replace, stream);
  }
}

}  // namespace weft::cuda
