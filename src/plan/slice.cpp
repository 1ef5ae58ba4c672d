#include "weft/slice.h"

#include "plan/visible_pairs.h"

namespace weft {

Index visible_pairs(const Slice& s) { return visible_pairs(s, Run{0, s.q_begin, s.q_end - s.q_begin, 1}); }

}  // namespace weft
