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

std::vector<std::string> owners_of(const ScheduleOption& option) {
  std::vector<std::string> owners;
  for (const ScheduleKind kind : schedule_kinds())
    if (uses(kind, option.name)) owners.emplace_back(name(kind));
  return owners;
}

// "head-groups" of "head_groups".
std::string flag_of(const ScheduleOption& option) {
  std::string flag(option.name);
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

// A flag that no schedule of the list uses is refused.
void check_used(const Flags& flags, const std::vector<std::string>& kinds) {
  for (const ScheduleOption& option : schedule_options()) {
    const std::vector<std::string> owners = owners_of(option);
    std::vector<std::string> given = {flag_of(option)};
    if (option.whole == &ScheduleOptions::ulysses) given.emplace_back("mesh");
    for (const std::string& flag : given)
      if (flags.given(flag) &&
          std::find_first_of(kinds.begin(), kinds.end(), owners.begin(), owners.end()) == kinds.end())
        throw Error(fmt::format("--{} {} with --schedule {}", flag, *flags.find(flag), fmt::join(kinds, ",")),
                    fmt::format("leave it out, or add {}: no other has it", fmt::join(owners, " or ")));
  }
}

// The Ulysses degree: --ulysses A, or --mesh AxB if that makes up the ranks.
std::string degree_of_mesh(const Flags& flags, const std::string& mesh) {
  flags.exclude("mesh", {"ulysses"}, "say the mesh, or its Ulysses degree");
  const std::vector<std::string_view> sides = split(mesh, 'x');
  const auto side = [&](std::size_t i) { return whole_number("--mesh", sides[i], "2x4"); };
  const Index ulysses = sides.size() == 2 ? side(0) : 0, groups = sides.size() == 2 ? side(1) : 0;
  if (ulysses < 1 || groups < 1) throw Error(fmt::format("--mesh {}", mesh), "write two sizes, e.g. --mesh 2x4");
  constexpr Index kDefaultRanks = 4;
  const Index ranks = flags.whole("ranks", kDefaultRanks, "8");
  if (ulysses > ranks || groups > ranks || ulysses * groups != ranks)
    throw Error(fmt::format("--mesh {} of {} ranks", mesh, ranks), "let --ranks be the product of the two sizes");
  return std::to_string(ulysses);
}

// The values that an option takes: those of its flag, otherwise the default, or every one if it has names.
std::vector<std::string> values_of(const Flags& flags, const ScheduleOption& option, bool every_variant) {
  const std::string flag = flag_of(option), *given = flags.find(flag);
  const std::string usual = option.value({});
  std::vector<std::string> every;  // the default first; auto is one of the others
  for (const std::string_view each : option.names())
    if (each != "auto") every.insert(each == usual ? every.begin() : every.end(), std::string(each));
  if (option.whole == nullptr && given) return list_of("--" + flag, *given, every);
  if (option.whole == nullptr && every_variant) return every;
  if (option.whole == &ScheduleOptions::ulysses && flags.given("mesh"))
    return {degree_of_mesh(flags, *flags.find("mesh"))};
  if (!given) return {usual};
  const Index value = flags.whole(flag, 1, "2");
  if (value < option.least)
    throw Error(fmt::format("--{} {}", flag, value), fmt::format("use {} or more", option.least));
  return {std::to_string(value)};
}

struct OptionValues {
  const ScheduleOption& option;
  std::vector<std::string> all;
};

// Every combination of values of the options from n on that the schedule uses.
void add_variants(const std::vector<OptionValues>& values, std::size_t n, const ScheduleOptions& so_far,
                  std::vector<ScheduleOptions>& to) {
  if (n == values.size()) return to.push_back(so_far);
  if (!uses(so_far, values[n].option.name)) return add_variants(values, n + 1, so_far, to);
  for (const std::string& value : values[n].all) {
    ScheduleOptions options = so_far;
    values[n].option.set(options, value);
    add_variants(values, n + 1, options, to);
  }
}

}  // namespace

std::vector<FlagSpec> with_schedule_options(std::vector<FlagSpec> flags) {
  for (const ScheduleOption& option : schedule_options()) {
    const std::vector<std::string_view> names = option.names();
    const std::string values = names.empty() ? "" : fmt::format(": {}", fmt::join(names, ", "));
    flags.push_back({flag_of(option), option.whole != nullptr ? "N" : "LIST",
                     fmt::format("{}: {}{}; {} if not given", fmt::join(owners_of(option), ", "), option.help, values,
                                 option.value({}))});
  }
  flags.push_back({"mesh", "AxB", "hybrid: --ulysses A, where A*B are the ranks"});
  return flags;
}

std::vector<std::string> schedule_option_names(std::vector<std::string> more) {
  for (const FlagSpec& flag : with_schedule_options({})) more.push_back(flag.name);
  return more;
}

void check_thread_ranks(Index ranks) {
  if (ranks < 1 || ranks > kMaxThreadRanks)
    throw Error(fmt::format("--ranks {}", ranks),
                fmt::format("use from 1 to {} ranks, which are threads", kMaxThreadRanks));
}

std::vector<FlagSpec> schedule_flags() {
  std::vector<std::string> names;  // each with its other names
  for (const ScheduleKind kind : schedule_kinds()) {
    const auto others = other_names(kind);
    names.push_back(others.empty() ? std::string(name(kind))
                                   : fmt::format("{} ({})", name(kind), fmt::join(others, ", ")));
  }
  std::vector<FlagSpec> all = with_schedule_options(
      {{"schedule", "LIST", fmt::format("run these on ranks as threads: {}, auto, or all", fmt::join(names, ", "))}});
  all.push_back({"comm", "NAME",
                 "what moves the bytes: threads (default), processes (NCCL between GPUs), or mpi, started by "
                 "tools/mpirun.sh -np N weft .."});
  all.push_back(
      {"checked", "", "ranks compare fingerprints and checksums (ExecutorOptions::checked); bytes are not compared"});
  all.push_back(
      {"flight", "FILE",
       "write the last calls of all ranks there when one fails, or at SIGUSR1; processes: FILE.0, FILE.1, ..; "
       "drawn by weft explain --flight"});
  all.push_back(
      {"format", "NAME", "of a rank's own tensors: thd (default), or bshd, sbhd for batches in layout dual_chunk"});
  all.push_back(kHeadMapFlag);
  return all;
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

std::vector<ScheduleOptions> schedules_of(const Flags& flags, std::string_view schedules, bool every_variant) {
  std::vector<std::string> kinds;
  for (const std::string& word : list_of("--schedule", std::string(schedules), schedule_names())) {
    const std::string kind(name(schedule_kind(word)));  // Error lists the names
    if (std::find(kinds.begin(), kinds.end(), kind) != kinds.end())
      throw Error(fmt::format("--schedule: '{}' is {}, which comes twice in '{}'", word, kind, schedules),
                  "say it once");
    if (word != kind) fmt::print(stderr, "weft: schedule {} is {}\n", word, kind);
    kinds.push_back(kind);
  }
  check_used(flags, kinds);
  std::vector<OptionValues> values;
  for (const ScheduleOption& option : schedule_options())
    values.push_back({option, values_of(flags, option, every_variant)});
  std::vector<ScheduleOptions> all;
  for (const std::string& kind : kinds) add_variants(values, 0, {.kind = schedule_kind(kind)}, all);
  return all;
}

AskedSchedules asked_schedules(const Flags& flags, std::string_view schedules) {
  std::vector<std::string> names = list_of("--schedule", std::string(schedules), schedule_names());
  const bool automatic = std::erase(names, "auto") > 0;
  if (!names.empty()) return {schedules_of(flags, fmt::format("{}", fmt::join(names, ","))), automatic};
  flags.refuse(schedule_option_names(), " with --schedule auto", "leave it out: it is chosen too");
  return {{}, automatic};
}

std::vector<std::string> leave_out_impossible(const Flags& flags, const check::Case& c, const Problem& problem,
                                              const Layouts& layouts, std::vector<ScheduleOptions>& schedules) {
  bool all = flags.text("schedule", "") == "all";
  for (const std::string& option : schedule_option_names())
    all = all && (option == "key-order" || !flags.given(option));
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
  if (uses(options, "ulysses")) options.ulysses = std::gcd(options.ulysses, c.ranks);
  options.node = std::gcd(options.node, c.ranks);
  if (options.query_ranks > 0) options.query_ranks = std::gcd(options.query_ranks, c.ranks);
  if (uses(options, "ulysses") && options.node % options.ulysses != 0 && options.ulysses % options.node != 0)
    options.node = options.ulysses;
  return options;
}

std::string communicator_of(const Flags& flags) { return flags.one_of("comm", {"threads", "processes", "mpi"}); }

check::Case::Format format_of(const Flags& flags) {
  const std::string format = flags.one_of("format", {"thd", "bshd", "sbhd"});
  using enum check::Case::Format;
  return format == "thd" ? thd : format == "bshd" ? bshd : sbhd;
}

}  // namespace weft::tool
