#include "comm/blocks.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "comm/pieces.h"

namespace weft {

namespace {

void add_f32(const float* __restrict from, float* __restrict to, Index count) {
  for (Index i = 0; i < count; ++i) to[i] += from[i];
}

void move_piece(const char* from, char* to, Index bytes, Message::Combine how) {
  if (how == Message::Combine::add) {
    add_f32(reinterpret_cast<const float*>(from), reinterpret_cast<float*>(to), bytes / Index{sizeof(float)});
  } else if (from != to) {  // in place: already there
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

}  // namespace

Block merged(Block block) {
  if (block.parts == 1 || block.part_stride == block.bytes) {
    block.bytes *= block.parts;
    block.parts = 1;
    block.part_stride = block.bytes;
  }
  if (block.parts == 1 && (block.rows == 1 || block.row_stride == block.bytes)) {
    block.bytes *= block.rows;
    block.rows = 1;
    block.row_stride = block.part_stride = block.bytes;
  }
  return block;
}

bool holds_f32(const Block& block) {
  constexpr Index kSize = sizeof(float);
  if (block.size() == 0) return true;
  if (reinterpret_cast<std::uintptr_t>(block.data) % kSize != 0 || block.bytes % kSize != 0) return false;
  return (block.rows == 1 || block.row_stride % kSize == 0) && (block.parts == 1 || block.part_stride % kSize == 0);
}

void move_blocks(std::span<const Block> from, std::span<const Block> to, Message::Combine how) {
  Pieces source(from), target(to);
  while (!source.done() && !target.done()) {
    const Index bytes = min_of(source.left(), target.left());
    move_piece(source.data(), target.data(), bytes, how);
    source.take(bytes);
    target.take(bytes);
  }
}

}  // namespace weft
