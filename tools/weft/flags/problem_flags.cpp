// From flags to one problem, with the refusals that need to know the flags' names.
#include <fmt/format.h>

#include "check/cases/tree_case.h"
#include "flags/flags.h"
#include "flags/lengths.h"
#include "flags/schedule_flags.h"
#include "terminal/json_file.h"
#include "terminal/numbers.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

// More is no model's; keeps products of heads, widths and rows inside 64 bits.
constexpr Index kMaxHeads = 4096, kMaxDim = 4096;
constexpr Index kMaxRanks = Index{1} << 20;  // the library's limit

std::vector<Index> prefix_sums(const std::vector<Index>& lengths, Index multiple) {
  std::vector<Index> sums = {0};
  for (const Index n : lengths) sums.push_back(sums.back() + ceil_div(n, multiple) * multiple);
  return sums;
}

// One side's documents: suffix "" or "-k".
check::Side side_of(const Flags& flags, const std::string& suffix, unsigned long long seed) {
  const std::string docs = "docs" + suffix, cu = "cu-seqlens" + suffix, padded = "cu-seqlens-padded" + suffix;
  flags.exclude(docs, {cu, padded}, "give lengths or prefix sums, not both");
  flags.exclude("padded-to", {cu, padded}, "with prefix sums, say where documents begin with --cu-seqlens-padded");
  check::Side side;
  if (const std::string* lengths = flags.find(docs)) {
    const std::vector<Index> parsed = parse_lengths("--" + docs, *lengths, seed);
    side.cu_seqlens = prefix_sums(parsed, 1);
    const Index multiple = flags.within("padded-to", 1, 1, kMaxTokens);
    if (multiple > 1) side.cu_seqlens_padded = prefix_sums(parsed, multiple);
  } else {
    side.cu_seqlens = whole_numbers("--" + cu, flags.text(cu, ""), "0,5,12");
    if (const std::string* offsets = flags.find(padded))
      side.cu_seqlens_padded = whole_numbers("--" + padded, *offsets, "0,8,16");
  }
  const std::string tokens = "tokens" + suffix;
  if (flags.given(tokens)) side.tokens = flags.whole(tokens, 0, "4096");
  return side;
}

void choose_documents(const Flags& flags, check::Case& to) {
  if (!flags.given("docs") && !flags.given("cu-seqlens"))
    throw Error("no documents",
                "give their lengths, e.g. --docs 256,512,1024, or --cu-seqlens 0,256,768,1792, or --tree FILE");
  to.q = side_of(flags, "", to.seed);
  if (flags.given("docs-k") || flags.given("cu-seqlens-k")) {
    to.k = side_of(flags, "-k", to.seed + 1);  // another seed: the same distribution is to give other lengths
    return;
  }
  flags.refuse({"cu-seqlens-padded-k", "tokens-k", "runs-k"}, " without keys of their own",
               "add --docs-k or --cu-seqlens-k, or leave it out");
}

Mask mask_of(const Flags& flags) {
  Mask mask;
  if (const std::string* slices = flags.find("slices")) {
    flags.exclude("slices", {"mask", "align", "window", "chunk"}, "slices say all: write bands into their lo and hi");
    mask.slices = read_slices("--slices", *slices);
    return mask;
  }
  mask.causal = flags.one_of("mask", {"full", "causal"}) == "causal";
  mask.align =
      flags.one_of("align", {"top_left", "bottom_right"}) == "top_left" ? Align::top_left : Align::bottom_right;
  if (const std::string* window = flags.find("window")) {
    const std::vector<Index> sides = whole_numbers("--window", *window, "512,0");
    if (sides.size() != 2)
      throw Error(fmt::format("--window: '{}' is not two numbers", *window),
                  "write --window LEFT,RIGHT; -1 is unlimited");
    mask.left = sides[0];
    mask.right = sides[1];
  }
  if (flags.given("chunk")) mask.chunk = flags.whole("chunk", 1, "4096");
  return mask;
}

// A slice a chunk: past this they fill the memory.
void check_chunks(Index tokens, const Mask& mask) {
  constexpr Index kMaxChunks = Index{1} << 24;
  if (mask.chunk && *mask.chunk > 0 && tokens / *mask.chunk > kMaxChunks)
    throw Error(fmt::format("{} tokens in chunks of {} are too many slices to go through", tokens, *mask.chunk),
                fmt::format("use a larger chunk, or fewer tokens: up to {} chunks", kMaxChunks));
}

// A tree instead of documents; its mask is causal.
void choose_tree(const Flags& flags, check::Case& to) {
  flags.exclude("tree",
                {"docs", "docs-k", "cu-seqlens", "cu-seqlens-padded", "cu-seqlens-k", "cu-seqlens-padded-k", "tokens-k",
                 "runs-k", "slices", "align"},
                "a tree says what documents and slices there are: leave one of them out");
  if (flags.text("mask", "causal") != "causal")
    throw Error(fmt::format("--tree and --mask {}", *flags.find("mask")),
                "leave the mask out: that of a tree is causal");
  const Mask mask = mask_of(flags);
  const Tree given = tree_of(flags);
  check_chunks(given.rows(), mask);
  check::TreeCase tree = check::tree_case(given);
  tree.left = mask.left;
  tree.chunk = mask.chunk;
  set_tree(to, std::move(tree));
}

void choose_ranks(const Flags& flags, check::Case& to) {
  to.layout = layout_of(flags);
  to.ranks = flags.within("ranks", 4, 1, kMaxRanks, " ranks");
  if (to.layout != LayoutKind::explicit_runs)
    return flags.refuse({"runs", "runs-k"}, fmt::format(" with layout {}", name(to.layout)), "add --layout explicit");
  const auto read = [&](const std::string& name) {
    const std::string* value = flags.find(name);
    if (!value)
      throw Error(fmt::format("--layout explicit without --{}", name),
                  fmt::format("give the runs of each rank: --{} FILE.json", name));
    std::vector<std::vector<Run>> runs = read_runs("--" + name, *value);
    if (!flags.given("ranks") && name == "runs") to.ranks = static_cast<Index>(runs.size());
    if (static_cast<Index>(runs.size()) != to.ranks)
      throw Error(fmt::format("--{} has {} lists for {} ranks", name, runs.size(), to.ranks), "give one list a rank");
    return runs;
  };
  to.runs = read("runs");
  if (to.k) to.k_runs = read("runs-k");
}

struct Pair {
  Index first, second;
};

// "8:2", or "8" for both.
Pair pair_of(const std::string& flag, const std::string& text, std::string_view example, Index most) {
  const std::vector<std::string_view> parts = split(text, ':');
  if (parts.size() > 2)
    throw Error(fmt::format("{}: '{}' is not one or two numbers", flag, text),
                fmt::format("write e.g. {} {}", flag, example));
  const Pair pair{whole_number(flag, parts.front(), example), whole_number(flag, parts.back(), example)};
  if (pair.first < 1 || pair.second < 1 || pair.first > most || pair.second > most)
    throw Error(fmt::format("{} {}", flag, text), fmt::format("use numbers from 1 to {}", most));
  return pair;
}

void choose_head_map(const Flags& flags, const Pair& heads, check::Case& to) {
  const std::string* list = flags.find("head-map");
  if (!list) return;
  to.head_map = whole_numbers("--head-map", *list, "0,1,1");
  if (static_cast<Index>(to.head_map.size()) != heads.first)
    throw Error(fmt::format("--head-map has {} heads for {} query heads", to.head_map.size(), heads.first),
                "give the K/V head of each query head");
  for (const Index head : to.head_map) {
    if (head < 0 || head >= heads.second)
      throw Error(fmt::format("--head-map names K/V head {} of {}", head, heads.second),
                  fmt::format("use heads from 0 to {}", heads.second - 1));
  }
}

void choose_attention(const Flags& flags, const Defaults& defaults, check::Case& to) {
  const Pair heads = pair_of("--heads", flags.text("heads", defaults.heads), "32:8", kMaxHeads);
  choose_head_map(flags, heads, to);
  if (to.head_map.empty() && heads.first % heads.second != 0)
    throw Error(fmt::format("--heads {}:{}: {} query heads do not divide into {} groups", heads.first, heads.second,
                            heads.first, heads.second),
                "make the query heads a multiple of the K/V heads");
  const Pair dim = pair_of("--dim", flags.text("dim", defaults.dim), "192:128", kMaxDim);
  to.heads_q = heads.first;
  to.heads_k = heads.second;
  to.dim_qk = dim.first;
  to.dim_v = dim.second;
  to.dtype = dtype(flags.text("dtype", defaults.dtype));
  if (flags.given("scale")) to.scale = real_number("--scale", *flags.find("scale"), "0.125");
  to.softcap = real_number("--softcap", flags.text("softcap", "0"), "30");
  if (to.softcap < 0)
    throw Error(fmt::format("--softcap {} is negative", to.softcap), "use 0 for none, or a positive cap");
  const std::string sink = flags.one_of("sink", {"none", "off_by_one", "learnable"});
  using enum check::Case::SinkKind;
  to.sink = sink == "none" ? none : sink == "off_by_one" ? off_by_one : learnable;
}

}  // namespace

Tree tree_of(const Flags& flags) {
  std::optional<Index> rows;
  if (flags.given("tokens")) rows = flags.whole("tokens", 0, "4096");
  return read_tree("--tree", *flags.find("tree")).padded_to(flags.within("padded-to", 1, 1, kMaxTokens), rows);
}

check::Case case_of(const Flags& flags, const Defaults& defaults) {
  check::Case c;
  c.seed = seed_of(flags);
  if (flags.given("tree")) {
    choose_tree(flags, c);
  } else {
    choose_documents(flags, c);
    c.mask = mask_of(flags);
    const std::vector<Index>& offsets = c.q.cu_seqlens_padded.empty() ? c.q.cu_seqlens : c.q.cu_seqlens_padded;
    check_chunks(c.q.tokens.value_or(offsets.back()), c.mask);
  }
  choose_ranks(flags, c);
  choose_attention(flags, defaults, c);
  c.format = format_of(flags);
  return c;
}

}  // namespace weft::tool
