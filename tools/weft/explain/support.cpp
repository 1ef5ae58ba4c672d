#include "weft/support.h"

#include <algorithm>
#include <iterator>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "explain/modes.h"
#include "terminal/json_file.h"
#include "weft/error.h"
#include "weft/kernel.h"

namespace weft::tool {
namespace {

using nlohmann::json;

constexpr std::string_view kOneRank = "one rank";

// What refuses, numbered in the order in which it comes; what differs in the schedule's name alone is one note.
class Notes {
 public:
  std::string cell(const std::optional<Refusal>& refused, std::string_view column) {
    if (!refused) return "yes";
    std::string text = fmt::format("{}; {}", refused->problem, refused->remedy);
    const std::string named = fmt::format("schedule {}", column);
    if (const std::size_t at = text.find(named); at != std::string::npos)
      text.replace(at, named.size(), "any schedule");
    auto found = std::find(texts_.begin(), texts_.end(), text);
    if (found == texts_.end()) found = texts_.insert(found, text);
    return fmt::format("no [{}]", found - texts_.begin() + 1);
  }
  void print() const {
    for (std::size_t i = 0; i < texts_.size(); ++i) fmt::print("[{}] {}\n", i + 1, texts_[i]);
  }

 private:
  std::vector<std::string> texts_;
};

void print_rows(const std::vector<SupportRow>& rows, Notes& notes) {
  std::size_t width = 0;
  for (const SupportRow& row : rows) width = std::max(width, row.name.size());
  std::string line = fmt::format("{:<9}{:<{}}{:>10}", "", "", width, kOneRank);
  for (const ScheduleKind kind : schedule_kinds()) line += fmt::format("{:>12}", name(kind));
  fmt::print("{}\n", line);
  std::string group;
  for (const SupportRow& row : rows) {
    line = fmt::format("{:<9}{:<{}}{:>10}", row.group == group ? "" : row.group, row.name, width,
                       notes.cell(row.one_rank, kOneRank));
    for (std::size_t i = 0; i < row.schedules.size(); ++i)
      line += fmt::format("{:>12}", notes.cell(row.schedules[i], name(schedule_kinds()[i])));
    group = row.group;
    fmt::print("{}\n", line);
  }
}

// Why a kernel cannot, asked for every pass and dtype at widths that all tests use.
struct KernelAnswer {
  std::vector<std::string> dtypes;   // that it computes here, forward and backward
  std::vector<std::string> reasons;  // each once
};

KernelAnswer answer_of(const Kernel& kernel) {
  constexpr Index kWidth = 64;
  KernelAnswer answer;
  for (const DType dtype : kDTypes) {
    bool can = true;
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const auto refused = kernel.refusal({pass, dtype, kWidth, kWidth, false});
      if (!refused) continue;
      can = false;
      if (std::find(answer.reasons.begin(), answer.reasons.end(), *refused) == answer.reasons.end())
        answer.reasons.push_back(*refused);
    }
    if (can) answer.dtypes.emplace_back(name(dtype));
  }
  return answer;
}

void print_kernels() {
  fmt::print("Kernels of this build, best first, and what they do on this machine (head width 64).\n\n");
  for (const Kernel& kernel : kernels()) {
    const KernelAnswer answer = answer_of(kernel);
    fmt::print("  {:<18}{}{}{}\n", kernel.name, answer.dtypes.empty() ? "nothing" : "", fmt::join(answer.dtypes, ", "),
               answer.reasons.empty() ? "" : fmt::format("; no others: {}", fmt::join(answer.reasons, "; ")));
  }
}

json to_json(const std::optional<Refusal>& refused) {
  return refused ? json{{"problem", refused->problem}, {"remedy", refused->remedy}} : json(nullptr);
}

json to_json(const std::vector<SupportRow>& rows) {
  json out = {{"columns", {kOneRank}}, {"rows", json::array()}, {"kernels", json::array()}};
  for (const ScheduleKind kind : schedule_kinds()) {
    out["columns"].push_back(name(kind));
    out["schedules"].push_back({{"name", name(kind)}, {"other_names", other_names(kind)}, {"help", about(kind)}});
  }
  for (const ScheduleOption& option : schedule_options()) {
    json owners = json::array();
    for (const ScheduleKind kind : schedule_kinds())
      if (uses(kind, option.name)) owners.push_back(name(kind));
    out["options"].push_back({{"name", option.name},
                              {"values", option.names()},
                              {"least", option.least},
                              {"default", option.value({})},
                              {"schedules", std::move(owners)},
                              {"help", option.help}});
  }
  for (const SupportRow& row : rows) {
    json line = {{"group", row.group}, {"name", row.name}, {"refused", {{kOneRank, to_json(row.one_rank)}}}};
    for (std::size_t i = 0; i < row.schedules.size(); ++i)
      line["refused"][std::string(name(schedule_kinds()[i]))] = to_json(row.schedules[i]);
    out["rows"].push_back(std::move(line));
  }
  for (const Kernel& kernel : kernels()) {
    const KernelAnswer answer = answer_of(kernel);
    out["kernels"].push_back(
        {{"name", kernel.name}, {"about", kernel.about}, {"dtypes", answer.dtypes}, {"reasons", answer.reasons}});
  }
  return out;
}

// Groups together, each where it first comes.
std::vector<SupportRow> rows_by_group() {
  const std::vector<SupportRow> rows = support_table();
  std::vector<std::string> groups;
  for (const SupportRow& row : rows)
    if (std::find(groups.begin(), groups.end(), row.group) == groups.end()) groups.push_back(row.group);
  std::vector<SupportRow> sorted;
  for (const std::string& group : groups)
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(sorted),
                 [&](const SupportRow& row) { return row.group == group; });
  return sorted;
}

}  // namespace

int explain_support(const Flags& flags) {
  flags.exclude("support", problem_flags({"layout", "seed", "keys", "view"}),
                "leave one of them out: the table is the same for every problem");
  JsonOutput output(flags.find("json"));
  const std::vector<SupportRow> rows = rows_by_group();
  fmt::print(
      "What works with what: forward and backward, one thing at a time, with everything else of the table that "
      "works.\n\n");
  Notes notes;
  print_rows(rows, notes);
  fmt::print("\n");
  notes.print();
  fmt::print("\n");
  print_kernels();
  output.write(to_json(rows));
  return 0;
}

}  // namespace weft::tool
