#include "verify/grid_table.h"

#include <algorithm>
#include <cctype>
#include <iterator>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "index.h"
#include "terminal/numbers.h"

namespace weft::tool {
namespace {

using nlohmann::json;

constexpr std::size_t kShown = 10;

// Reasons that differ in numbers alone are one: the stride is 2 on two ranks and 3 on three.
std::string without_numbers(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (std::isdigit(static_cast<unsigned char>(c)) == 0) out += c;
  }
  return out;
}

std::vector<std::string_view> words_in(const std::string& column) { return split(column, ' '); }

std::size_t header_lines(const std::vector<std::string>& columns) {
  std::size_t most = 1;
  for (const std::string& column : columns) most = std::max(most, words_in(column).size());
  return most;
}

// The header of a column has a word in each line, aligned to the last of `lines` lines.
std::string word_of(const std::string& column, std::size_t line, std::size_t lines) {
  const std::vector<std::string_view> words = words_in(column);
  const std::size_t above = lines - words.size();
  return line < above ? "" : std::string(words[line - above]);
}

template <class List, class Value>
void keep(List& list, const Value& value) {
  if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
}

}  // namespace

GridTable::GridTable(const Grid& grid, const std::vector<check::Tried>& outcomes, const GridRun& how) : how_(how) {
  groups_.push_back({grid.row_axes, {}});
  for (const std::string& axis : grid.other_axes) groups_.push_back({{axis}, {}});
  std::size_t next = 0;
  for (const GridProblem& problem : grid.problems) {
    for (const GridCell& cell : problem.cells) {
      const check::Tried& tried = outcomes[next++];
      if (tool::left_out(tried))
        ++left_out_;
      else
        add(cell, tried);
    }
  }
  for (Group& group : groups_) sort_rows(group);
}

// By the first axis, then the second: numbers by size, words in the order in which they came.
void GridTable::sort_rows(Group& group) {
  std::vector<Line> seen(group.axes.size());
  for (const auto& [values, row] : group.rows)
    for (std::size_t i = 0; i < seen.size(); ++i) keep(seen[i], values[i]);
  for (Line& values : seen) {
    const auto number = [](const std::string& v) { return v.find_first_not_of("0123456789") == std::string::npos; };
    if (std::all_of(values.begin(), values.end(), number))
      std::sort(values.begin(), values.end(),
                [](const std::string& a, const std::string& b) { return std::stoll(a) < std::stoll(b); });
  }
  const auto place = [&](const Line& values) {
    std::vector<std::ptrdiff_t> ranking;
    for (std::size_t i = 0; i < seen.size(); ++i)
      ranking.push_back(std::find(seen[i].begin(), seen[i].end(), values[i]) - seen[i].begin());
    return ranking;
  };
  std::sort(group.rows.begin(), group.rows.end(),
            [&](const auto& a, const auto& b) { return place(a.first) < place(b.first); });
}

std::size_t GridTable::note_of(const check::Tried& tried) {
  const std::string key = without_numbers(tried.refused->problem);
  const auto found =
      std::find_if(notes_.begin(), notes_.end(), [&](const Refusal& r) { return without_numbers(r.problem) == key; });
  if (found != notes_.end()) return at(found - notes_.begin());
  notes_.push_back(*tried.refused);
  return notes_.size() - 1;
}

void GridTable::add(const GridCell& cell, const check::Tried& tried) {
  const std::string column = without_variants(cell.schedule);
  keep(columns_, column);
  const std::optional<std::string> failure = failure_of(tried);
  const auto count = [&](Count& to) {
    ++(failure ? to.failed : tried.refused ? to.refused : to.ok);
    if (tried.refused) keep(to.notes, note_of(tried));
  };
  count(total_);
  for (Group& group : groups_) {
    std::vector<std::string> values;
    for (const std::string& axis : group.axes) values.push_back(label(cell.labels, axis));
    if (values.front() == kHasNone) continue;
    auto row = std::find_if(group.rows.begin(), group.rows.end(), [&](const auto& r) { return r.first == values; });
    if (row == group.rows.end()) row = group.rows.insert(row, {values, {}});
    count(row->second[column]);
  }
  if (failure)
    failures_.push_back({fmt::format("{}: {}", weft::words(cell.schedule), *failure), command_of(cell, how_)});
  for (const check::Measure& m : tried.report ? tried.report->measures : std::vector<check::Measure>{}) {
    if (!worst_ || worse(m.worst, worst_->ratio))
      worst_ = Worst{m.worst, m.norm, m.tensor, tried.report->keys, m.where, command_of(cell, how_)};
  }
}

std::string GridTable::cell_words(const Count& count) {
  std::vector<std::string> parts;
  if (count.failed > 0) parts.push_back(fmt::format("{} FAILED", grouped(count.failed)));
  if (count.ok > 0) parts.push_back(fmt::format("{} ok", grouped(count.ok)));
  if (count.refused > 0) {
    std::vector<std::size_t> numbers;
    for (const std::size_t n : count.notes) numbers.push_back(n + 1);
    parts.push_back(fmt::format("{} no [{}]", grouped(count.refused), fmt::join(numbers, ",")));
  }
  return parts.empty() ? "-" : fmt::format("{}", fmt::join(parts, ", "));
}

// A line of the table: the values in `about`, then a cell for each schedule.
std::vector<std::string> GridTable::line_of(std::vector<std::string> about, const Row& row) const {
  for (const std::string& column : columns_) {
    const auto count = row.find(column);
    about.push_back(cell_words(count == row.end() ? Count{} : count->second));
  }
  return about;
}

// Columns as wide as their contents; the words of a schedule's name stand below each other.
void GridTable::print_lines(const std::vector<std::string>& about, std::vector<Line> body) const {
  std::vector<Line> lines(header_lines(columns_));
  for (std::size_t i = 0; i < lines.size(); ++i) {
    for (const std::string& axis : about) lines[i].push_back(i + 1 == lines.size() ? axis : "");
    for (const std::string& column : columns_) lines[i].push_back(word_of(column, i, lines.size()));
  }
  std::move(body.begin(), body.end(), std::back_inserter(lines));
  std::vector<std::size_t> width(lines[0].size(), 0);
  for (const Line& line : lines)
    for (std::size_t i = 0; i < line.size(); ++i) width[i] = std::max(width[i], line[i].size());
  for (const Line& line : lines) {
    std::string text;
    for (std::size_t i = 0; i < line.size(); ++i)
      text +=
          i < about.size() ? fmt::format("{:<{}}  ", line[i], width[i]) : fmt::format("  {:>{}}", line[i], width[i]);
    text.erase(text.find_last_not_of(' ') + 1);
    fmt::print("{}\n", text);
  }
  fmt::print("\n");
}

void GridTable::print_groups() const {
  std::vector<Line> large, small;
  for (const auto& [values, row] : groups_.front().rows) large.push_back(line_of(values, row));
  print_lines(groups_.front().axes, std::move(large));
  for (std::size_t g = 1; g < groups_.size(); ++g) {
    bool first = true;
    for (const auto& [values, row] : groups_[g].rows)
      small.push_back(line_of({std::exchange(first, false) ? groups_[g].axes.front() : "", values.front()}, row));
  }
  print_lines({"the same by", ""}, std::move(small));
}

void GridTable::print() const {
  print_groups();
  for (std::size_t i = 0; i < notes_.size(); ++i)
    fmt::print("no [{}]: {}{}{}\n", i + 1, notes_[i].problem, notes_[i].remedy.empty() ? "" : "; ", notes_[i].remedy);
  for (std::size_t i = 0; i < std::min(failures_.size(), kShown); ++i)
    fmt::print("FAILED {}\n  {}\n", failures_[i].what, failures_[i].command);
  if (failures_.size() > kShown) fmt::print("(further failures are counted, not shown)\n");
  if (worst_)
    fmt::print("worst element: {:.3g} of its bound, {} at {} ({}), relative norm {:.1e}\n  {}\n", worst_->ratio,
               worst_->tensor, worst_->where, worst_->keys, worst_->norm, worst_->command);
  fmt::print("{} runs: {} ok, {} refused as the capability table says, {} failed\n",
             grouped(total_.ok + total_.refused + total_.failed), grouped(total_.ok), grouped(total_.refused),
             grouped(total_.failed));
  if (left_out_ > 0)
    fmt::print("{} of {} runs were left out: --time-limit {}\n", grouped(left_out_),
               grouped(left_out_ + total_.ok + total_.refused + total_.failed), how_.limit.seconds());
}

json GridTable::json_of(const Count& count) {
  return {{"ok", count.ok}, {"failed", count.failed}, {"refused", count.refused}};
}

json GridTable::to_json() const {
  json out = {{"kernel", how_.kernel.empty() ? "auto" : how_.kernel},
              {"ok", total_.ok},
              {"failed", total_.failed},
              {"refused", total_.refused},
              {"left_out", left_out_},
              {"tables", json::array()},
              {"refusals", json::array()},
              {"failures", json::array()},
              {"worst", nullptr}};
  for (const Group& group : groups_) {
    json table = {{"axes", group.axes}, {"rows", json::array()}};
    for (const auto& [values, row] : group.rows) {
      json line = {{"values", values}, {"schedules", json::object()}};
      for (const auto& [column, count] : row) line["schedules"][column] = json_of(count);
      table["rows"].push_back(std::move(line));
    }
    out["tables"].push_back(std::move(table));
  }
  for (const Refusal& r : notes_) out["refusals"].push_back({{"problem", r.problem}, {"remedy", r.remedy}});
  for (const Failure& f : failures_) out["failures"].push_back({{"what", f.what}, {"command", f.command}});
  if (worst_) out["worst"] = worst_->to_json();
  return out;
}

}  // namespace weft::tool
