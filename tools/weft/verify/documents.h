// The documents of a grid's problems, from used and padded lengths.
#pragma once

#include <vector>

#include "check/cases/case.h"

namespace weft::tool {

inline constexpr const char* kSinkNames[] = {"none", "off_by_one", "learnable"};  // by check::Case::SinkKind

struct Room {
  Index used = 0, rows = 0;  // real tokens, and rows before rounding up
};

// Each document gets its rows, rounded up to a multiple; `first`: offset of the first, `behind`: rows after the last.
inline check::Side side_of_rooms(const std::vector<Room>& rooms, Index multiple, Index first = 0, Index behind = 0) {
  check::Side side{.cu_seqlens = {0}, .cu_seqlens_padded = {first}};
  for (const Room& room : rooms) {
    side.cu_seqlens.push_back(side.cu_seqlens.back() + room.used);
    side.cu_seqlens_padded.push_back(side.cu_seqlens_padded.back() +
                                     ceil_div(max_of(room.used, room.rows), multiple) * multiple);
  }
  if (behind > 0) side.tokens = side.cu_seqlens_padded.back() + behind;
  if (side.cu_seqlens_padded == side.cu_seqlens) side.cu_seqlens_padded.clear();
  return side;
}

}  // namespace weft::tool
