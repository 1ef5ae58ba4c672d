// The results of a grid: a line for each combination, a column for each schedule.
#pragma once

#include <map>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "verify/grid.h"
#include "verify/tally.h"

namespace weft::tool {

class GridTable {
 public:
  GridTable(const Grid& grid, const std::vector<check::Tried>& outcomes, const GridRun& how);

  Index failed() const { return total_.failed; }
  Index ok() const { return total_.ok; }
  Index left_out() const { return left_out_; }
  void print() const;
  nlohmann::json to_json() const;

 private:
  struct Count {
    Index ok = 0, failed = 0, refused = 0;
    std::vector<std::size_t> notes = {};  // numbers of the refusals
  };
  using Line = std::vector<std::string>;
  using Row = std::map<std::string, Count>;  // by schedule
  struct Group {
    std::vector<std::string> axes;
    std::vector<std::pair<std::vector<std::string>, Row>> rows;  // in the order in which they came
  };
  struct Failure {
    std::string what, command;
  };

  void add(const GridCell& cell, const check::Tried& tried);
  static void sort_rows(Group& group);
  std::size_t note_of(const check::Tried& tried);
  std::vector<std::string> line_of(std::vector<std::string> about, const Row& row) const;
  void print_lines(const std::vector<std::string>& about, std::vector<Line> body) const;
  void print_groups() const;
  static std::string cell_words(const Count& count);
  static nlohmann::json json_of(const Count& count);

  GridRun how_;
  std::vector<std::string> columns_;
  std::vector<Group> groups_;
  std::vector<Refusal> notes_;
  std::vector<Failure> failures_;
  std::optional<Worst> worst_;
  Count total_;
  Index left_out_ = 0;
};

}  // namespace weft::tool
