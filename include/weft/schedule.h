// Schedules: which rows move, then which slices are attended, step by step. A schedule is a value: the executor runs it,
// traffic() counts it, and both say the same.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "weft/communicator.h"
#include "weft/config.h"
#include "weft/kernel.h"
#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/plan.h"
#include "weft/slice.h"

namespace weft {

enum class ScheduleKind { all_gather, ring };
WEFT_API std::span<const ScheduleKind> schedule_kinds();
WEFT_API std::string_view name(ScheduleKind kind);
WEFT_API ScheduleKind schedule_kind(std::string_view name);  // Error lists the names

// Of gathered keys. In sequence order a row's bits depend on neither ranks nor layout; rank order takes any stride.
enum class KeyOrder { automatic, sequence, rank };  // automatic: sequence where the layout can
WEFT_API std::string_view name(KeyOrder order);
WEFT_API KeyOrder key_order(std::string_view name);

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::all_gather;
  KeyOrder key_order = KeyOrder::automatic;  // all_gather
  Index head_groups = 1;  // all_gather: K/V heads come in so many groups, each under the compute of the one before
};

// Query head h uses K/V head h / (q / k), or map[h].
struct Heads {
  Index q = 1, k = 1;
  std::span<const Index> map = {};
};

// Rows of a buffer, to or from a peer.
struct PeerRows {
  Index peer = 0;
  std::vector<Range> rows;
};

// K and V on their way into a step's buffer.
struct Move {
  enum class Kind {
    gather,  // from the ranks' own K/V; gradients return to them and are added
    shift,   // from the buffer of the step before; gradients travel on with their keys and come home
  };
  Kind kind = Kind::gather;
  std::vector<PeerRows> sends;     // rows of the own K/V (gather) or of the last step's buffer (shift)
  std::vector<PeerRows> receives;  // rows of this step's buffer
};

struct Step {
  std::optional<Move> move = {};  // none: the step reads the rank's own K/V where they lie
  Index key_rows = 0;             // of the buffer
  Index plan = 0;                 // slices: rows of the rank's queries x rows of the buffer
  Range heads_q = {}, heads_k = {};
};

// What one rank does.
struct Schedule {
  ScheduleOptions options;
  Problem problem;
  Layouts layouts;
  Index rank = 0, ranks = 1;
  Index q_rows = 0, k_rows = 0;  // of the rank's own tensors
  Index heads_q = 1, heads_k = 1;
  std::vector<Plan> plans;
  std::vector<Step> steps;

  // No query head is in two steps, so that results need no merging.
  bool heads_once() const;
};

// Error for what the capability table refuses, with its reason.
WEFT_API Schedule make_schedule(const Problem& problem, const Layouts& layouts, Index rank, const Heads& heads,
                                const ScheduleOptions& options = {});

// What decides bytes beside the schedule.
struct TensorShape {
  DType dtype = DType::f32;
  Index dim_qk = 0, dim_v = 0;
  bool max_logit = false;  // is asked for in the forward
  bool dsink = false;      // .. in the backward
};

// What the rank's communicator will count in one pass, to the byte.
WEFT_API Traffic traffic(const Schedule& schedule, const TensorShape& shape, Pass pass);

}  // namespace weft
