// The flags of the command as the user wrote them, and the problem that they describe.
#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "check/cases/case.h"
#include "terminal/progress.h"
#include "weft/kernel.h"
#include "weft/tree.h"

namespace CLI {
class App;
}

namespace weft::tool {

struct FlagSpec {
  std::string name;  // "docs" for --docs
  std::string
      value;  // what stands for the value in --help; empty: takes none; "FILE..": one or more, lines of the value
  std::string help;
};

class Flags {
 public:
  // The shared flags, then those of one verb. The verb must not outlive this object.
  void add_to(CLI::App& verb, const std::vector<FlagSpec>& own);

  bool given(std::string_view name) const { return find(name) != nullptr; }
  // A copy with another value of one flag, for sweeps over lists.
  Flags with(std::string_view name, std::string value) const {
    Flags other = *this;
    other.values_[std::string(name)] = std::move(value);
    return other;
  }
  const std::string* find(std::string_view name) const;
  std::string text(std::string_view name, std::string_view otherwise) const;
  // Error unless the value is one of `names`, which it lists.
  std::string one_of(std::string_view name, const std::vector<std::string_view>& names) const;  // default: the first
  Index whole(std::string_view name, Index otherwise, std::string_view example) const;          // 4096, 64k, 1M
  // The same within a range; `of` follows its end in the error: "use from 1 to 256 ranks, which are threads".
  Index within(std::string_view name, Index otherwise, Index least, Index most, std::string_view of = "") const;
  // Error if any of these is given: "--links 0,1 without --schedule", where `why` is " without --schedule".
  void refuse(const std::vector<std::string>& names, std::string_view why, std::string_view remedy) const;
  // Error if any of `others` is given too: "--docs 5,7 and --cu-seqlens 0,5".
  void exclude(std::string_view name, const std::vector<std::string>& others, std::string_view remedy) const;
  // " --docs 5,7 --mask causal": all of them, quoted for a shell where needed, long values cut short.
  std::string words() const;

 private:
  std::string said(std::string_view name) const;  // "--docs 5,7", of a flag that is given
  void add(CLI::App& verb, const std::string& group, const FlagSpec& flag);

  std::map<std::string, std::string, std::less<>> values_;
  std::set<std::string> several_;  // names of those whose value is several words
};

// Defaults where no flag is given: explain takes a model of today's size, verify one that is quick.
struct Defaults {
  std::string_view heads, dim, dtype;
};
inline constexpr Defaults kExplainDefaults = {"32:8", "128", "bf16"};
inline constexpr Defaults kVerifyDefaults = {"2:1", "8", "f32"};

// Balances the load of the mask at hand over any documents.
inline constexpr std::string_view kDefaultLayout = "balanced";

check::Case case_of(const Flags& flags, const Defaults& defaults);
Tree tree_of(const Flags& flags);  // --tree, padded as --padded-to and --tokens say
LayoutKind layout_of(const Flags& flags);
unsigned long long seed_of(const Flags& flags);
TimeLimit time_limit_of(const Flags& flags);      // --time-limit 120, or 120s
Index threads_of(const Flags& flags);             // --threads; as many as the machine has if not given
std::vector<Pass> passes_of(const Flags& flags);  // --pass both, forward or backward

// Flags that say which problem it is, which is what `verify --random` draws by itself; and `more`.
std::vector<std::string> problem_flags(const std::vector<std::string>& more = {});

}  // namespace weft::tool
