#include "weft/schedule.h"

#include <algorithm>
#include <array>

#include "index.h"
#include "schedule/schedules.h"
#include "text.h"
#include "weft/error.h"
#include "weft/support.h"

namespace weft {
namespace {

struct KindName {
  ScheduleKind kind;
  std::string_view name;
};
constexpr std::array kKinds = {KindName{ScheduleKind::all_gather, "all_gather"}, KindName{ScheduleKind::ring, "ring"},
                               KindName{ScheduleKind::all_to_all, "all_to_all"},
                               KindName{ScheduleKind::hybrid, "hybrid"}, KindName{ScheduleKind::exact, "exact"}};

// What other frameworks call them (cp_comm_type).
constexpr std::array kOtherNames = {KindName{ScheduleKind::ring, "p2p"}, KindName{ScheduleKind::all_to_all, "a2a"},
                                    KindName{ScheduleKind::hybrid, "a2a+p2p"}};

struct OrderName {
  KeyOrder order;
  std::string_view name;
};
constexpr std::array kOrders = {OrderName{KeyOrder::automatic, "auto"}, OrderName{KeyOrder::sequence, "sequence"},
                                OrderName{KeyOrder::rank, "rank"}};

template <class Table>
std::string names_of(const Table& table) {
  std::string names;
  for (const auto& entry : table) names += text(names.empty() ? "" : ", ", entry.name);
  return names;
}

constexpr Index kMaxHeads = Index{1} << 20;  // far more than any model has

void check_heads(const Heads& heads) {
  if (heads.q < 1 || heads.k < 1)
    throw Error(text("heads ", heads.q, ":", heads.k), "use at least one query head and one K/V head");
  if (heads.q > kMaxHeads || heads.k > kMaxHeads)
    throw Error(text("heads ", heads.q, ":", heads.k), text("use at most ", kMaxHeads, " of each"));
  if (heads.map.empty() && heads.q % heads.k != 0)
    throw Error(text(heads.q, " query heads over ", heads.k, " K/V heads is no whole number"),
                "give a head map, or heads that divide");
  if (!heads.map.empty() && static_cast<Index>(heads.map.size()) != heads.q)
    throw Error(text("the head map has ", heads.map.size(), " entries for ", heads.q, " query heads"),
                "give one K/V head for each query head");
  for (const Index k : heads.map) {
    if (k < 0 || k >= heads.k)
      throw Error(text("the head map names K/V head ", k, " of ", heads.k), "use heads from 0 on");
  }
}

void check_layouts(const Problem& problem, const Layouts& layouts, Index rank) {
  if (layouts.q.ranks() != layouts.k.ranks())
    throw Error(text("queries lie on ", layouts.q.ranks(), " ranks and keys on ", layouts.k.ranks()),
                "use layouts of the same number of ranks");
  if (rank < 0 || rank >= layouts.q.ranks())
    throw Error(text("rank ", rank, " of ", layouts.q.ranks()), "ranks count from 0");
  if (!(layouts.q.stream() == problem.packing().q()) || !(layouts.k.stream() == problem.packing().k()))
    throw Error("the layouts were made for other streams than the problem's", "make them from the same packing");
}

}  // namespace

std::span<const ScheduleKind> schedule_kinds() {
  static const std::vector<ScheduleKind> kinds = [] {
    std::vector<ScheduleKind> all;
    for (const KindName& entry : kKinds) all.push_back(entry.kind);
    return all;
  }();
  return kinds;
}

std::string_view name(ScheduleKind kind) {
  return std::find_if(kKinds.begin(), kKinds.end(), [&](const KindName& e) { return e.kind == kind; })->name;
}

ScheduleKind schedule_kind(std::string_view name) {
  for (const KindName& entry : kKinds)
    if (entry.name == name) return entry.kind;
  for (const KindName& entry : kOtherNames)
    if (entry.name == name) return entry.kind;
  throw Error(text("there is no schedule '", name, "'"), text("use one of ", names_of(kKinds)));
}

std::string_view name(KeyOrder order) {
  return std::find_if(kOrders.begin(), kOrders.end(), [&](const OrderName& e) { return e.order == order; })->name;
}

KeyOrder key_order(std::string_view name) {
  for (const OrderName& entry : kOrders)
    if (entry.name == name) return entry.order;
  throw Error(text("there is no key order '", name, "'"), text("use one of ", names_of(kOrders)));
}

Index Schedule::step_heads_q() const { return swap ? swap->heads_q[at(rank - swap->group.begin)].size() : heads_q; }
Index Schedule::step_heads_k() const { return swap ? swap->heads_k[at(rank - swap->group.begin)].size() : heads_k; }

namespace schedule {

void check_options(const ScheduleOptions& o) {
  const auto check = [](Index value, const std::string& problem) {
    if (value < 1) throw Error(problem, "use at least one");
    if (value > kMaxTokens) throw Error(problem, text("use at most ", kMaxTokens));
  };
  check(o.stages, text("exact in ", o.stages, " stages"));
  check(o.abreast, text("a ring with the keys of ", o.abreast, " ranks abreast"));
  check(o.head_groups, text("K/V heads gathered in ", o.head_groups, " groups (head_groups)"));
  check(o.inside, text("a mesh with ", o.inside, " ranks inside"));
}

void check_shape(const Layouts& layouts, Index heads_q, Index heads_k, const TensorShape& shape) {
  const auto past = [](Index dim) { return dim < 0 || dim > kMaxTokens; };
  // All ranks' rows of queries and keys, forward and backward: fewer than 16 tensors of 8 bytes a number.
  const double rows = static_cast<double>(layouts.q.ranks()) * static_cast<double>(layouts.q.rows() + layouts.k.rows());
  const double heads = static_cast<double>(max_of(heads_q, heads_k));
  if (past(shape.dim_qk) || past(shape.dim_v) ||
      rows * heads * static_cast<double>(shape.dim_qk + shape.dim_v) > static_cast<double>(kUnlimited / 128))
    throw Error(text("bytes of ", rows, " rows, ", heads, " heads and head dims ", shape.dim_qk, " and ", shape.dim_v),
                "give head dims of at least 0, and tensors of at most 2^53 numbers");
}

void check_mesh(const Schedule& s) {
  const Index inside = s.options.inside;
  if (inside < 1 || s.ranks % inside != 0)
    throw Error(text("a mesh with ", inside, " ranks inside does not divide ", s.ranks, " ranks"),
                "use a number of ranks inside that divides them");
  if (s.options.across != ScheduleKind::ring && s.options.across != ScheduleKind::all_gather)
    throw Error(text("hybrid with ", name(s.options.across), " across"), "use ring or all_gather across");
}

Schedule begin(const Problem& problem, const Layouts& layouts, Index rank, const Heads& heads,
               const ScheduleOptions& options) {
  check_options(options);
  check_layouts(problem, layouts, rank);
  check_heads(heads);
  require_support({.schedule = options.kind,
                   .key_order = options.key_order,
                   .stride_q = layouts.q.runs(0).stride(),
                   .stride_k = layouts.k.runs(0).stride()});
  Schedule s{.options = options,
             .problem = problem,
             .layouts = layouts,
             .rank = rank,
             .ranks = layouts.q.ranks(),
             .q_rows = layouts.q.rows(),
             .k_rows = layouts.k.rows(),
             .heads_q = heads.q,
             .heads_k = heads.k,
             .head_map = {heads.map.begin(), heads.map.end()},
             .swap = {},
             .plans = {},
             .steps = {}};
  if (options.kind == ScheduleKind::all_to_all) swap_heads(s, s.ranks);
  if (options.kind == ScheduleKind::hybrid) {
    check_mesh(s);
    swap_heads(s, options.inside);
  }
  return s;
}

}  // namespace schedule

Schedule make_schedule(const Problem& problem, const Layouts& layouts, Index rank, const Heads& heads,
                       const ScheduleOptions& options) {
  Schedule s = schedule::begin(problem, layouts, rank, heads, options);
  switch (options.kind) {
    case ScheduleKind::all_gather:
      schedule::all_gather(s);
      break;
    case ScheduleKind::ring:
      schedule::ring(s);
      break;
    case ScheduleKind::exact:
      schedule::exact(s);
      break;
    case ScheduleKind::all_to_all:
      schedule::stay(s);
      break;
    case ScheduleKind::hybrid:
      if (options.across == ScheduleKind::ring)
        schedule::ring(s);
      else
        schedule::all_gather(s);
      break;
  }
  return s;
}

}  // namespace weft
