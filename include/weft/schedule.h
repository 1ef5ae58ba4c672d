// Schedules: which rows move, then which slices are attended, step by step. A schedule is a value: the executor runs
// it and traffic() counts its bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/dtype.h"
#include "weft/layout.h"
#include "weft/mask.h"
#include "weft/plan.h"
#include "weft/slice.h"
#include "weft/traffic.h"

namespace weft {

// A schedule of the registry, by its place there. The names below are those that come with Weft; a schedule that was
// added to the registry has a kind too: schedule_kind(name).
enum class ScheduleKind : std::uint8_t { all_gather, ring, all_to_all, hybrid, exact, mesh };
// Every schedule of the registry.
WEFT_API std::span<const ScheduleKind> schedule_kinds();
// The name of a schedule, such as "ring", and one line about it.
WEFT_API std::string_view name(ScheduleKind kind);
WEFT_API std::string_view about(ScheduleKind kind);
// What other frameworks call it: "p2p" for ring, "a2a" and "ulysses" for all_to_all, "a2a+p2p" and "usp" for hybrid.
WEFT_API std::span<const std::string_view> other_names(ScheduleKind kind);
// By its name, or by one of its other names. Error lists the names.
WEFT_API ScheduleKind schedule_kind(std::string_view name);

// Order of gathered keys. In sequence order a row's bits depend on neither ranks nor layout; rank order takes any
// stride.
enum class KeyOrder : std::uint8_t { automatic, sequence, rank };  // automatic: sequence where the layout can
// The name of an order, such as "sequence", and the order of a name; the Error for any other lists the names.
WEFT_API std::string_view name(KeyOrder order);
WEFT_API KeyOrder key_order(std::string_view name);

// The options of all schedules. A schedule ignores those that it does not have (uses()). Each field has a line in the
// table of src/schedule/options.cpp, which says what it means.
struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::all_gather;
  KeyOrder key_order = KeyOrder::automatic;
  Index head_groups = 1;
  Index ulysses = 2;
  ScheduleKind outer = ScheduleKind::ring;
  Index stages = 4;
  Index ranks_per_step = 2;
  Index node = 1;
  Index query_ranks = 0;  // 0: by ranks and heads
};

// A line of the table of options. Flags of the command, keywords of Python, words(), fingerprints and the table of
// docs/schedules.md are made from it. One of the three pointers is set.
struct WEFT_API ScheduleOption {
  template <class T>
  using Field = T ScheduleOptions::*;

  std::string_view name, help;
  Field<Index> whole = nullptr;  // from `least` on
  Index least = 1;
  Field<KeyOrder> order = nullptr;
  Field<ScheduleKind> schedule = nullptr;

  std::string value(const ScheduleOptions& options) const;  // "4", "sequence", "ring"
  Index number(const ScheduleOptions& options) const;       // the same as a number
  bool is_default(const ScheduleOptions& options) const { return number(options) == number({}); }
  // Error for what it cannot be.
  void set(ScheduleOptions& options, std::string_view value) const;
  std::vector<std::string_view> names() const;  // that it can be; none if it is a whole number
};
// The table of options, and its line of that name; the Error for any other lists the names.
WEFT_API std::span<const ScheduleOption> schedule_options();
WEFT_API const ScheduleOption& schedule_option(std::string_view name);
// Whether a schedule with these options looks at this one; of the kind alone, whether it can.
WEFT_API bool uses(const ScheduleOptions& options, std::string_view option);
WEFT_API bool uses(ScheduleKind kind, std::string_view option);
// Error for numbers that no schedule can have, whether this one uses them or not.
WEFT_API void check_options(const ScheduleOptions& options);
// The name, and what is used and not the default: "ring", "all_gather head_groups=4", "hybrid ulysses=8".
WEFT_API std::string words(const ScheduleOptions& options);

// Heads of a model. Query head h uses K/V head h / (q / k), or map[h].
struct Heads {
  Index q = 1, k = 1;
  std::span<const Index> map = {};
};

// Rows of a buffer, to or from a peer.
struct PeerRows {
  Index peer = 0;
  std::vector<Range> rows;
};

// The first of two hops: a row that ranks of another node want goes to that node once, to the rank at the sender's
// place in the node, which passes it on. Gradients come back the same way: added up inside the node, then one row
// leaves it.
struct Relay {
  std::vector<PeerRows> sends;     // rows of the own K/V, to other nodes
  std::vector<PeerRows> receives;  // rows of the relay buffer
  Index rows = 0;                  // of the relay buffer
  std::vector<PeerRows> passes;    // rows of the relay buffer, to the ranks of the node, this one included
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
  // shift: rows of this step's buffer that travel no further, whose gradients go home to their owner; and rows of the
  // own K/V whose gradients come back in this step.
  std::vector<PeerRows> home = {}, back = {};
  // gather: equal parts of all ranks, in their order, so that transports that have an all-gather of their own use it,
  // and for the gradients their reduce-scatter. Bytes and messages are the same.
  bool collective = false;
  // With it, `sends` stay inside the node, and `receives` are those of the second hop: first what the ranks of the node
  // own, then what they pass on.
  std::optional<Relay> relay = {};
};

// Queries on their way to ranks that attend them against keys of their own, and what these make of them on its way
// back. Forward: Q, and partial states in return, which the owner merges; backward: Q, dO, O and LSE, and dQ, which it
// adds.
struct QueryMove {
  std::vector<PeerRows> sends;     // rows of the own queries
  std::vector<PeerRows> receives;  // rows of the query buffer, behind the own
};

// One step of a rank: what must arrive, then what is attended.
struct Step {
  std::optional<Move> move = {};  // none: the step reads the rank's own K/V in place..
  bool again = false;             // ..or the keys of the step before once more
  Index key_rows = 0;             // of the buffer
  // Rows of the query buffer: all, or with query moves the own, or some of other ranks'.
  Range queries = {};
  Index plan = 0;  // of Schedule::plans: these rows x rows of the buffer
  Range heads_q = {}, heads_k = {};
  Index head_group = 0;  // of Swap::head_groups, whose heads these are
};

// Heads that are swapped together, by rank of the group; empty where there are fewer heads than ranks.
struct HeadGroup {
  std::vector<Range> q, k;
};

// The all-to-all of Ulysses: before the steps each rank of a group gets all rows of some heads, and afterwards it gives
// the results back. K/V heads that several ranks need go to each of them, and their gradients come home and are added.
// With several head groups, each is swapped in before its own steps, while those of the one before are computed.
struct WEFT_API Swap {
  Range group;                          // ranks
  std::vector<Range> heads_q, heads_k;  // of all head groups, by rank of the group
  std::vector<Index> head_map;          // of this rank's heads, after the swap
  std::vector<HeadGroup> head_groups;   // one after another; the steps of each stand together
  // Whether a rank of the group gets K and V with a head group: not if it has the same K/V heads as the one before.
  bool brings_keys(Index head_group, Index member) const;
  // Whether their gradients go home after it: not if the next one has the same K/V heads.
  bool ends_keys(Index head_group, Index member) const;
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
  std::optional<Swap> swap;     // with it, steps are in rows and heads of the swapped tensors
  // With them, so many neighbouring ranks attend each other's queries, each against its share of the keys. The query
  // buffer holds the own rows, then what the moves bring. Results come home, and are merged, in the order of the moves.
  Index query_ranks = 1;
  std::vector<QueryMove> query_moves;
  std::vector<Range> seeing;  // own rows that see a key on any rank; only with query moves
  std::vector<Plan> plans;
  std::vector<Step> steps;

  Index ulysses() const { return swap ? swap->group.size() : 1; }  // ranks of a group
  // Heads of the steps: all, or those that the swap brings.
  Index step_heads_q() const;
  Index step_heads_k() const;
  Index query_rows() const;  // of the query buffer
};

// Error for what the capability table refuses, with its reason.
WEFT_API Schedule make_schedule(const Problem& problem, const Layouts& layouts, Index rank, const Heads& heads,
                                const ScheduleOptions& options = {});

// The tensors, as far as bytes depend on them.
struct TensorShape {
  DType dtype = DType::f32;
  Index dim_qk = 0, dim_v = 0;
  std::optional<DType> out = {}, dout = {}, dq = {};  // as dtype if not given
  std::optional<DType> lse = DType::f32;              // none: not asked for
  bool max_logit = false;                             // asked for in the forward
  bool dsink = false;                                 // asked for in the backward
  Index source = 0;  // numbers a row of the source that moves in place of K and V (Source in executor.h); 0: these move
  bool keeps_expanded = false;  // K and V that are made of it are kept from the forward for the backward
};

// What the rank's communicator will count in one pass, to the byte. `node`: ranks of a node, if the communicator was
// told (Communicator::set_node); 0: the schedule's option.
WEFT_API Traffic traffic(const Schedule& schedule, const TensorShape& shape, Pass pass, Index node = 0);

}  // namespace weft
