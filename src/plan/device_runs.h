// What the host knows of a RegularRuns whose offsets are in device memory; the device fills in the rest.
#pragma once

#include <string_view>

#include "plan/runs.h"
#include "weft/device_plan.h"
#include "weft/slice.h"

namespace weft {

struct RunsSpec {
  RegularRuns::Cut cut;
  bool sequence_order;
  Index tokens;  // of the stream
  Index ranks, rows;
  RunList::Members members;

  WEFT_HD RegularRuns at(Range dealt, const Index* offsets) const {
    if (sequence_order) return {RegularRuns::pieces, 1, 0, tokens, tokens, tokens, nullptr, {0, 1, 1}};
    return {cut, ranks, dealt.begin, dealt.end, rows, piece(dealt.size()), offsets, members};
  }
  WEFT_HD Index piece(Index dealt) const {
    return cut == RegularRuns::pieces   ? ceil_div(dealt, ranks)
           : cut == RegularRuns::folded ? ceil_div(dealt, 2 * ranks)
                                        : 0;
  }
  // The rows that each rank's buffer needs.
  WEFT_HD Index rows_needed(Index dealt) const {
    if (sequence_order) return 0;
    return cut == RegularRuns::folded                ? 2 * piece(dealt)
           : cut == RegularRuns::folded_per_sequence ? dealt / ranks
                                                     : ceil_div(dealt, ranks);
  }
  // What padded lengths must be multiples of.
  WEFT_HD Index multiple() const { return !sequence_order && cut == RegularRuns::folded_per_sequence ? 2 * ranks : 1; }
  Index stride() const { return !sequence_order && cut == RegularRuns::strided ? ranks : 1; }
  // The number of runs of the whole stream, or of each sequence if the layout cuts each. The last rank's two pieces are
  // one run.
  Index runs() const {
    if (sequence_order) return 1;
    if (cut != RegularRuns::folded && cut != RegularRuns::folded_per_sequence) return members.count;
    const bool last = members.first + (members.count - 1) * members.step == ranks - 1;
    return 2 * members.count - (last ? 1 : 0);
  }
  Index buffer_rows() const { return sequence_order ? tokens : members.count * rows; }
};

// Throws Error if the runs cannot be; `side` is "query" or "key".
RunsSpec runs_spec(std::string_view side, const DeviceRuns& runs, Index tokens);
void check_stream(std::string_view side, const DeviceStream& stream);
void check_mask(const Mask& mask);
// The most ranges of query rows that any slices connect.
Index device_query_ranges(const DevicePlanArgs& args);

}  // namespace weft
