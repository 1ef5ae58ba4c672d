// A list of blocks as the stretches of memory that it is made of.
#pragma once

#include <span>

#include "comm/blocks.h"

namespace weft {

// The pieces of a list of blocks, one after another; the current one from where it was left.
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

  // Whole pieces from here on that lie stride() apart, at least 1; 1 if the current one is not whole.
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
  void open() {  // the first piece of the first block that has one
    while (!blocks_.empty()) {
      block_ = merged(blocks_.front());
      blocks_ = blocks_.subspan(1);
      row_ = part_ = 0;
      if (block_.size() > 0) return at();
    }
  }
  void next() {
    if (++part_ < block_.parts) return at();
    part_ = 0;
    if (++row_ < block_.rows) return at();
    open();
  }
  void at() {
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
