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

// The position in a list of blocks: the current piece, from the first byte that was not taken.
class Pieces {
 public:
  explicit Pieces(std::span<const Block> blocks) : blocks_(blocks) { open(); }

  bool done() const { return left_ == 0; }
  char* data() const { return data_; }
  Index left() const { return left_; }

  void take(Index bytes) {
    data_ += bytes;
    left_ -= bytes;
    if (left_ == 0) next();
  }

  // How many whole pieces from here on lie stride() apart; 1 if the current one was taken in part.
  Index alike() const {
    if (left_ < block_.bytes) return 1;
    return block_.parts > 1 ? block_.parts - part_ : block_.rows - row_;
  }
  Index stride() const { return block_.parts > 1 ? block_.part_stride : block_.row_stride; }
  void take_alike(Index pieces) {
    (block_.parts > 1 ? part_ : row_) += pieces - 1;
    left_ = 0;
    next();
  }

 private:
  // Goes to the first piece of the next block that has one.
  void open() {
    while (!blocks_.empty()) {
      block_ = merged(blocks_.front());
      blocks_ = blocks_.subspan(1);
      row_ = part_ = 0;
      if (block_.size() > 0) return set_piece();
    }
  }
  void next() {
    if (++part_ < block_.parts) return set_piece();
    part_ = 0;
    if (++row_ < block_.rows) return set_piece();
    open();
  }
  void set_piece() {
    data_ = static_cast<char*>(block_.data) + row_ * block_.row_stride + part_ * block_.part_stride;
    left_ = block_.bytes;
  }

  std::span<const Block> blocks_;
  Block block_;
  Index row_ = 0, part_ = 0;
  char* data_ = nullptr;
  Index left_ = 0;
};

}  // namespace weft
