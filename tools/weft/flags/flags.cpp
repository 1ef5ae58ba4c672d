#include "flags/flags.h"

#include <algorithm>
#include <charconv>
#include <thread>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "terminal/numbers.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

struct Group {
  std::string title;
  std::vector<FlagSpec> flags;
};

const std::vector<Group>& shared_groups() {
  static const std::vector<Group> groups = {
      {"Documents",
       {{"docs", "LENGTHS",
         "256,512,1024, or 64k,1.5M (k, m, g are 1024, 1024^2, 1024^3, in all lengths and sizes), or "
         "lognormal:count=64,median=2400,sigma=1,min=16,max=16384, or published:tokens=1048576 (drawn "
         "by --seed)"},
        {"docs-k", "LENGTHS", "lengths of the keys, if they are others than the queries' (cross-attention)"},
        {"padded-to", "M", "pad every document to a multiple of M"},
        {"cu-seqlens", "LIST", "0,5,12: instead of --docs, prefix sums of lengths"},
        {"cu-seqlens-padded", "LIST", "where each document begins, if there is padding between them"},
        {"tokens", "N", "rows of the buffer, if there are rows past the last document"},
        {"cu-seqlens-k", "LIST", "the same three for keys of their own"},
        {"cu-seqlens-padded-k", "LIST", "..."},
        {"tokens-k", "N", "..."},
        {"tree", "FILE",
         R"(branches that share prefixes instead of documents: {"nodes":[{"parent":-1,"tokens":5},..]} or )"
         R"({"sequences":[[token ids],..]}, a file or the text; --window and --chunk are of each sequence)"}}},
      {"Mask",
       {{"mask", "NAME", "full (default) or causal"},
        {"align", "NAME", "top_left (default) or bottom_right: where the diagonal lies if lengths differ"},
        {"window", "L,R", "keys L before and R after the diagonal; -1 is unlimited"},
        {"chunk", "C", "chunked attention: query and key in the same chunk of C positions"},
        {"slices", "FILE",
         R"(your own mask: [{"q":[begin,end],"k":[begin,end],"lo":-3,"hi":0},..], a file or the text)"}}},
      {"Ranks",
       {{"ranks", "N", "4 if not given"},
        {"layout", "NAME",
         "balanced (default, by the mask), placed, contiguous, dual_chunk, zigzag, striped, explicit"},
        {"runs", "FILE", R"(layout explicit, a list a rank: [[{"row":0,"token":0,"count":4,"stride":1},..],..])"},
        {"runs-k", "FILE", "the same for the keys of cross-attention"}}},
      {"Attention",
       {{"heads", "HQ[:HK]", "query and K/V heads (explain: 32:8, verify: 2:1, bench: 8:2)"},
        {"dim", "DQK[:DV]", "width of q and k, and of v (explain, bench: 128, verify: 8)"},
        {"dtype", "NAME", "f64, f32, bf16 or f16 (explain: bf16, verify, bench: f32)"},
        {"scale", "X", "of the logits; 1/sqrt(DQK) if not given"},
        {"softcap", "X", "0 (default) is off"},
        {"sink", "NAME", "none (default), off_by_one or learnable"}}},
      {"Other", {{"seed", "N", "0 if not given"}, {"json", "FILE", "write the numbers there too"}}}};
  return groups;
}

}  // namespace

void Flags::add(CLI::App& verb, const std::string& group, const FlagSpec& flag) {
  if (flag.value.empty()) {
    const auto note = [this, name = flag.name] { values_[name] = ""; };
    verb.add_flag_callback("--" + flag.name, note, flag.help)->group(group);
    return;
  }
  if (flag.value.ends_with("..")) {  // several words, which no name of a file has a line's end in
    const auto join = [this, name = flag.name](const std::vector<std::string>& words) {
      values_[name] = fmt::format("{}", fmt::join(words, "\n"));
      several_.insert(name);
    };
    verb.add_option_function<std::vector<std::string>>("--" + flag.name, join, flag.help)
        ->type_name(flag.value)
        ->group(group);
    return;
  }
  const auto keep = [this, name = flag.name](const std::string& value) { values_[name] = value; };
  verb.add_option_function<std::string>("--" + flag.name, keep, flag.help)->type_name(flag.value)->group(group);
}

void Flags::add_to(CLI::App& verb, const std::vector<FlagSpec>& own) {
  for (const FlagSpec& flag : own) add(verb, "Of this verb", flag);
  for (const Group& group : shared_groups()) {
    for (const FlagSpec& flag : group.flags) add(verb, group.title, flag);
  }
}

const std::string* Flags::find(std::string_view name) const {
  const auto at = values_.find(name);
  return at == values_.end() ? nullptr : &at->second;
}

std::string Flags::text(std::string_view name, std::string_view otherwise) const {
  const std::string* value = find(name);
  return value ? *value : std::string(otherwise);
}

std::string Flags::one_of(std::string_view name, const std::vector<std::string_view>& names) const {
  const std::string value = text(name, names.front());
  if (std::find(names.begin(), names.end(), value) == names.end())
    throw Error(fmt::format("--{}: there is no '{}'", name, value), fmt::format("use {}", fmt::join(names, " or ")));
  return value;
}

Index Flags::whole(std::string_view name, Index otherwise, std::string_view example) const {
  const std::string* value = find(name);
  return value ? whole_number(fmt::format("--{}", name), *value, example) : otherwise;
}

Index Flags::within(std::string_view name, Index otherwise, Index least, Index most, std::string_view of) const {
  const Index value = whole(name, otherwise, std::to_string(otherwise));
  if (value < least || value > most)
    throw Error(fmt::format("--{} {}", name, value), fmt::format("use from {} to {}{}", least, most, of));
  return value;
}

std::string Flags::said(std::string_view name) const {
  return fmt::format("--{}{}{}", name, find(name)->empty() ? "" : " ", *find(name));
}

void Flags::refuse(const std::vector<std::string>& names, std::string_view why, std::string_view remedy) const {
  for (const std::string& name : names)
    if (given(name)) throw Error(fmt::format("{}{}", said(name), why), std::string(remedy));
}

void Flags::exclude(std::string_view name, const std::vector<std::string>& others, std::string_view remedy) const {
  for (const std::string& other : others)
    if (given(name) && given(other))
      throw Error(fmt::format("{} and {}", said(name), said(other)), std::string(remedy));
}

std::string Flags::words() const {
  constexpr std::size_t kLongest = 400;
  constexpr std::string_view kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789,.:=_-+/@%";
  const auto quoted = [&](std::string word) {
    if (word.find_first_not_of(kPlain) == std::string::npos) return word;
    for (std::size_t at = word.find('\''); at != std::string::npos; at = word.find('\'', at + 4))
      word.replace(at, 1, "'\\''");
    return "'" + word + "'";
  };
  std::string all;
  for (const auto& [name, value] : values_) {
    all += " --" + name;
    if (value.empty()) continue;
    const std::string shown = value.size() > kLongest ? value.substr(0, kLongest) + "…" : value;
    if (!several_.contains(name)) {
      all += " " + quoted(shown);
      continue;
    }
    for (const std::string_view word : split(shown, '\n')) all += " " + quoted(std::string(word));
  }
  return all;
}

unsigned long long seed_of(const Flags& flags) {
  const std::string text = flags.text("seed", "0");
  unsigned long long seed = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), seed);
  if (code != std::errc() || end != text.data() + text.size())
    throw Error(fmt::format("--seed: '{}' is not a whole number from 0 to 2^64 - 1", text), "write e.g. --seed 7");
  return seed;
}

TimeLimit time_limit_of(const Flags& flags) {
  const std::string* given = flags.find("time-limit");
  if (!given) return {};
  std::string_view text = *given;
  if (text.ends_with("s")) text.remove_suffix(1);
  const double seconds = real_number("--time-limit", text, "120");
  if (!(seconds > 0)) throw Error(fmt::format("--time-limit {}", *given), "give more than 0 seconds, e.g. 120");
  return TimeLimit(seconds);
}

Index threads_of(const Flags& flags) {
  return flags.within("threads", std::max(1U, std::thread::hardware_concurrency()), 1, 1024);
}

std::vector<Pass> passes_of(const Flags& flags) {
  const std::string pass = flags.one_of("pass", {"both", "forward", "backward"});
  if (pass == "forward") return {Pass::forward};
  if (pass == "backward") return {Pass::backward};
  return {Pass::forward, Pass::backward};
}

LayoutKind layout_of(const Flags& flags) { return layout_kind(flags.text("layout", kDefaultLayout)); }

std::vector<std::string> problem_flags(const std::vector<std::string>& more) {
  std::vector<std::string> names = more;
  for (const Group& group : shared_groups()) {
    for (const FlagSpec& flag : group.flags) {
      if (group.title != "Other" && flag.name != "layout") names.push_back(flag.name);
    }
  }
  return names;
}

}  // namespace weft::tool
