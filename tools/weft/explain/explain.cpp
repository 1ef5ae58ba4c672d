// weft explain: who holds which tokens, and which slices each rank gets.
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "explain/loads.h"
#include "explain/modes.h"
#include "explain/picture.h"
#include "explain/table.h"
#include "explain/tree.h"
#include "terminal/json_file.h"
#include "terminal/numbers.h"
#include "terminal/words.h"
#include "verbs.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

using nlohmann::json;

KeyOrder key_order(const Flags& flags, const Layouts& layouts) {
  const bool strided = layouts.k.rank_order().stride() != 1;
  if (!flags.given("keys")) return strided ? KeyOrder::rank : KeyOrder::sequence;
  return flags.one_of("keys", {"sequence", "rank"}) == "rank" ? KeyOrder::rank : KeyOrder::sequence;
}

bool as_picture(const Flags& flags, const check::Case& c, const Problem& problem, const Layouts& layouts) {
  const std::string view = flags.one_of("view", {"auto", "picture", "table"});
  if (view == "picture" && !fits_picture(c, problem, layouts))
    throw Error(fmt::format("--view picture: {} query tokens, {} key tokens and {} ranks do not fit a screen",
                            problem.packing().q().tokens(), problem.packing().k().tokens(), c.ranks),
                fmt::format("use at most {}, rows without large gaps, or --view table", picture_limits()));
  return view == "auto" ? fits_picture(c, problem, layouts) : view == "picture";
}

// Every rank looks at every sequence: past this it takes minutes.
void check_size(const check::Case& c, const Problem& problem) {
  constexpr Index kMaxWork = Index{1} << 31;
  const Index sequences = problem.packing().sequences();
  if (sequences > kMaxWork / c.ranks)
    throw Error(fmt::format("{} documents on {} ranks are too many to go through", sequences, c.ranks),
                fmt::format("use fewer: documents x ranks up to {}", kMaxWork));
}

json to_json(const check::Case& c, const Problem& problem, const Loads& all, KeyOrder order) {
  const Packing& packing = problem.packing();
  json out = {{"layout", name(c.layout)},
              {"mask", mask_words(c.mask)},
              {"keys", order == KeyOrder::sequence ? "sequence" : "rank"},
              {"docs", packing.q().used_lengths()},
              {"tokens", packing.q().tokens()},
              {"pairs", problem.visible_pairs()},
              {"imbalance", all.imbalance},
              {"bytes_per_key", all.bytes_per_key},
              {"bytes_all_gather", all.gathered_keys * all.bytes_per_key},
              {"ranks", json::array()}};
  if (!packing.self()) {
    out["docs_k"] = packing.k().used_lengths();
    out["tokens_k"] = packing.k().tokens();
  }
  for (const RankLoad& s : all.ranks) {
    json rank = {{"rows", all.q_rows}, {"tokens", s.tokens}, {"pairs", s.pairs}, {"load", s.of_mean}};
    if (s.touched) {
      rank["slices"] = s.touched->slices;
      rank["keys_touched"] = s.touched->keys;
      rank["keys_remote"] = s.touched->remote;
      rank["bytes_touched"] = s.touched->remote * all.bytes_per_key;
    }
    out["ranks"].push_back(std::move(rank));
  }
  return out;
}

}  // namespace

std::vector<FlagSpec> explain_flags() {
  return with_figure_flags(
      {{"keys", "ORDER", "sequence (default) or rank (the default for striped): whose rows slices count keys in"},
       {"view", "NAME", "auto (default), picture or table"},
       {"support", "", "what works with what on one rank and by each schedule, and the kernels of this machine"},
       {"micro", "M",
        "windows of M micro-sequences instead: queries, keys and cu_seqlens of each; causal if no --mask"},
       {"remainder", "NAME", "--micro with tokens that do not divide by M x ranks: pad (default) or refuse"},
       {"even", "NAME", "--micro: windows of equal tokens (default), or micro-sequences of equal work, visible pairs"},
       {"flight", "FILE..",
        "the last calls of ranks that hung or failed, from the files that they wrote: one timeline, and where they "
        "parted"}});
}

int explain(const Flags& flags) {
  if (flags.given("flight")) {
    for (const FlagSpec& flag : explain_flags())
      if (flag.name != "html" && flag.name != "flight")
        flags.exclude("flight", {flag.name}, "leave it out: records say all that is drawn");
    flags.exclude("flight", problem_flags({"json"}), "leave it out: records say all that is drawn");
    return explain_flight(flags);
  }
  if (asks_for_figure(flags)) return explain_figure(flags);
  refuse_figure_flags(flags);
  if (flags.given("support")) return explain_support(flags);
  if (flags.given("micro") || flags.given("remainder") || flags.given("even")) return explain_micro(flags);
  const check::Case c = case_of(flags, kExplainDefaults);
  const Problem problem = check::problem_of(c);
  check_size(c, problem);
  const Layouts layouts = check::layouts_of(c, problem);
  const bool picture = as_picture(flags, c, problem, layouts);
  const KeyOrder order = key_order(flags, layouts);
  const Loads loads = loads_of(c, problem, layouts, order);
  JsonOutput output(flags.find("json"));

  fmt::print("{}\n", problem_words(c, problem));
  const std::optional<Tree> tree = flags.given("tree") ? std::optional(tree_of(flags)) : std::nullopt;
  if (tree) draw_tree(*tree, layouts.q);
  if (picture) {
    fmt::print("{} visible pairs, {}\n\n", grouped(problem.visible_pairs()), imbalance_words(loads.imbalance));
    draw_picture(c, problem, layouts, order, loads);
  } else {
    fmt::print("{}, {}; keys in {} order\n\n", attention_words(c),
               fmt::format("{} of K and V a token", bytes_text(loads.bytes_per_key)),
               order == KeyOrder::sequence ? "sequence" : "rank");
    print_table(c, loads);
    fmt::print("\n{} visible pairs, {}\n", grouped(problem.visible_pairs()), imbalance_words(loads.imbalance));
  }
  json numbers = to_json(c, problem, loads, order);
  if (tree) numbers["tree"] = tree_json(*tree);
  output.write(numbers);
  return 0;
}

}  // namespace weft::tool
