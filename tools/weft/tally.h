// Checked cases, one and many.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "check/attend.h"
#include "check/case.h"
#include "check/law.h"

namespace weft::tool {

// What the checks said of one case. A check that was not made has its reason in `skipped`.
struct Outcome {
  std::optional<check::LawReport> law = {};
  std::vector<check::AttendReport> attention = {};
  std::vector<std::string> skipped = {};
  std::optional<std::string> failure = {};  // in one line

  bool checked() const { return law || !attention.empty(); }
};

// Errors of the case itself are thrown as weft::Error.
Outcome check_case(const check::Case& c, const std::string& kernel);
// "weft verify ..": gives the same case again.
std::string command_of(const check::Case& c, const std::string& kernel);

// The element that came nearest to its bound, of all cases.
struct Worst {
  double ratio = 0, norm = 0;
  std::string tensor, keys, where, command;
};

class Tally {
 public:
  explicit Tally(std::string kernel) : kernel_(std::move(kernel)) {}

  void add(const check::Case& c, const Outcome& outcome);

  Index cases() const { return cases_; }
  Index failed() const { return failed_; }
  bool attended() const { return worst_.has_value(); }  // attention of at least one case was checked
  nlohmann::json to_json() const;
  // Counts by layout and mask, and how many of them had keys on other ranks.
  void print() const;

 private:
  std::string kernel_;
  Index cases_ = 0, failed_ = 0, nontrivial_ = 0;
  std::map<std::string, Index> skipped_;
  std::optional<Worst> worst_;
  std::map<std::string, std::map<std::string, Index>> by_layout_;
};

}  // namespace weft::tool
