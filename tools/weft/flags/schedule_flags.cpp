#include "flags/schedule_flags.h"

#include <algorithm>
#include <numeric>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "check/by_schedule.h"
#include "terminal/numbers.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const ScheduleKind kind : schedule_kinds()) names.emplace_back(name(kind));
  return names;
}

// What says nothing is refused: a flag that no schedule of the list has.
void check_used(const Flags& flags, const std::vector<std::string>& kinds) {
  struct Owners {
    const char* flag;
    std::vector<std::string> schedules;
  };
  const std::vector<Owners> all = {{"key-order", {"all_gather", "hybrid"}},
                                   {"head-groups", {"all_gather", "hybrid"}},
                                   {"inside", {"hybrid"}},
                                   {"mesh", {"hybrid"}},
                                   {"across", {"hybrid"}},
                                   {"stages", {"exact"}},
                                   {"abreast", {"ring", "hybrid"}}};
  for (const auto& [flag, schedules] : all) {
    const bool used = std::find_first_of(kinds.begin(), kinds.end(), schedules.begin(), schedules.end()) != kinds.end();
    if (flags.given(flag) && !used)
      throw Error(fmt::format("--{} {} with --schedule {}", flag, *flags.find(flag), fmt::join(kinds, ",")),
                  fmt::format("leave it out, or add {}: no other has it", fmt::join(schedules, " or ")));
  }
}

Index positive(const Flags& flags, std::string_view name, Index otherwise) {
  const Index value = flags.whole(name, otherwise, "2");
  if (value < 1) throw Error(fmt::format("--{} {}", name, value), "use 1 or more");
  return value;
}

// Ranks inside: --inside A, or --mesh AxB if that makes up the ranks.
Index inside_of(const Flags& flags, Index otherwise) {
  const std::string* mesh = flags.find("mesh");
  if (!mesh) return positive(flags, "inside", otherwise);
  flags.exclude("mesh", {"inside"}, "say the mesh, or its inside");
  const std::vector<std::string_view> sides = split(*mesh, 'x');
  const auto side = [&](std::size_t i) { return whole_number("--mesh", sides[i], "2x4"); };
  const Index inside = sides.size() == 2 ? side(0) : 0, across = sides.size() == 2 ? side(1) : 0;
  if (inside < 1 || across < 1) throw Error(fmt::format("--mesh {}", *mesh), "write two sizes, e.g. --mesh 2x4");
  constexpr Index kDefaultRanks = 4;
  const Index ranks = flags.whole("ranks", kDefaultRanks, "8");
  if (inside > ranks || across > ranks || inside * across != ranks)
    throw Error(fmt::format("--mesh {} of {} ranks", *mesh, ranks), "let --ranks be the product of the two sizes");
  return inside;
}

std::vector<ScheduleKind> across_of(const Flags& flags, const std::vector<ScheduleKind>& otherwise) {
  const std::string* given = flags.find("across");
  if (!given) return otherwise;
  std::vector<ScheduleKind> across;
  for (const std::string& kind : list_of("--across", *given, {"ring", "all_gather"})) {
    if (kind != "ring" && kind != "p2p" && kind != "all_gather")
      throw Error(fmt::format("--across: there is no '{}'", kind), "use ring or all_gather");
    across.push_back(schedule_kind(kind));
  }
  return across;
}

std::vector<KeyOrder> orders_of(const Flags& flags, const std::vector<KeyOrder>& otherwise) {
  const std::string* given = flags.find("key-order");
  if (!given) return otherwise;
  std::vector<KeyOrder> orders;
  for (const std::string& order : list_of("--key-order", *given, {"sequence", "rank"}))
    orders.push_back(key_order(order));
  return orders;
}

}  // namespace

const std::vector<FlagSpec>& schedule_flags() {
  static const std::vector<FlagSpec> flags = {
      {"schedule", "LIST",
       "run these on ranks as threads: all_gather, ring (or p2p), all_to_all (a2a), hybrid (a2a+p2p), exact, auto, or "
       "all"},
      {"key-order", "LIST", "of gathered keys: auto (default), sequence, rank"},
      {"head-groups", "N", "gathered K/V heads come in N groups; 1 if not given"},
      {"inside", "N", "hybrid: ranks that swap heads for sequence; 2 if not given"},
      {"mesh", "AxB", "hybrid: the same with both sides said, --ranks A*B --inside A"},
      {"across", "LIST", "hybrid: how the other groups' keys come, ring (default) or all_gather"},
      {"stages", "N", "exact: rows of other ranks come in N steps; 4 if not given"},
      {"abreast", "N", "ring: keys of N ranks (hybrid: of N groups) in a step; 2 if not given"},
      {"comm", "NAME", "what moves the bytes: threads (default), or mpi, started by tools/mpirun.sh -np N weft .."},
      {"checked", "", "ranks compare fingerprints and checksums (ExecutorOptions::checked); bytes are not compared"},
      {"format", "NAME", "of a rank's own tensors: thd (default), or bshd, sbhd for batches in layout dual_chunk"},
      {"head-map", "LIST", "0,1,1: the K/V head of each query head"}};
  return flags;
}

std::vector<std::string> list_of(std::string_view flag, const std::string& text, const std::vector<std::string>& all) {
  if (text == "all") return all;
  std::vector<std::string> list;
  for (const std::string_view part : split(text, ',')) {
    if (part.empty() || std::find(list.begin(), list.end(), part) != list.end())
      throw Error(fmt::format("{}: '{}' is empty or comes twice in '{}'", flag, part, text),
                  fmt::format("write e.g. {} {}, or {} all", flag, fmt::join(all, ","), flag));
    list.emplace_back(part);
  }
  return list;
}

std::vector<ScheduleOptions> schedules_of(const Flags& flags, std::string_view schedules, const Variants& otherwise) {
  std::vector<std::string> kinds;
  for (const std::string& word : list_of("--schedule", std::string(schedules), schedule_names())) {
    const std::string kind(name(schedule_kind(word)));  // Error lists the names
    if (std::find(kinds.begin(), kinds.end(), kind) != kinds.end())
      throw Error(fmt::format("--schedule: '{}' is {}, which comes twice in '{}'", word, kind, schedules),
                  "say it once");
    kinds.push_back(kind);
  }
  check_used(flags, kinds);
  const std::vector<KeyOrder> orders = orders_of(flags, otherwise.orders);
  const std::vector<ScheduleKind> across = across_of(flags, otherwise.across);
  const ScheduleOptions usual;
  const Index groups = positive(flags, "head-groups", usual.head_groups);
  const Index inside = inside_of(flags, usual.inside), stages = positive(flags, "stages", usual.stages);
  const Index abreast = positive(flags, "abreast", usual.abreast);
  std::vector<ScheduleOptions> all;
  for (const std::string& kind : kinds) {
    ScheduleOptions options{.kind = schedule_kind(kind)};
    if (options.kind == ScheduleKind::exact) options.stages = stages;
    if (options.kind == ScheduleKind::hybrid) options.inside = inside;
    for (const ScheduleKind over : options.kind == ScheduleKind::hybrid ? across : std::vector{usual.across}) {
      options.across = over;
      const bool gathered = check::gathers(options);
      options.head_groups = gathered ? groups : usual.head_groups;
      options.abreast = check::shifts(options) ? abreast : usual.abreast;
      for (const KeyOrder order : gathered ? orders : std::vector{usual.key_order}) {
        options.key_order = order;
        all.push_back(options);
      }
    }
  }
  return all;
}

AskedSchedules asked_schedules(const Flags& flags, std::string_view schedules) {
  std::vector<std::string> names = list_of("--schedule", std::string(schedules), schedule_names());
  const bool automatic = std::erase(names, "auto") > 0;
  if (!names.empty()) return {schedules_of(flags, fmt::format("{}", fmt::join(names, ",")), {}), automatic};
  for (const char* option : {"key-order", "head-groups", "inside", "mesh", "across", "stages", "abreast"}) {
    if (flags.given(option))
      throw Error(fmt::format("--{} {} with --schedule auto", option, *flags.find(option)),
                  "leave it out: it is chosen too");
  }
  return {{}, automatic};
}

std::vector<std::string> leave_out_impossible(const Flags& flags, const check::Case& c, const Problem& problem,
                                              const Layouts& layouts, std::vector<ScheduleOptions>& schedules) {
  bool all = flags.text("schedule", "") == "all";
  for (const char* option : {"head-groups", "inside", "mesh", "across", "stages", "abreast"})
    all = all && !flags.given(option);
  std::vector<ScheduleOptions> possible;
  std::vector<std::string> reasons;
  for (const ScheduleOptions& options : schedules) {
    try {
      // What the capability table refuses is not bad input: whoever runs it says so.
      if (!refusal(check::use_of(c, layouts, options)))
        make_schedule(problem, layouts, 0, {.q = c.heads_q, .k = c.heads_k, .map = c.head_map}, options);
      possible.push_back(options);
    } catch (const Error& error) {
      if (!all || (possible.empty() && reasons.size() + 1 == schedules.size())) throw;
      reasons.push_back(fmt::format("{}: {}", name(options.kind), error.problem()));
    }
  }
  schedules = std::move(possible);
  return reasons;
}

ScheduleOptions fitted(ScheduleOptions options, const check::Case& c) {
  options.head_groups = min_of(options.head_groups, c.heads_k);
  if (options.kind == ScheduleKind::hybrid) options.inside = std::gcd(options.inside, c.ranks);
  return options;
}

std::string communicator_of(const Flags& flags) {
  const std::string name = flags.text("comm", "threads");
  if (name != "threads" && name != "mpi")
    throw Error(fmt::format("--comm: there is no communicator '{}'", name), "use threads or mpi");
  return name;
}

check::Case::Format format_of(const Flags& flags) {
  const std::string format = flags.one_of("format", {"thd", "bshd", "sbhd"});
  return format == "thd"    ? check::Case::Format::thd
         : format == "bshd" ? check::Case::Format::bshd
                            : check::Case::Format::sbhd;
}

}  // namespace weft::tool
