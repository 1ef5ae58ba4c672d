#include "verify/tally.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "check/by_micro.h"
#include "check/by_schedule.h"
#include "flags/schedule_flags.h"
#include "terminal/numbers.h"

namespace weft::tool {
namespace {

using nlohmann::json;

// Brute force looks at all (query, key) pairs of tokens, visible or not: some seconds, and a few bytes for each pair.
constexpr double kMaxLawPairs = 0x1p26;
// A plan for every two ranks looks at every sequence, and so do the groups of ranks: some seconds.
constexpr double kMaxLawPlans = 0x1p21;
// With more pairs only some rows and keys are compared.
constexpr double kMaxDensePairs = 0x1p24;
// The dense softmax visits all pairs for each head (as costly as 40 multiplications each) and the visible ones for each
// element: half a minute.
constexpr double kMaxDenseWork = 4e9, kPairWork = 40;
// With some rows and keys it visits the visible pairs of all rows once: a minute. Above that only some rows get a
// gradient, and only these are compared.
constexpr double kMaxSampledWork = 1e11;

constexpr std::array kMasks = {"full",    "causal",         "bottom_right", "window", "window_right",
                               "chunked", "chunked_window", "slices",       "tree"};

// Rows and keys that are compared of a large case: enough to meet every document and rank.
constexpr Index kSampled = 64;

// What of a case is compared.
enum class Look { whole, rows_and_keys, rows };

// Rows that a check visits: the tokens, or the ranks' buffers where these are longer (explicit runs may leave gaps).
double rows_of(const Layout& layout) {
  return static_cast<double>(max_of(layout.stream().tokens(), layout.ranks() * layout.rows()));
}

// The reason why a case is too large for the law, if it is.
std::optional<std::string> too_large_for_law(const check::Case& c, double pairs, Index sequences) {
  const double ranks = static_cast<double>(c.ranks);
  if (pairs > kMaxLawPairs)
    return fmt::format("law: more than {} pairs of rows, too many for brute force", kMaxLawPairs);
  if (ranks * ranks * static_cast<double>(sequences + 1) > kMaxLawPlans)
    return fmt::format("law: ranks x ranks x documents over {}, too many for brute force", kMaxLawPlans);
  return {};
}

// Why a case cannot be attended at all, if it cannot.
std::optional<std::string> too_many_steps(const check::Case& c, const Problem& problem) {
  const double ranks = static_cast<double>(c.ranks);
  if (ranks * ranks * static_cast<double>(problem.packing().sequences() + 1) > kMaxLawPlans)
    return fmt::format("attention: ranks x ranks x documents over {}, too many ring steps", kMaxLawPlans);
  return {};
}

Look look_of(const check::Case& c, double pairs, const Problem& problem) {
  const double width = static_cast<double>(c.dim_qk + c.dim_v), heads = static_cast<double>(c.heads_q);
  const double visible = static_cast<double>(problem.visible_pairs());
  if (pairs <= kMaxDensePairs && heads * (kPairWork * pairs + width * visible) <= kMaxDenseWork) return Look::whole;
  return heads * visible * (kPairWork + width) <= kMaxSampledWork ? Look::rows_and_keys : Look::rows;
}

std::string words(Look look, const Problem& problem) {
  if (look == Look::whole) return {};
  const Index q = problem.packing().q().tokens(), k = problem.packing().k().tokens();
  if (look == Look::rows)
    return fmt::format("{} rows of {} looked at, and what they add to all keys", kSampled, grouped(q));
  if (q == k) return fmt::format("{} rows and {} keys of {} looked at, lse whole", kSampled, kSampled, grouped(q));
  return fmt::format("{} rows of {} and {} keys of {} looked at, lse whole", kSampled, grouped(q), kSampled,
                     grouped(k));
}

void check_law_of(const check::Case& c, Outcome& to) {
  to.law = check_law(c);
  if (to.law->violation) to.failure = "law: " + *to.law->violation;
}

void check_attention_of(const check::Case& c, const std::string& kernel, Look look, Outcome& to) {
  to.attention = check_attention(c, kernel, look == Look::whole ? std::nullopt : std::optional(kSampled));
  if (to.attention.empty())
    to.skipped.emplace_back("attention: queries and keys are laid out in different strides, no plan goes with that");
  for (const check::AttendReport& report : to.attention) {
    if (const auto failure = failure_of(report); failure && !to.failure)
      to.failure = fmt::format("attention, keys: {}: {}", report.keys, *failure);
  }
}

void note_failure(Outcome& to, const std::string& failure, const std::string& way) {
  if (to.failure) return;
  to.failure = failure;
  to.failed_way = way;
}

// Runs every schedule and compares each with one dense answer.
void check_schedules_of(const check::Case& c, const Method& method, Look look, Outcome& to) {
  check::Oracle oracle(c, check::executor_arithmetic(c), look == Look::whole ? std::nullopt : std::optional(kSampled),
                       look == Look::rows_and_keys ? std::optional(kSampled) : std::nullopt);
  std::set<ScheduleKind> refused, ran;
  for (const ScheduleOptions& options : method.schedules) {
    check::Tried tried = try_schedule(oracle, c, {options, method.kernel, method.checked, method.world});
    const std::string what = weft::words(options);
    (tried.refused ? refused : ran).insert(options.kind);
    if (tried.refused) ++to.refused;
    if (tried.refused)
      to.skipped.push_back(fmt::format("attention: {}: {}", name(options.kind), tried.refused->problem));
    if (tried.failure) note_failure(to, fmt::format("attention, {}: {}", what, *tried.failure), check::flags(options));
    if (!tried.report) continue;
    if (const auto failure = failure_of(*tried.report))
      note_failure(to, fmt::format("attention, {}: {}", what, *failure), check::flags(options));
    to.attention.push_back(std::move(*tried.report));
  }
  std::set_difference(refused.begin(), refused.end(), ran.begin(), ran.end(), std::back_inserter(to.never_ran));
}

// In micro-sequences: of equal length with the keys of each in time and ahead of it, of even work, and with rows
// dropped and forwards run again.
void check_micros_of(const check::Case& c, const Problem& problem, const Method& method, Look look, Outcome& to) {
  std::optional<std::string> no = check::micro_refusal(c, problem, {.micros = method.micros});
  if (!no && !method.kernel.empty() && method.kernel != "cpu") no = check::refusal(c, method.kernel);
  if (no) {
    to.skipped.push_back(fmt::format("attention: --micro {}: {}", method.micros, *no));
    return;
  }
  check::Oracle oracle(c, check::executor_arithmetic(c), look == Look::whole ? std::nullopt : std::optional(kSampled),
                       look == Look::rows_and_keys ? std::optional(kSampled) : std::nullopt);
  const check::MicroWay way{.micros = method.micros, .kernel = method.kernel, .checked = method.checked};
  std::vector<check::MicroWay> ways(3, way);
  ways[1].ahead = true;
  ways[2].recomputed = true;
  const Stream& q = problem.packing().q();
  if (q.extent().size() >= method.micros * c.ranks) {  // a token a window
    check::MicroWay even = way;
    even.even_work = true;
    if (!check::micro_refusal(c, problem, even)) ways.push_back(even);
  }
  for (const check::MicroWay& one : ways) {
    to.attention.push_back(check_micro(oracle, one));
    const check::AttendReport& report = to.attention.back();
    if (const auto failure = failure_of(report))
      note_failure(to, fmt::format("attention, {}: {}", report.keys, *failure), report.flags);
  }
}

}  // namespace

std::optional<std::string> failure_of(const check::AttendReport& report) {
  if (report.fault) return report.fault;
  for (const check::Measure& m : report.measures)
    if (!(m.worst < 1)) return fmt::format("{} is off by {:.3g} times its bound at {}", m.tensor, m.worst, m.where);
  return {};
}

bool worse(double a, double b) { return !(a <= b); }

Outcome check_case(const check::Case& c, const Method& method) {
  Outcome outcome;
  const Problem problem = problem_of(c);
  const Layouts layouts = layouts_of(c, problem);
  const double pairs = rows_of(layouts.q) * rows_of(layouts.k);
  if (auto reason = too_large_for_law(c, pairs, problem.packing().sequences()))
    outcome.skipped.push_back(std::move(*reason));
  else
    check_law_of(c, outcome);
  const Look look = look_of(c, pairs, problem);
  std::optional<std::string> too_large = too_many_steps(c, problem);
  if (too_large && (!method.schedules.empty() || method.micros > 0) && c.ranks <= kMaxThreadRanks)
    too_large.reset();  // schedules have few
  if (method.schedules.empty() && method.micros == 0 && look == Look::rows)
    too_large =
        fmt::format("attention: more than {} multiplications in a dense softmax; use --schedule", kMaxSampledWork);
  if (too_large) {
    outcome.skipped.push_back(*too_large);
    return outcome;
  }
  if (method.micros > 0) {
    check_micros_of(c, problem, method, look, outcome);
  } else if (!method.schedules.empty()) {
    check_schedules_of(c, method, look, outcome);
  } else if (const auto refused = check::refusal(c, method.kernel)) {
    outcome.skipped.push_back(fmt::format("attention: {}: {}", method.kernel, *refused));
  } else {
    check_attention_of(c, method.kernel, look, outcome);
  }
  if (!outcome.attention.empty()) outcome.looked = words(look, problem);
  return outcome;
}

std::string command_of(const check::Case& c, const Method& method, const std::string& way) {
  std::string command = "weft verify " + check::flags(c);
  if (!way.empty()) command += " " + way;
  if (method.checked) command += " --checked";
  const std::string_view otherwise = method.schedules.empty() && method.micros == 0 ? check::kReference : "";
  return command + (method.kernel == otherwise ? "" : " --kernel " + method.kernel);
}

void Tally::add(const check::Case& c, const Outcome& outcome) {
  for (const std::string& reason : outcome.skipped) ++skipped_[reason];
  ran_ += static_cast<Index>(outcome.attention.size());
  refused_ += outcome.refused;
  if (!outcome.checked() && !outcome.failure) {
    ++unchecked_;
    return;
  }
  ++cases_;
  if (outcome.failure) ++failed_;
  attended_ = attended_ || !outcome.attention.empty();
  if (!outcome.looked.empty()) ++sampled_;
  if (outcome.law && outcome.law->nontrivial) ++nontrivial_;
  ++by_layout_[std::string(name(c.layout))][check::mask_class(c)];
  for (const check::AttendReport& report : outcome.attention) {
    for (const check::Measure& m : report.measures) {
      if (!worst_ || worse(m.worst, worst_->ratio))
        worst_ = Worst{m.worst, m.norm, m.tensor, report.keys, m.where, command_of(c, method_, report.flags)};
    }
  }
}

std::string Tally::why_skipped() const {
  if (skipped_.empty()) return {};
  const std::size_t more = skipped_.size() - 1;
  return more == 0 ? skipped_.begin()->first
                   : fmt::format("{} (and {} more reason{})", skipped_.begin()->first, more, more == 1 ? "" : "s");
}

void Tally::leave_out(Index cases, std::string reason) {
  left_out_ = cases;
  left_out_why_ = std::move(reason);
}

void Tally::set_seeds(unsigned long long first, unsigned long long next) { seeds_ = {first, next}; }

json Worst::to_json() const {  // JSON has no infinity and no NaN: both become null
  return {{"ratio", ratio}, {"norm", norm}, {"tensor", tensor}, {"keys", keys}, {"where", where}, {"command", command}};
}

json Tally::to_json() const {
  json out = {{"kernel", method_.kernel_words()},
              {"cases", cases_},
              {"failed", failed_},
              {"with_remote_keys", nontrivial_},
              {"skipped", json::array()},
              {"worst", nullptr},
              {"by_layout", by_layout_},
              {"left_out", left_out_},
              {"ran", ran_},
              {"refused", refused_},
              {"sampled", sampled_},
              {"unchecked", unchecked_}};
  for (const auto& [reason, count] : skipped_) out["skipped"].push_back({{"reason", reason}, {"count", count}});
  if (worst_) out["worst"] = worst_->to_json();
  if (seeds_) out["seeds"] = {seeds_->first, seeds_->second};
  return out;
}

void Tally::print() const {
  fmt::print("{:<12}", "");
  for (const char* mask : kMasks)
    fmt::print("{:>{}}", mask, std::max<std::size_t>(std::string_view(mask).size(), 6) + 2);
  fmt::print("\n");
  for (const auto& [layout, row] : by_layout_) {
    fmt::print("{:<12}", layout);
    for (const char* mask : kMasks) {
      const auto at = row.find(mask);
      fmt::print("{:>{}}", grouped(at == row.end() ? 0 : at->second),
                 std::max<std::size_t>(std::string_view(mask).size(), 6) + 2);
    }
    fmt::print("\n");
  }
  if (worst_)
    fmt::print("\nworst element: {:.3g} of its bound, {} at {} (keys: {}), relative norm {:.1e}\n", worst_->ratio,
               worst_->tensor, worst_->where, worst_->keys, worst_->norm);
  for (const auto& [reason, count] : skipped_) fmt::print("skipped {} times: {}\n", grouped(count), reason);
  if (!method_.schedules.empty())
    fmt::print("{} runs by schedules: {} compared, {} refused for reasons above\n", grouped(ran_ + refused_),
               grouped(ran_), grouped(refused_));
  if (unchecked_ > 0)
    fmt::print("{} cases could not be checked at all, for reasons above; they are not among the following\n",
               grouped(unchecked_));
  if (sampled_ > 0)
    fmt::print("{} cases were too large to be compared whole: {} rows and {} keys of each looked at\n",
               grouped(sampled_), kSampled, kSampled);
  fmt::print("{} cases, {} of them with keys on other ranks: {} failed\n", grouped(cases_), grouped(nontrivial_),
             grouped(failed_));
  if (left_out_ > 0)
    fmt::print("{} of {} cases were left out: {}{}\n", grouped(left_out_), grouped(left_out_ + cases_), left_out_why_,
               seeds_ ? fmt::format("; --seed {} goes on with them", seeds_->second) : "");
}

}  // namespace weft::tool
