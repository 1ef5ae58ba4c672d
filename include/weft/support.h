// The capability table: what works with what and, if not, why. Every entry point asks it; `weft explain --support`
// prints it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weft/dtype.h"
#include "weft/schedule.h"

namespace weft {

// What a caller wants to combine. Masks, head counts, head dims, sinks, softcap and max_logit are not here: they work
// with everything (and what a kernel cannot do, it says itself).
struct Use {
  std::optional<ScheduleKind> schedule = {};  // none: one rank, attend()
  KeyOrder key_order = KeyOrder::automatic;
  Index stride_q = 1, stride_k = 1;  // of the layouts: the number of ranks if striped
  DType dtype = DType::f32;
  bool bias = false;
  double dropout = 0;
  bool device_plan = false;     // slices in device memory
  bool device_lengths = false;  // cu_seqlens in device memory, as in CUDA graphs (capacity_schedule)
  bool source = false;          // rows of a source move in place of K and V
};

// Why something is not supported, and the way out.
struct Refusal {
  std::string problem, remedy;
};
// The reason why a combination is refused; none if it is supported.
WEFT_API std::optional<Refusal> refusal(const Use& use);
// Throws the refusal as Error.
WEFT_API void require_support(const Use& use);

// A row of the table: one thing that is asked for, with everything else as usual.
struct SupportRow {
  std::string group, name;                        // "layout", "striped"; "dtype", "bf16"; "mask", "window"; ...
  Use use;                                        // `schedule` is set by the column
  std::optional<Refusal> one_rank;                // why not on one rank
  std::vector<std::optional<Refusal>> schedules;  // why not by each schedule, in the order of schedule_kinds()
};
// The whole capability table.
WEFT_API std::vector<SupportRow> support_table();

}  // namespace weft
