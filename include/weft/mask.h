// Masks, and problems: a packing and its mask.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "weft/packing.h"
#include "weft/slice.h"

namespace weft {

// Where the diagonal of a mask lies if queries and keys differ in number.
enum class Align { top_left, bottom_right };

// Which keys a query may see. With query position i, key position j, and diag = 0 (top_left) or len_k - len_q
// (bottom_right): visible iff
//   -left <= j - i - diag <= right, and, if chunked, floor(j / chunk) == floor((i + diag) / chunk).
// left, right: -1 is unlimited; causal caps right at 0.
struct Mask {
  bool causal = false;
  Align align = Align::top_left;
  Index left = -1, right = -1;
  std::optional<Index> chunk = {};
  // Instead of all of the above: the caller's own slices in global tokens, no two of which may share a pair.
  std::optional<std::vector<Slice>> slices = {};
};

// A packing and a mask, checked and immutable, the same on every rank. Cheap to copy, safe to share between threads.
class WEFT_API Problem {
 public:
  // Throws Error for a window below -1, chunk < 1, slices that overlap, leave their streams or cover padding.
  Problem(Packing packing, Mask mask);

  const Packing& packing() const { return data_->packing; }
  const Mask& mask() const { return data_->mask; }
  // The mask as slices of global tokens, every visible pair in exactly one of them, in the order of the sequences (or,
  // of a caller's own slices, in theirs: see own_slices).
  std::vector<Slice> global_slices() const;
  // The caller's own slices as plans cut them: joined where fewer show the same pairs, such as those of a node of a
  // tree and its first child. Empty if the mask has none.
  std::span<const Slice> own_slices() const { return data_->own_slices; }
  Index visible_pairs() const;

 private:
  struct Data {
    Packing packing;
    Mask mask;
    std::vector<Slice> own_slices;
  };
  std::shared_ptr<const Data> data_;
};

}  // namespace weft
