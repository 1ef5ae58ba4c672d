#include <utility>

#include "plan/user_slices.h"
#include "plan/views.h"
#include "text.h"
#include "weft/error.h"
#include "weft/mask.h"

namespace weft {
namespace {

void check_window(std::string_view side, Index value) {
  if (value < -1)
    throw Error(text("window ", side, " = ", value, " is below -1"), "use -1 for unlimited, or 0 or more");
}

void check_plain(const Mask& mask) {
  check_window("left", mask.left);
  check_window("right", mask.right);
  if (mask.chunk && *mask.chunk < 1)
    throw Error(text("chunk size ", *mask.chunk, " is below 1"),
                "give 1 or more, or none for attention without chunks");
}

}  // namespace

Problem::Problem(Packing packing, Mask mask) {
  check_plain(mask);
  if (mask.slices) {
    if (mask.causal || mask.left != -1 || mask.right != -1 || mask.chunk)
      throw Error("a mask has its own slices and also causal, window or chunk",
                  "write the band of each slice into its lo and hi, and leave the rest at its default");
    mask.slices = checked_slices(std::move(*mask.slices), packing);
  }
  data_ = std::make_shared<const Data>(Data{std::move(packing), std::move(mask)});
}

std::vector<Slice> Problem::global_slices() const {
  if (mask().slices) return *mask().slices;
  std::vector<Slice> slices;
  const StreamView q = view(packing().q()), k = view(packing().k());
  for (Index i = 0; i < packing().sequences(); ++i)
    SequenceMask(view(mask()), q.real(i), k.real(i)).for_each(q.real(i), [&](const Slice& s) {
      const Slice t = trimmed(s, false);
      if (t.q_begin < t.q_end) slices.push_back(t);
    });
  return slices;
}

Index Problem::visible_pairs() const {
  Index pairs = 0;
  for (const Slice& s : global_slices()) pairs += weft::visible_pairs(s);
  return pairs;
}

}  // namespace weft
