// Copies and sums between lists of blocks that may be cut differently, without packing. Exported for transports that
// are libraries of their own; not installed.
#pragma once

#include <cstddef>
#include <span>

#include "index.h"
#include "weft/communicator.h"

namespace weft {

// The same bytes in as few pieces as possible: adjacent parts, then adjacent rows, become one.
WEFT_API Block merged(Block block);

// Whether a block can be read and written as the numbers that are added: aligned, and cut between numbers only.
WEFT_API bool holds_numbers(const Block& block, Message::Combine how);
// The size of such a number in bytes.
constexpr Index number_size(Message::Combine how) {
  return how == Message::Combine::add_f64 ? size_of(DType::f64)
         : how == Message::Combine::add   ? size_of(DType::f32)
                                          : 1;
}

// Both lists must hold the same number of bytes; to add, all blocks must hold numbers (holds_numbers). The lists may be
// the same memory, but must not overlap otherwise.
WEFT_API void move_blocks(std::span<const Block> from, std::span<const Block> to, Message::Combine how);

}  // namespace weft
