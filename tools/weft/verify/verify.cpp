// weft verify: the law and attention against the dense formula, on one problem or on many random ones.
#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "check/by_schedule.h"
#include "flags/auto_choice.h"
#include "flags/memory_check.h"
#include "flags/process_ranks.h"
#include "flags/schedule_flags.h"
#include "terminal/json_file.h"
#include "terminal/numbers.h"
#include "terminal/words.h"
#include "verbs.h"
#include "verify/modes.h"
#include "verify/random_set.h"
#include "verify/tally.h"
#include "weft/error.h"
#include "weft/kernel.h"

namespace weft::tool {
namespace {

constexpr Index kMaxRandom = 1'000'000'000, kMaxMicros = 4096;

void print_law(const check::LawReport& law) {
  const std::string holds = law.planned ? "ok" : "no plan, strides of queries and keys differ; layouts alone ok";
  fmt::print("The law: every visible pair in exactly one slice, no other pair in any.\n  {} pairs, {} slices: {}\n",
             grouped(law.pairs), grouped(law.slices), law.violation ? "FAILED, " + *law.violation : holds);
}

std::string ratio_text(double ratio) {
  return ratio < 1000 ? fmt::format("{:.3f}", ratio) : fmt::format("{:.1e}", ratio);
}

void print_attention(const std::vector<check::AttendReport>& reports, const Method& method, const std::string& looked) {
  fmt::print("\nAttention of all ranks together against a dense softmax in f64{}.\n",
             looked.empty() ? "" : fmt::format(" ({})", looked));
  std::size_t width = 16;
  for (const check::AttendReport& report : reports) width = std::max(width, report.keys.size() + 2);
  fmt::print("  {:<12}{:<{}}{:>10}{:>12}  {:<8}{}\n", "",
             method.micros > 0          ? "way"
             : method.schedules.empty() ? "keys"
                                        : "schedule",
             width, "of bound", "rel. norm", "", "worst element");
  for (const check::AttendReport& report : reports) {
    for (const check::Measure& m : report.measures)
      fmt::print("  {:<12}{:<{}}{:>10}{:>12.1e}  {:<8}{}\n", m.tensor, report.keys, width, ratio_text(m.worst), m.norm,
                 m.worst < 1 ? "ok" : "FAILED", m.where);
    if (report.fault) fmt::print("  {:<12}{:<{}}FAILED  {}\n", "traffic", report.keys, width, *report.fault);
  }
}

void print_outcome(const Outcome& outcome, const Method& method) {
  if (outcome.law) print_law(*outcome.law);
  if (!outcome.attention.empty()) print_attention(outcome.attention, method, outcome.looked);
  if (outcome.failure) fmt::print("FAILED {}\n", *outcome.failure);
  for (const std::string& reason : outcome.skipped) fmt::print("Skipped {}\n", reason);
  if (!outcome.skipped.empty())
    fmt::print("{} check{} skipped\n", outcome.skipped.size(), outcome.skipped.size() == 1 ? "" : "s");
}

// The law is about plans: a schedule or kernel that was asked for is right only if it computed something.
int verdict(const Flags& flags, const Tally& tally) {
  if (tally.failed() > 0) return kFailed;
  if (tally.cases() == 0) {
    fmt::print(stderr, "weft: nothing was checked, so nothing is known to be right: {}; use a smaller problem\n",
               tally.why_skipped());
    return kNothingRan;
  }
  if (tally.attended()) return 0;
  for (const char* asked : {"schedule", "micro", "kernel"}) {
    if (!flags.given(asked)) continue;
    fmt::print(stderr, "weft: --{} {} computed nothing: {}; ask for what can run (weft explain --support)\n", asked,
               *flags.find(asked), tally.why_skipped());
    return kNothingRan;
  }
  return 0;
}

// The same of one problem, whose schedules were named one by one: all of them have to run.
int verdict(const Flags& flags, const Tally& tally, const Outcome& outcome) {
  const int code = verdict(flags, tally);
  if (code != 0 || outcome.never_ran.empty() || flags.text("schedule", "all") == "all") return code;
  std::vector<std::string_view> names;
  for (const ScheduleKind kind : outcome.never_ran) names.push_back(name(kind));
  fmt::print(stderr, "weft: --schedule {}: {} cannot run, see why above; leave it out, or use --schedule all\n",
             *flags.find("schedule"), fmt::join(names, ", "));
  return kNothingRan;
}

// Kernels by their full names, so that a report says what ran; Error for a name that no kernel has.
// The schedules are those of the list, or the ones that the caller has already.
Method method_of(const Flags& flags, const std::vector<ScheduleOptions>* schedules = nullptr) {
  const Index micros = flags.within("micro", 0, flags.given("micro") ? 1 : 0, kMaxMicros, " micro-sequences");
  if (micros > 0)
    return {.kernel = flags.given("kernel") ? std::string(find_kernel(*flags.find("kernel")).name) : "",
            .checked = flags.given("checked"),
            .micros = micros};
  if (!flags.given("schedule")) {
    flags.refuse(schedule_option_names({"comm", "format", "checked"}), " without --schedule",
                 "add e.g. --schedule all, or leave it out");
    return {.kernel = std::string(find_kernel(flags.text("kernel", check::kReference)).name)};
  }
  if (communicator_of(flags) != "threads" && !flags.given("random"))
    throw Error(fmt::format("--comm {} on one problem", communicator_of(flags)),
                "use --random, --matrix or --set, whose ranks are the processes");
  return {.kernel = flags.given("kernel") ? std::string(find_kernel(*flags.find("kernel")).name) : "",
          .schedules = schedules != nullptr ? *schedules : schedules_of(flags, *flags.find("schedule")),
          .checked = flags.given("checked"),
          .world = process_world()};
}

// Sums of large problems are long, which small ones say nothing about. Without schedules one thread computes three ways
// of bringing keys to ranks, by default in f64: too long to be drawn unasked.
LargeShare large_of(const Flags& flags, bool by_schedule) {
  constexpr Index kOneIn = 500, kLeast = 100, kMost = 1'000'000;
  LargeShare large;
  large.one_in = flags.within("large", by_schedule ? kOneIn : 0, 0, kMaxRandom,
                              ": 1 for all problems, 500 for one in 500, 0 for none");
  large.sizes.most = flags.within("tokens-up-to", large.sizes.most, kLeast, kMost);
  large.sizes.least = flags.within("tokens-from", std::min(large.sizes.least, large.sizes.most / 2), kLeast / 2,
                                   large.sizes.most, ", which is --tokens-up-to");
  return large;
}

// Processes check the same problems at the same time, and those of random problems are 2 to 8.
void check_world(const Flags& flags) {
  constexpr Index kLeast = 2, kMost = 8;
  const Communicator* world = process_world();
  if (world == nullptr) return;
  flags.refuse({"time-limit", "threads"}, " with processes", "leave it out: they would not stop at the same problem");
  if (world->ranks() < kLeast || world->ranks() > kMost)
    throw Error(fmt::format("--random on {} processes", world->ranks()),
                "start 2 to 8: random problems have as many ranks");
  if (!flags.given("schedule"))
    throw Error(fmt::format("--random with --comm {} and no schedule", communicator_of(flags)), "add --schedule all");
}

int verify_random(const Flags& flags) {
  refuse_auto(flags, "--random");
  check_world(flags);
  std::vector<std::string> drawn = problem_flags({"format", "head-map"});
  if (process_world() != nullptr) std::erase(drawn, "ranks");  // how many processes there are
  flags.exclude("random", drawn, "random problems are drawn whole; only --layout can be chosen");
  RandomSet set{.count = flags.within("random", 2000, 1, kMaxRandom, " problems"),
                .seed = seed_of(flags),
                .threads = process_world() != nullptr ? 1 : threads_of(flags),
                .method = method_of(flags),
                .large = {},
                .limit = time_limit_of(flags)};
  if (flags.given("layout")) set.layout = layout_of(flags);
  set.trees = flags.given("trees");
  flags.exclude("trees", {"large", "tokens-from", "tokens-up-to"},
                "leave one of them out: large trees are drawn among other problems");
  if (!set.trees) set.large = large_of(flags, !set.method.schedules.empty());
  const Communicator* world = process_world();
  JsonOutput output(world != nullptr && world->rank() > 0 ? nullptr : flags.find("json"));
  const Tally tally = check_random(set);
  tally.print();
  output.write(tally.to_json());
  return verdict(flags, tally);
}

// Refuses what layouts, formats, schedules and threads refuse, before anything is written. What the capability table
// refuses is no bad input: the check wants to see it refused. Says which of all schedules are left out.
std::vector<std::string> check_places(const Flags& flags, const check::Case& c, const Problem& problem,
                                      Method& method) {
  const Layouts layouts = check::layouts_of(c, problem);
  check::check_format(c, problem);
  if (method.schedules.empty() && method.micros == 0) return {};
  check_thread_ranks(c.ranks);
  if (method.schedules.empty()) return {};
  return leave_out_impossible(flags, c, problem, layouts, method.schedules);
}

int verify_one(const Flags& flags) {
  flags.refuse({"threads"}, " without --random", "one problem takes one thread");
  flags.refuse({"large", "tokens-from", "tokens-up-to", "trees"}, " without --random",
               "leave it out, or add --random 500");
  flags.refuse({"time-limit"}, " without --random, --matrix or --set", "one problem is checked whole");
  AutoProblem asked = auto_problem(flags, kVerifyDefaults);
  check::Case& c = asked.given;
  if (flags.given("micro") && !flags.given("mask") && !c.mask.slices) c.mask.causal = true;  // as weft explain --micro
  Method method = method_of(flags, &asked.schedules);
  const Problem problem = check::problem_of(c);
  if (!method.schedules.empty() || method.micros > 0)  // otherwise what is too large is skipped
    check_memory("the ranks' tensors and their gradients take", tensor_bytes(c, problem, true));
  const std::vector<std::string> left_out = check_places(flags, c, problem, method);
  JsonOutput output(flags.find("json"));
  fmt::print("{}\n{}, kernel {}\n", problem_words(c, problem), attention_words(c), method.kernel_words());
  fmt::print("{}\n", asked.why.empty() ? "" : asked.why + "\n");
  Outcome outcome = check_case(c, method);
  for (const std::string& reason : left_out) outcome.skipped.push_back(fmt::format("attention: {}", reason));
  print_outcome(outcome, method);
  Tally tally(method);
  tally.add(c, outcome);
  output.write(tally.to_json());
  return verdict(flags, tally, outcome);
}

}  // namespace

std::vector<FlagSpec> verify_flags() {
  std::vector<FlagSpec> all = {
      {"random", "N",
       "check N random problems instead of one from flags, drawn from --seed, --seed + 1, ..; --layout restricts them"},
      {"large", "N", "with --random: one of N problems has 4,000 tokens or more (with --schedule 500, otherwise none)"},
      {"tokens-from", "N", "with --random: tokens of the smallest of these (4000)"},
      {"tokens-up-to", "N", "with --random: tokens of the largest (20000)"},
      {"trees", "", "with --random: all problems are trees of branches that share prefixes"},
      {"matrix", "NAME",
       "quick or full: layouts x masks x packings x .. by all schedules; takes lists of --ranks, "
       "--layout, --dtype"},
      {"set", "NAME", "te-grid: what Transformer Engine tests context parallelism with, --scale times smaller (32)"},
      {"accuracy", "NAME",
       "quick or full (rows of 131,072 keys): kernels on inputs that are hard on arithmetic, against the "
       "documented bounds; takes --kernel, --dtype"},
      {"micro", "M",
       "in M micro-sequences through a K/V buffer, one problem or --random: keys in time and ahead, even work, dropped "
       "and recomputed; masks are causal if not given"},
      {"pairwise", "", "of --matrix or --set as few runs as let any two values of any two axes meet"},
      {"time-limit", "SECONDS", "with these: start nothing more after so long; what was left out is counted"},
      {"threads", "N", "with these; as many as the machine has if not given, the result is the same"},
      {"kernel", "NAME", "reference (default; with schedules the best here), cpu, cpu.scalar, .."}};
  for (FlagSpec& flag : schedule_flags()) all.push_back(std::move(flag));
  all.push_back(kMachineFlag);
  return all;
}

int verify(const Flags& flags) {
  if (flags.given("micro")) {
    std::vector<std::string> others = schedule_option_names({"schedule", "comm", "format", "matrix", "set"});
    for (const char* other : {"accuracy", "keys", "docs-k", "cu-seqlens-k"}) others.emplace_back(other);
    flags.exclude("micro", others, "leave one of them out: micro-sequences gather keys into one buffer of the stream");
  }
  if (flags.given("accuracy")) return verify_accuracy(flags);
  if (!flags.given("matrix") && !flags.given("set"))
    flags.refuse({"pairwise"}, " without --matrix or --set", "leave it out, or add e.g. --matrix full");
  for (const char* grid : {"matrix", "set"})
    if (flags.given(grid)) refuse_auto(flags, fmt::format("--{}", grid));
  if (flags.given("matrix")) return verify_matrix(flags);
  if (flags.given("set")) return verify_set(flags);
  return flags.given("random") ? verify_random(flags) : verify_one(flags);
}

}  // namespace weft::tool
