#include "comm/message_memory.h"

#include <cstdint>
#include <cstring>
#include <vector>

#include "comm/blocks.h"
#ifdef WEFT_WITH_CUDA
#include "comm/cuda/message_memory.h"
#endif
#include "index.h"
#include "text.h"

namespace weft {
namespace {

// A checksum of bytes in order, which does not depend on how they are cut into pieces.
class Checksum {
 public:
  void add(const unsigned char* data, Index bytes) {
    while (bytes > 0 && (fill_ > 0 || bytes < Index{sizeof(word_)})) {  // up to the next whole word
      reinterpret_cast<unsigned char*>(&word_)[fill_++] = *data++;
      --bytes;
      if (fill_ == sizeof(word_)) {
        mix(word_);
        fill_ = 0;
      }
    }
    for (; bytes >= Index{sizeof(word_)}; data += sizeof(word_), bytes -= Index{sizeof(word_)}) {
      std::uint64_t word = 0;
      std::memcpy(&word, data, sizeof(word));
      mix(word);
    }
    if (bytes > 0) add(data, bytes);
  }
  std::uint64_t value() {
    if (fill_ > 0) {
      std::memset(reinterpret_cast<unsigned char*>(&word_) + fill_, 0, sizeof(word_) - fill_);
      mix(word_);
      fill_ = 0;
    }
    return sum_;
  }

 private:
  void mix(std::uint64_t word) {
    sum_ = (sum_ ^ word) * 0x9e3779b97f4a7c15u;
    sum_ ^= sum_ >> 29;
  }

  std::uint64_t sum_ = 0x2545f4914f6cdd1du, word_ = 0;
  std::size_t fill_ = 0;
};

class HostMessages final : public MessageMemory {
 public:
  Block take(Index bytes) override {
    memory_.emplace_back(at(bytes) / sizeof(double) + 1);
    return {memory_.back().data(), 1, 1, bytes, bytes, bytes};
  }
  void move(std::span<const Block> from, std::span<const Block> to, Message::Combine how) override {
    move_blocks(from, to, how);
  }
  void write(const void* from, const Block& to) override {
    if (to.bytes > 0) std::memcpy(to.data, from, at(to.bytes));
  }
  void read(const Block& from, void* to) override {
    if (from.bytes > 0) std::memcpy(to, from.data, at(from.bytes));
  }
  void sum(std::span<const Block> blocks, void* to) override {
    Checksum sum;
    for (const Block& given : blocks) {
      const Block b = merged(given);
      for (Index row = 0; row < b.rows; ++row)
        for (Index part = 0; part < b.parts; ++part)
          sum.add(static_cast<const unsigned char*>(b.data) + row * b.row_stride + part * b.part_stride, b.bytes);
    }
    const std::uint64_t value = sum.value();
    std::memcpy(to, &value, sizeof(value));
  }

 private:
  std::vector<std::vector<double>> memory_;
};

}  // namespace

std::unique_ptr<MessageMemory> memory_of(const Place& place) {
  if (place.kind == DeviceKind::cpu) return std::make_unique<HostMessages>();
#ifdef WEFT_WITH_CUDA
  return cuda::make_message_memory(place);
#else
  throw Error(text("messages on ", name(place), ", and a build of Weft without CUDA"),
              "build it with -DWEFT_CUDA=ON, or use tensors on the CPU");
#endif
}

}  // namespace weft
