// Checks one case, and counts the results of many.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "check/attend.h"
#include "check/cases/case.h"
#include "check/law.h"
#include "weft/communicator.h"
#include "weft/schedule.h"

namespace weft::tool {

// How attention is computed.
struct Method {
  std::string kernel = {};                      // "": the best of this machine, call by call
  std::vector<ScheduleOptions> schedules = {};  // on ranks as threads; none: a plan for each rank, without moves
  bool checked = false;                         // ExecutorOptions::checked
  Index micros = 0;                             // in so many micro-sequences, through a K/V buffer; 0: not
  Communicator* world = nullptr;                // of processes that check the same; null: ranks are threads

  std::string kernel_words() const { return kernel.empty() ? "auto" : kernel; }
};

// The results of one case. The reasons of checks that were not made are in `skipped`.
struct Outcome {
  std::optional<check::LawReport> law = {};
  std::vector<check::AttendReport> attention = {};
  std::vector<std::string> skipped = {};
  Index refused = 0;        // schedules that the capability table refuses, as they should; reasons are in `skipped`
  std::string looked = {};  // how much was compared, if the case is too large to be compared whole
  std::optional<std::string> failure = {};   // in one line
  std::string failed_way = {};               // flags of the schedule that failed
  std::vector<ScheduleKind> never_ran = {};  // schedules of which every variant was refused

  bool checked() const { return law || !attention.empty(); }
};

// Errors of the case itself are thrown as weft::Error.
Outcome check_case(const check::Case& c, const Method& method);
// The "weft verify .." that repeats the case; `way` as in AttendReport::flags.
std::string command_of(const check::Case& c, const Method& method, const std::string& way);

// Of all cases the element that is nearest to its bound.
struct Worst {
  double ratio = 0, norm = 0;
  std::string tensor, keys, where, command;

  nlohmann::json to_json() const;
};

// Why an answer is wrong, in one line; none if it is right.
std::optional<std::string> failure_of(const check::AttendReport& report);
// NaN counts as the worst there is.
bool worse(double a, double b);

class Tally {
 public:
  explicit Tally(Method method) : method_(std::move(method)) {}

  void add(const check::Case& c, const Outcome& outcome);
  void leave_out(Index cases, std::string reason);
  // The first seed that was drawn from, and the first that was not: where another run goes on.
  void set_seeds(unsigned long long first, unsigned long long next);

  Index cases() const { return cases_; }
  Index failed() const { return failed_; }
  bool attended() const { return attended_; }  // attention of at least one case was checked
  // "law: .. (and 2 more reasons)": why checks were not made; empty if all were.
  std::string why_skipped() const;
  nlohmann::json to_json() const;
  // Counts by layout and mask, and how many of them had keys on other ranks.
  void print() const;

 private:
  Method method_;
  Index cases_ = 0, failed_ = 0, nontrivial_ = 0;
  bool attended_ = false;
  Index left_out_ = 0;
  Index ran_ = 0, refused_ = 0;        // runs
  Index sampled_ = 0, unchecked_ = 0;  // cases
  std::string left_out_why_;
  std::optional<std::pair<unsigned long long, unsigned long long>> seeds_;
  std::map<std::string, Index> skipped_;
  std::optional<Worst> worst_;
  std::map<std::string, std::map<std::string, Index>> by_layout_;
};

}  // namespace weft::tool
