#include "bench/case.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "flags/memory_check.h"
#include "terminal/numbers.h"
#include "terminal/words.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

// Drawn once, exp(normal) with median 167 and sigma 0.75, and kept, so that a rate means the same in every version:
// 40 documents, 8,521 tokens, 1,446,921 visible pairs.
const std::vector<Index> kDocuments = {262, 133, 306, 452, 90, 176, 54,  444, 104, 453, 962, 411, 194, 261,
                                       123, 57,  153, 131, 99, 221, 177, 313, 74,  197, 302, 84,  138, 165,
                                       150, 136, 79,  246, 67, 87,  89,  168, 265, 181, 165, 352};

struct NamedCase {
  std::string_view name, about;
  std::vector<Index> lengths;
  Index heads_q, heads_k, dim;
  Timing timing;
  std::vector<DType> dtypes;
};

const std::vector<NamedCase>& named_cases() {
  const std::vector<DType> all = {DType::f32, DType::bf16, DType::f16}, f32 = {DType::f32};
  static const std::vector<NamedCase> cases = {
      {"dense128", "one sequence, causal", {2048}, 8, 8, 128, Timing::rounds, all},
      {"dense64", "the same, narrower heads", {2048}, 8, 8, 64, Timing::rounds, all},
      {"packed", "documents in one stream, causal, grouped heads", kDocuments, 8, 2, 128, Timing::rounds, all},
      {"long", "one long document, run once: peak memory", {65536}, 1, 1, 128, Timing::once, f32},
      {"scaling", "dense128 with all threads against one", {2048}, 8, 8, 128, Timing::scaling, f32}};
  return cases;
}

// Torch has no fast attention in 16 bits on CPUs, so packs are compared with its f32; 16 bits are also compared with
// Weft's own f32, which they are meant to beat.
std::vector<Rival> rivals_of(const NamedCase& from, DType dtype) {
  if (from.timing != Timing::rounds) return {};
  std::vector<Rival> rivals;
  if (from.lengths.size() > 1)
    rivals = {{Rival::Kind::loop, DType::f32}, {Rival::Kind::slices, DType::f32}};
  else if (dtype != DType::f16)
    rivals.push_back({Rival::Kind::sdpa, dtype});
  if (from.lengths.size() > 1 && dtype == DType::f32) rivals.push_back({Rival::Kind::mask, dtype});
  if (dtype != DType::f32) rivals.push_back({Rival::Kind::weft, DType::f32});
  return rivals;
}

check::Case problem_of(const NamedCase& from, DType dtype) {
  check::Case c;
  for (const Index n : from.lengths) c.q.cu_seqlens.push_back(c.q.cu_seqlens.back() + n);
  c.mask.causal = true;
  c.heads_q = from.heads_q;
  c.heads_k = from.heads_k;
  c.dim_qk = c.dim_v = from.dim;
  c.dtype = dtype;
  return c;
}

std::string all_names() {
  std::vector<std::string_view> names;
  for (const NamedCase& c : named_cases()) names.push_back(c.name);
  return fmt::format("{}", fmt::join(names, ", "));
}

// Whatever --cases says, in the order of the list; all if it says nothing.
std::vector<const NamedCase*> chosen_cases(const Flags& flags) {
  std::vector<std::string_view> wanted;
  if (const std::string* names = flags.find("cases")) wanted = split(*names, ',');
  std::vector<const NamedCase*> chosen;
  for (const NamedCase& c : named_cases()) {
    const auto end = std::remove(wanted.begin(), wanted.end(), c.name);
    if (end != wanted.end() || !flags.given("cases")) chosen.push_back(&c);
    wanted.erase(end, wanted.end());
  }
  if (!wanted.empty())
    throw Error(fmt::format("--cases: there is no '{}'", wanted.front()), fmt::format("use {}", all_names()));
  return chosen;
}

std::vector<BenchTask> named_tasks(const Flags& flags) {
  std::vector<BenchTask> tasks;
  const std::vector<const NamedCase*> chosen = chosen_cases(flags);
  const std::string* const only = flags.find("dtype");
  for (const NamedCase* c : chosen) {
    for (const DType type : c->dtypes) {
      if (only && type != dtype(*only)) continue;
      for (const Pass pass : passes_of(flags))
        tasks.push_back({std::string(c->name), problem_of(*c, type), pass, c->timing, rivals_of(*c, type)});
    }
  }
  if (tasks.empty())
    throw Error(fmt::format("--dtype {}: no case has it", *only), "see weft bench --list, or give a problem by --docs");
  return tasks;
}

std::vector<BenchTask> custom_tasks(const Flags& flags) {
  constexpr Defaults kDefaults = {"8:2", "128", "f32"};
  flags.refuse({"ranks", "layout", "runs", "runs-k"}, "", "bench times the kernel of one rank: leave it out");
  std::vector<BenchTask> tasks;
  BenchTask task{.name = "custom", .problem = case_of(flags, kDefaults)};
  const bool backward = passes_of(flags).back() == Pass::backward;
  check_memory(backward ? "its tensors and their gradients take" : "its tensors take",
               tensor_bytes(task.problem, check::problem_of(task.problem), backward));
  if (plain(task.problem))  // a peer knows no more
    task.rivals = {{Rival::Kind::loop, task.problem.dtype}};
  for (const Pass pass : passes_of(flags)) {
    task.pass = pass;
    tasks.push_back(task);
  }
  return tasks;
}

}  // namespace

bool plain(const check::Case& c, bool windows) {
  return !c.k && c.q.cu_seqlens_padded.empty() && !c.q.tokens && c.q.cu_seqlens.front() == 0 && !c.mask.slices &&
         !c.mask.chunk && (windows || c.mask.left == -1) && c.mask.right == -1 && !c.scale && c.softcap == 0 &&
         c.sink == check::Case::SinkKind::none && c.dtype != DType::f64;
}

std::string_view name(Rival::Kind kind) {
  switch (kind) {
    case Rival::Kind::sdpa:
      return "sdpa";
    case Rival::Kind::loop:
      return "loop";
    case Rival::Kind::slices:
      return "slices";
    case Rival::Kind::mask:
      return "mask";
    case Rival::Kind::weft:
      break;
  }
  return "weft";
}

std::string_view name(Pass pass) { return pass == Pass::forward ? "forward" : "backward"; }

bool has_own_problem(const Flags& flags) {
  bool own = flags.given("layout");
  for (const std::string& name : problem_flags()) {
    if (name == "dtype") continue;  // also chooses among the named cases
    flags.exclude("cases", {name}, "named cases are whole problems; only --dtype and --pass choose among them");
    own = own || flags.given(name);
  }
  return own;
}

std::vector<BenchTask> bench_tasks(const Flags& flags) {
  return has_own_problem(flags) ? custom_tasks(flags) : named_tasks(flags);
}

void list_bench_cases() {
  for (const NamedCase& c : named_cases()) {
    std::vector<std::string_view> dtypes;
    for (const DType type : c.dtypes) dtypes.push_back(weft::name(type));
    fmt::print("{:<10}{}: {}, heads {}:{}, dim {}; {}\n", c.name, c.about,
               documents_words(Stream::from_lengths(c.lengths)), c.heads_q, c.heads_k, c.dim, fmt::join(dtypes, ", "));
  }
}

Index flops_per_pair(Pass pass, Index dim_qk, Index dim_v) {
  return pass == Pass::forward ? 2 * (dim_qk + dim_v) : 2 * (3 * dim_qk + 2 * dim_v);
}

double useful_flops(const BenchTask& task) {
  const check::Case& c = task.problem;
  return static_cast<double>(check::problem_of(c).visible_pairs()) *
         static_cast<double>(c.heads_q * flops_per_pair(task.pass, c.dim_qk, c.dim_v));
}

}  // namespace weft::tool
