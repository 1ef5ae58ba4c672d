#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "comm/blocks.h"
#include "comm/cuda/message_memory.h"
#include "comm/cuda/segments.h"
#include "cuda/handle_pool.h"
#include "cuda/launch.h"
#include "index.h"

namespace weft::cuda {
namespace {

constexpr int kSumThreads = 256;

// A block whose bytes begin at byte `first` of its list.
struct SummedBlock {
  Block block;
  Index first = 0;
};
constexpr int kSummed = 56;  // as many as fit into the 4 KB of kernel parameters
struct SummedBlocks {
  SummedBlock blocks[kSummed];
};
static_assert(sizeof(SummedBlocks) <= 4000);

// An odd number for each place, so that no change of one byte is lost, and bytes that change places show.
__device__ std::uint64_t weight(std::uint64_t place) {
  std::uint64_t x = (place + 1) * 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  return (x ^ (x >> 27)) | 1;
}

// Adds to `sum` each byte of the blocks, plus one, times the weight of its place.
__global__ void sum_blocks(SummedBlocks batch, unsigned long long* sum) {
  const SummedBlock s = batch.blocks[blockIdx.y];
  const Block& b = s.block;
  const Index size = b.rows * b.parts * b.bytes, step = static_cast<Index>(gridDim.x) * kSumThreads;
  std::uint64_t mine = 0;
  for (Index i = static_cast<Index>(blockIdx.x) * kSumThreads + threadIdx.x; i < size; i += step) {
    const Index piece = i / b.bytes, row = piece / b.parts, part = piece % b.parts;
    const auto* data = static_cast<const unsigned char*>(b.data) + row * b.row_stride + part * b.part_stride;
    mine += (data[i % b.bytes] + std::uint64_t{1}) * weight(static_cast<std::uint64_t>(s.first + i));
  }
  for (int lanes = 16; lanes > 0; lanes /= 2) mine += __shfl_down_sync(0xffffffffu, mine, lanes);
  if (threadIdx.x % 32 == 0) atomicAdd(sum, static_cast<unsigned long long>(mine));
}

void launch_sums(std::span<const SummedBlock> some, unsigned long long* sum, cudaStream_t stream) {
  SummedBlocks batch{};
  std::copy(some.begin(), some.end(), batch.blocks);
  Index largest = 0;
  for (const SummedBlock& s : some) largest = max_of(largest, s.block.size());
  constexpr Index kPerThread = 16, kMost = 1024;
  const Index blocks = max_of(1, min_of((largest + kSumThreads * kPerThread - 1) / (kSumThreads * kPerThread), kMost));
  launch(
      sum_blocks,
      {.blocks = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(some.size())), .threads = dim3(kSumThreads)},
      stream, batch, sum);
}

class GpuMessages final : public MessageMemory {
 public:
  explicit GpuMessages(const Place& place) : device_(place.device), stream_(static_cast<cudaStream_t>(place.stream)) {}
  ~GpuMessages() override {
    const DeviceGuard on(device_, std::nothrow);
    memory_.clear();
  }

  Block take(Index bytes) override {
    const DeviceGuard on(device_);
    memory_.emplace_back(at(max_of(bytes, 1)), stream_);
    return {memory_.back().get(), 1, 1, bytes, bytes, bytes};
  }
  void move(std::span<const Block> from, std::span<const Block> to, Message::Combine how) override {
    const DeviceGuard on(device_);
    const std::vector<Segment> all = segments(from, to);
    adds(how) ? add_f32(all, stream_) : copy(all, stream_);
  }
  void write(const void* from, const Block& to) override {
    const DeviceGuard on(device_);
    if (to.bytes > 0) WEFT_CUDA(cudaMemcpyAsync(to.data, from, at(to.bytes), cudaMemcpyHostToDevice, stream_));
  }
  // Through pinned memory, because only copies to pinned memory are asynchronous: others keep the driver busy.
  void read(const Block& from, void* to) override {
    if (from.bytes == 0) return;
    const DeviceGuard on(device_);
    const PooledPinned pinned(at(from.bytes));
    synchronize_on_failure(stream_, [&] {
      WEFT_CUDA(cudaMemcpyAsync(pinned.get(), from.data, at(from.bytes), cudaMemcpyDeviceToHost, stream_));
      WEFT_CUDA(cudaStreamSynchronize(stream_));
    });
    std::memcpy(to, pinned.get(), at(from.bytes));
  }
  void sum(std::span<const Block> blocks, void* to) override {
    const DeviceGuard on(device_);
    std::vector<SummedBlock> all;
    Index first = 0;
    for (const Block& given : blocks) {
      if (given.size() == 0) continue;
      all.push_back({merged(given), first});
      first += given.size();
    }
    WEFT_CUDA(cudaMemsetAsync(to, 0, sizeof(std::uint64_t), stream_));
    for (std::size_t begin = 0; begin < all.size(); begin += kSummed)
      launch_sums(std::span(all).subspan(begin, std::min<std::size_t>(kSummed, all.size() - begin)),
                  static_cast<unsigned long long*>(to), stream_);
  }

 private:
  int device_;
  cudaStream_t stream_;
  std::vector<StreamArray<char>> memory_;
};

}  // namespace

std::unique_ptr<MessageMemory> make_message_memory(const Place& place) { return std::make_unique<GpuMessages>(place); }

}  // namespace weft::cuda
