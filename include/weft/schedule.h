// Schedules: which rows move, then which slices are attended, step by step. A schedule is a value: the executor runs
// it, traffic() counts it, and both say the same.
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

enum class ScheduleKind { all_gather, ring, all_to_all, hybrid, exact };
WEFT_API std::span<const ScheduleKind> schedule_kinds();
WEFT_API std::string_view name(ScheduleKind kind);
// Error lists the names. Other frameworks' words are taken too: p2p is ring, a2a all_to_all, a2a+p2p hybrid.
WEFT_API ScheduleKind schedule_kind(std::string_view name);

// Of gathered keys. In sequence order a row's bits depend on neither ranks nor layout; rank order takes any stride.
enum class KeyOrder { automatic, sequence, rank };  // automatic: sequence where the layout can
WEFT_API std::string_view name(KeyOrder order);
WEFT_API KeyOrder key_order(std::string_view name);

struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::all_gather;
  KeyOrder key_order = KeyOrder::automatic;  // all_gather
  Index head_groups = 1;  // all_gather: K/V heads come in so many groups, each under the compute of the one before
  // hybrid: a mesh of `inside` x ranks / inside. Ranks that follow each other swap heads for sequence, and `across`
  // (all_gather or ring) brings the keys of the other groups.
  Index inside = 2;
  ScheduleKind across = ScheduleKind::ring;
  Index stages = 4;  // exact: rows of other ranks come in so many steps, each under the compute of the one before
  // ring: keys of so many ranks in a step. Fewer steps, in which rows' sums are read and written; larger buffers.
  Index abreast = 2;
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
    send,    // the same, of the rows that are seen
    shift,   // from the own K/V first, then from the buffer of the step before; gradients travel on with their keys
  };
  Kind kind = Kind::gather;
  std::vector<PeerRows> sends;     // rows of the own K/V, or of the last step's buffer (shift)
  std::vector<PeerRows> receives;  // rows of this step's buffer
  // shift: rows of this step's buffer that travel no further, whose gradients go home; rows of the own K/V whose come.
  std::vector<PeerRows> home = {}, back = {};
};

struct Step {
  std::optional<Move> move = {};  // none: the step reads the rank's own K/V where they lie
  Index key_rows = 0;             // of the buffer
  Index plan = 0;                 // slices: rows of the rank's queries x rows of the buffer
  Range heads_q = {}, heads_k = {};
};

// Heads for sequence: before the steps each rank of a group gets all rows of some heads, and afterwards gives the
// results back. K/V heads that several ranks need go to each of them, and their gradients come home and are added.
struct Swap {
  Range group;                          // ranks
  std::vector<Range> heads_q, heads_k;  // that each of them gets; none if there are fewer heads than ranks
  std::vector<Index> head_map;          // of this rank's heads, once swapped
};

// What one rank does.
struct Schedule {
  ScheduleOptions options;
  Problem problem;
  Layouts layouts;
  Index rank = 0, ranks = 1;
  Index q_rows = 0, k_rows = 0;  // of the rank's own tensors
  Index heads_q = 1, heads_k = 1;
  std::vector<Index> head_map;  // as given
  std::optional<Swap> swap;     // steps are in rows and heads of the swapped tensors
  std::vector<Plan> plans;
  std::vector<Step> steps;

  Index ranks_inside() const { return swap ? swap->group.size() : 1; }
  // Heads that the steps are about: all, or those that the swap brings.
  Index step_heads_q() const;
  Index step_heads_k() const;
};

// Error for what the capability table refuses, with its reason.
WEFT_API Schedule make_schedule(const Problem& problem, const Layouts& layouts, Index rank, const Heads& heads,
                                const ScheduleOptions& options = {});

// What decides bytes beside the schedule.
struct TensorShape {
  DType dtype = DType::f32;
  Index dim_qk = 0, dim_v = 0;
  std::optional<DType> out = {}, dout = {}, dq = {};  // as dtype if not given
  std::optional<DType> lse = DType::f32;              // none: not asked for
  bool max_logit = false;                             // ..
  bool dsink = false;                                 // .. in the backward
};

// What the rank's communicator will count in one pass, to the byte.
WEFT_API Traffic traffic(const Schedule& schedule, const TensorShape& shape, Pass pass);

}  // namespace weft
