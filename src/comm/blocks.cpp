#include "comm/blocks.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "index.h"

namespace weft {

namespace {

template <class T>
void add_numbers(const char* from_bytes, char* to_bytes, Index bytes) {
  const T* __restrict from = reinterpret_cast<const T*>(from_bytes);
  T* __restrict to = reinterpret_cast<T*>(to_bytes);
  for (Index i = 0; i < bytes / Index{sizeof(T)}; ++i) to[i] += from[i];
}

void move_piece(const char* from, char* to, Index bytes, Message::Combine how) {
  switch (how) {
    case Message::Combine::add:
      return add_numbers<float>(from, to, bytes);
    case Message::Combine::add_f64:
      return add_numbers<double>(from, to, bytes);
    case Message::Combine::replace:
      if (from != to) std::memcpy(to, from, at(bytes));  // in place: already there
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

bool holds_numbers(const Block& block, Message::Combine how) {
  const Index size = number_size(how);
  if (block.size() == 0) return true;
  if (reinterpret_cast<std::uintptr_t>(block.data) % static_cast<std::uintptr_t>(size) != 0 || block.bytes % size != 0)
    return false;
  return (block.rows == 1 || block.row_stride % size == 0) && (block.parts == 1 || block.part_stride % size == 0);
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
