// weft verify: the law and attention against the dense formula, on one problem or on many random ones.
#include <algorithm>
#include <thread>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "json_file.h"
#include "numbers.h"
#include "random_set.h"
#include "tally.h"
#include "verbs.h"
#include "weft/error.h"
#include "weft/kernel.h"
#include "words.h"

namespace weft::tool {
namespace {

constexpr Index kMaxRandom = 1'000'000'000, kMaxThreads = 1024;

void print_law(const check::LawReport& law) {
  const std::string holds = law.planned ? "ok" : "no plan, strides of queries and keys differ; layouts alone ok";
  fmt::print("The law: every visible pair in exactly one slice, no other pair in any.\n  {} pairs, {} slices: {}\n",
             grouped(law.pairs), grouped(law.slices), law.violation ? "FAILED, " + *law.violation : holds);
}

std::string ratio_text(double ratio) {
  return ratio < 1000 ? fmt::format("{:.3f}", ratio) : fmt::format("{:.1e}", ratio);
}

void print_attention(const std::vector<check::AttendReport>& reports) {
  fmt::print("\nAttention of all ranks together against a dense softmax in f64.\n");
  fmt::print("  {:<12}{:<16}{:>10}{:>12}  {:<8}{}\n", "", "keys", "of bound", "rel. norm", "", "worst element");
  for (const check::AttendReport& report : reports) {
    for (const check::Measure& m : report.measures)
      fmt::print("  {:<12}{:<16}{:>10}{:>12.1e}  {:<8}{}\n", m.tensor, report.keys, ratio_text(m.worst), m.norm,
                 m.worst < 1 ? "ok" : "FAILED", m.where);
  }
}

void print_outcome(const Outcome& outcome) {
  if (outcome.law) print_law(*outcome.law);
  if (!outcome.attention.empty()) print_attention(outcome.attention);
  for (const std::string& reason : outcome.skipped) fmt::print("Skipped {}\n", reason);
}

int verdict(const Flags& flags, const Tally& tally) {
  if (flags.given("kernel") && !tally.attended() && tally.failed() == 0) {
    fmt::print(stderr, "weft: kernel {} computed nothing; see why it was skipped\n", *flags.find("kernel"));
    return 1;
  }
  if (tally.cases() > 0) return tally.failed() > 0 ? 1 : 0;
  fmt::print(stderr, "weft: nothing was checked, so nothing is known to be right; use a smaller problem\n");
  return 1;
}

// Its full name, so that a report says what ran; Error for a name that no kernel has.
std::string kernel_of(const Flags& flags) {
  return std::string(find_kernel(flags.text("kernel", check::kReference)).name);
}

int verify_random(const Flags& flags) {
  for (const std::string_view name : problem_flags())
    flags.exclude("random", {name}, "random problems are drawn whole; only --layout can be chosen");
  RandomSet set{.count = flags.whole("random", 0, "2000"),
                .seed = seed_of(flags),
                .threads = flags.whole("threads", std::max(1U, std::thread::hardware_concurrency()), "2"),
                .kernel = kernel_of(flags)};
  if (set.count < 1 || set.count > kMaxRandom)
    throw Error(fmt::format("--random {}", set.count), fmt::format("use from 1 to {} problems", kMaxRandom));
  if (set.threads < 1 || set.threads > kMaxThreads)
    throw Error(fmt::format("--threads {}", set.threads), fmt::format("use from 1 to {}", kMaxThreads));
  if (flags.given("layout")) set.layout = layout_of(flags);
  JsonOutput output(flags.find("json"));
  const Tally tally = check_random(set);
  tally.print();
  output.write(tally.to_json());
  return verdict(flags, tally);
}

int verify_one(const Flags& flags) {
  if (flags.given("threads"))
    throw Error(fmt::format("--threads {} without --random", *flags.find("threads")), "one problem takes one thread");
  const check::Case c = case_of(flags, kVerifyDefaults);
  const std::string kernel = kernel_of(flags);
  const Problem problem = check::problem_of(c);
  check::layouts_of(c, problem);  // refuses what it refuses before anything is written
  JsonOutput output(flags.find("json"));
  fmt::print("{}\n{}, kernel {}\n\n", problem_words(c, problem), attention_words(c), kernel);
  const Outcome outcome = check_case(c, kernel);
  print_outcome(outcome);
  Tally tally(kernel);
  tally.add(c, outcome);
  output.write(tally.to_json());
  return verdict(flags, tally);
}

}  // namespace

const std::vector<FlagSpec>& verify_flags() {
  static const std::vector<FlagSpec> flags = {
      {"random", "N", "check N random problems instead of one from flags; --layout restricts them"},
      {"threads", "N", "with --random; as many as the machine has if not given, the result is the same"},
      {"kernel", "NAME", "reference (default); cpu is the best CPU target here; cpu.scalar, .. one of them"}};
  return flags;
}

int verify(const Flags& flags) { return flags.given("random") ? verify_random(flags) : verify_one(flags); }

}  // namespace weft::tool
