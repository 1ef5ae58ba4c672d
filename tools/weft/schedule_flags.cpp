#include "schedule_flags.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "numbers.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

bool gathers(ScheduleKind kind) { return kind == ScheduleKind::all_gather; }

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const ScheduleKind kind : schedule_kinds()) names.emplace_back(name(kind));
  return names;
}

// Key orders and head groups say nothing where nothing is gathered, and what says nothing is refused.
void check_gathered(const Flags& flags, const std::vector<std::string>& kinds) {
  const bool gathered =
      std::any_of(kinds.begin(), kinds.end(), [](const std::string& kind) { return gathers(schedule_kind(kind)); });
  for (const char* flag : {"key-order", "head-groups"}) {
    if (flags.given(flag) && !gathered)
      throw Error(fmt::format("--{} {} with --schedule {}", flag, *flags.find(flag), fmt::join(kinds, ",")),
                  "leave it out, or add all_gather: nothing else has key orders and groups");
  }
}

}  // namespace

const std::vector<FlagSpec>& schedule_flags() {
  static const std::vector<FlagSpec> flags = {
      {"schedule", "LIST", "run these on ranks as threads: all_gather, ring, or all"},
      {"key-order", "LIST", "of gathered keys: auto (default), sequence, rank"},
      {"head-groups", "N", "all_gather: K/V heads come in N groups; 1 if not given"},
      {"comm", "NAME", "what moves the bytes: threads"},
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

std::vector<ScheduleOptions> schedules_of(const Flags& flags, std::string_view schedules,
                                          const std::vector<KeyOrder>& otherwise) {
  const std::vector<std::string> kinds = list_of("--schedule", std::string(schedules), schedule_names());
  for (const std::string& kind : kinds) schedule_kind(kind);  // Error lists the names
  check_gathered(flags, kinds);
  std::vector<KeyOrder> orders = otherwise;
  if (const std::string* given = flags.find("key-order")) {
    orders.clear();
    for (const std::string& order : list_of("--key-order", *given, {"sequence", "rank"}))
      orders.push_back(weft::key_order(order));
  }
  const Index groups = flags.whole("head-groups", 1, "2");
  if (groups < 1) throw Error(fmt::format("--head-groups {}", groups), "use 1 or more, at most the K/V heads");
  std::vector<ScheduleOptions> all;
  for (const std::string& kind : kinds) {
    const ScheduleKind k = schedule_kind(kind);
    if (!gathers(k)) all.push_back({.kind = k});
    for (const KeyOrder order : gathers(k) ? orders : std::vector<KeyOrder>{})
      all.push_back({.kind = k, .key_order = order, .head_groups = groups});
  }
  return all;
}

std::string communicator_of(const Flags& flags) {
  const std::string name = flags.text("comm", "threads");
  if (name != "threads")
    throw Error(fmt::format("--comm: there is no communicator '{}' in this build", name), "use threads");
  return name;
}

check::Case::Format format_of(const Flags& flags) {
  const std::string format = flags.one_of("format", {"thd", "bshd", "sbhd"});
  return format == "thd"    ? check::Case::Format::thd
         : format == "bshd" ? check::Case::Format::bshd
                            : check::Case::Format::sbhd;
}

}  // namespace weft::tool
