#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "explain/axis.h"
#include "explain/modes.h"
#include "index.h"
#include "terminal/json_file.h"
#include "terminal/numbers.h"
#include "terminal/terminal.h"
#include "terminal/words.h"
#include "weft/error.h"
#include "weft/kv_buffer.h"
#include "weft/prepare.h"

namespace weft::tool {
namespace {

using nlohmann::json;

constexpr Index kMaxDrawn = 96;        // tokens
constexpr Index kMaxLines = 64;        // windows, drawn or in the table
constexpr Index kMaxListed = 1 << 26;  // numbers in a JSON file
constexpr int kRowMargin = 14;

struct Micro {
  check::Case c;
  Problem asked;
  MicroSequences sequences;
  std::vector<Index> work;  // visible pairs of each window, micro after micro
};

Micro micro_of(const Flags& flags) {
  if (!flags.given("micro")) flags.refuse({"remainder", "even"}, " without --micro", "add e.g. --micro 4");
  flags.exclude("micro", {"layout", "runs", "keys", "docs-k", "cu-seqlens-k", "slices", "tree", "view"},
                "leave it out: micro-sequences are windows of one stream");
  check::Case c = case_of(flags, kExplainDefaults);
  if (!flags.given("mask")) c.mask.causal = true;
  const Index micros = flags.within("micro", 4, 1, kMaxTokens);
  const bool pad = flags.one_of("remainder", {"pad", "refuse"}) == "pad";
  const bool even_work = flags.one_of("even", {"tokens", "work"}) == "work";
  Problem asked = check::problem_of(c);
  MicroSplit split{.ranks = c.ranks,
                   .micros = micros,
                   .remainder = pad ? MicroSplit::Remainder::pad : MicroSplit::Remainder::refuse};
  if (even_work) split.even_work = c.mask;
  MicroSequences sequences(asked.packing().q(), split);
  return {std::move(c), std::move(asked), std::move(sequences), {}};
}

// Micro after micro, and of each all ranks: the order in which they are computed.
template <class F>
void for_each_window(const MicroSequences& s, Index most, F&& f) {
  for (Index i = 0; i < min_of(most, s.micros() * s.ranks()); ++i) f(s.window(i % s.ranks(), i / s.ranks()));
}

void say_rest(const MicroSequences& s) {
  if (s.micros() * s.ranks() > kMaxLines) fmt::print("… and {} more\n", grouped(s.micros() * s.ranks() - kMaxLines));
}

std::string head(const Window& w) { return fmt::format("{} rank {}, {}", letter(w.rank % kLetters), w.rank, w.micro); }

void draw(const Micro& micro) {
  const MicroSequences& s = micro.sequences;
  const Stream& documents = micro.asked.packing().q();
  std::vector<Index> offsets(documents.offsets().begin(), documents.offsets().end());
  std::vector<Index> used(documents.used_lengths().begin(), documents.used_lengths().end());
  if (s.padding() > 0) {
    offsets.push_back(s.rows().end);
    used.push_back(0);
  }
  const Axis axis(Layout::contiguous(Stream::from_used(offsets, used), 1));
  fmt::print("A line a window, a column a token.   {} query   {} key from before the window   · padding\n\n",
             coloured("A", 0, true), coloured("a", 0, false));
  fmt::print("{:<{}}{}\n", "rank, micro", kRowMargin, axis.ruler());
  for_each_window(s, kMaxLines, [&](const Window& w) {
    const auto paint = [&](Index t, const std::string& fill) {
      const Index rank = w.rank % kLetters;
      if (t >= w.begin && t < w.end) return axis.real[at(t)] ? coloured(letter(rank) + fill, rank, true) : "·" + fill;
      const bool key = t >= w.first_document_begin && t < w.begin && axis.real[at(t)];
      return key ? coloured(letter(rank, false) + fill, rank, false) : " " + fill;
    };
    std::string line = fmt::format("{:<{}}{}", head(w), kRowMargin, axis.line(paint, " ", "│"));
    line.erase(line.find_last_not_of(' ') + 1);
    fmt::print("{}\n", line);
  });
  say_rest(s);
  fmt::print("\n");
}

// "0,5,6", or the first few and how many there are.
std::string list_words(const std::vector<Index>& list) {
  constexpr std::size_t kShown = 6;
  if (list.size() <= kShown) return fmt::format("{}", fmt::join(list, ","));
  return fmt::format("{},… {} in all", fmt::join(list.begin(), list.begin() + 4, ","), list.size());
}

// Positions are a few runs of numbers that follow each other: "7,8,0–3".
std::string position_words(const Window& w) {
  std::string words;
  for (std::size_t i = 0; i < std::min<std::size_t>(w.lengths.size(), 4); ++i) {
    const Index end = w.cu_seqlens_k[i + 1] - w.cu_seqlens_k[i], begin = end - w.lengths[i];
    words += words.empty() ? "" : ",";
    words += end - begin == 1   ? fmt::format("{}", begin)
             : end - begin == 2 ? fmt::format("{},{}", begin, begin + 1)
                                : fmt::format("{}–{}", begin, end - 1);
  }
  return w.lengths.size() > 4 ? words + ",…" : words;
}

// Columns on a screen: bytes that go on a character of UTF-8 take none.
int width(const std::string& text) {
  return static_cast<int>(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

void print_windows(const Micro& micro) {
  const MicroSequences& s = micro.sequences;
  std::vector<std::vector<std::string>> lines = {
      {"rank, micro", "window", "lengths", "first", "cu_seqlens_q", "cu_seqlens_k", "K rows", "pairs", "positions"}};
  for_each_window(s, kMaxLines, [&](const Window& w) {
    lines.push_back({head(w), fmt::format("{}–{}", w.begin, w.end), list_words(w.lengths),
                     fmt::format("{}", w.first_document_begin), list_words(w.cu_seqlens_q), list_words(w.cu_seqlens_k),
                     fmt::format("{}:{}", w.first_document_begin, w.end),
                     grouped(micro.work[at(w.micro * s.ranks() + w.rank)]), position_words(w)});
  });
  std::vector<int> widths(lines.front().size(), 0);
  for (const std::vector<std::string>& line : lines)
    for (std::size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], width(line[i]) + 2);
  widths.back() = 0;
  for (const std::vector<std::string>& line : lines) {
    for (std::size_t i = 0; i < line.size(); ++i) fmt::print("{:<{}}", line[i], widths[i]);
    fmt::print("\n");
  }
  say_rest(s);
}

// The largest over the mean; 1 if there is nothing.
double over_mean(const std::vector<Index>& values) {
  double sum = 0;
  Index most = 0;
  for (const Index value : values) {
    sum += static_cast<double>(value);
    most = max_of(most, value);
  }
  return sum == 0 ? 1 : static_cast<double>(most) * static_cast<double>(values.size()) / sum;
}

void print_cost(const Micro& micro) {
  const MicroSequences& s = micro.sequences;
  std::vector<Index> of_micros(at(s.micros()), 0);
  for (std::size_t i = 0; i < micro.work.size(); ++i) of_micros[i / at(s.ranks())] += micro.work[i];
  fmt::print(
      "\nWork: the costliest micro-sequence has {:.2f} times the mean number of visible pairs, the costliest "
      "window {:.2f} times\n",
      over_mean(of_micros), over_mean(micro.work));
  fmt::print(
      "K/V buffer: {} rows; {} if rows that no later query sees are dropped, {} with the next keys on their way\n",
      grouped(key_rows(s, micro.c.mask)), grouped(key_rows(s, micro.c.mask, {.drop = true})),
      grouped(key_rows(s, micro.c.mask, {.drop = true, .ahead = true})));
}

json to_json(const Micro& micro) {
  const MicroSequences& s = micro.sequences;
  json out = {{"docs", micro.asked.packing().q().used_lengths()},
              {"mask", mask_words(micro.c.mask)},
              {"ranks", s.ranks()},
              {"micro", s.micros()},
              {"tokens", s.rows().size()},
              {"padding", s.padding()},
              {"local", s.local()},
              {"key_rows", key_rows(s, micro.c.mask)},
              {"key_rows_dropped", key_rows(s, micro.c.mask, {.drop = true})},
              {"windows", json::array()}};
  for_each_window(s, kMaxTokens, [&](const Window& w) {
    out["windows"].push_back({{"rank", w.rank},
                              {"micro", w.micro},
                              {"begin", w.begin},
                              {"end", w.end},
                              {"pairs", micro.work[at(w.micro * s.ranks() + w.rank)]},
                              {"lengths", w.lengths},
                              {"first_document_begin", w.first_document_begin},
                              {"cu_seqlens_q", w.cu_seqlens_q},
                              {"cu_seqlens_k", w.cu_seqlens_k},
                              {"document_index_q", w.document_index_q()},
                              {"document_index_k", w.document_index_k()},
                              {"position_index", w.position_index()},
                              {"max_length_q", w.max_length_q},
                              {"min_length_q", w.min_length_q},
                              {"max_length_k", w.max_length_k},
                              {"min_length_k", w.min_length_k}});
  });
  return out;
}

// Past these it takes minutes, or fills the memory or a disk: every window lists its keys.
void check_size(const Flags& flags, const Micro& micro) {
  constexpr Index kMaxWindows = Index{1} << 20, kMaxChunks = Index{1} << 24;
  const MicroSequences& s = micro.sequences;
  if (s.micros() * s.ranks() > kMaxWindows)
    throw Error(fmt::format("{} windows", grouped(s.micros() * s.ranks())),
                fmt::format("use fewer micro-sequences or ranks: up to {} windows", grouped(kMaxWindows)));
  if (micro.c.mask.chunk && s.rows().size() / *micro.c.mask.chunk > kMaxChunks)
    throw Error(fmt::format("{} tokens in chunks of {}", grouped(s.rows().size()), *micro.c.mask.chunk),
                fmt::format("use a larger chunk, or fewer tokens: up to {} chunks", kMaxChunks));
  Index numbers = 0;
  for_each_window(s, flags.given("json") ? kMaxWindows : 0, [&](const Window& w) {
    numbers += w.keys() + 2 * w.rows();
    if (numbers > kMaxListed)
      throw Error(fmt::format("--json: the windows list more than {} numbers", grouped(kMaxListed)),
                  "use fewer tokens, micro-sequences or ranks, or leave --json out");
  });
}

// Error if keys come too late for the mask; with a causal one they never do.
void check_keys(const Micro& micro) {
  const MicroSequences& s = micro.sequences;
  if (micro.c.mask.causal) return;
  const Problem problem = s.problem(micro.c.mask);
  for (Index m = 0; m < min_of(s.micros(), kMaxLines); ++m)
    for (Index r = 0; r < min_of(s.ranks(), kMaxLines); ++r) s.slices(problem, r, m, {0, s.rows(m).end});
}

}  // namespace

int explain_micro(const Flags& flags) {
  Micro micro = micro_of(flags);
  const MicroSequences& s = micro.sequences;
  check_size(flags, micro);
  check_keys(micro);
  micro.work = s.work(s.problem(micro.c.mask));
  JsonOutput output(flags.find("json"));
  fmt::print("{} in {} micro-sequence{} on {} rank{}: windows of {}{} tokens{}, mask {}\n\n",
             documents_words(micro.asked.packing()), s.micros(), s.micros() == 1 ? "" : "s", s.ranks(),
             s.ranks() == 1 ? "" : "s", flags.text("even", "tokens") == "work" ? "up to " : "", grouped(s.local()),
             s.padding() == 0 ? "" : fmt::format(", {} of padding at the end", grouped(s.padding())),
             mask_words(micro.c.mask));
  if (s.rows().end <= kMaxDrawn && s.local() > 0) draw(micro);
  print_windows(micro);
  print_cost(micro);
  if (flags.given("json")) output.write(to_json(micro));
  return 0;
}

}  // namespace weft::tool
