// Bytes moved between lists of blocks that may be cut differently, without packing. Exported for transports that are
// libraries of their own; not installed.
#pragma once

#include <cstddef>
#include <span>

#include "index.h"
#include "weft/communicator.h"

namespace weft {

// Where a rank stands in a list of all.
constexpr std::size_t slot(Index rank) { return at(rank); }

// The same bytes in as few pieces as can be: parts, then rows, that lie side by side become one.
WEFT_API Block merged(Block block);

// Whether a block can be read and written as the numbers that are added: aligned, and cut between numbers only.
WEFT_API bool holds_numbers(const Block& block, Message::Combine how);
// Bytes of such a number.
constexpr Index number_size(Message::Combine how) {
  return how == Message::Combine::add_f64 ? size_of(DType::f64)
         : how == Message::Combine::add   ? size_of(DType::f32)
                                          : 1;
}

// Both lists hold as many bytes; to add, all blocks hold the numbers. Lists may be the same memory, but not overlap
// otherwise.
WEFT_API void move_blocks(std::span<const Block> from, std::span<const Block> to, Message::Combine how);

}  // namespace weft
