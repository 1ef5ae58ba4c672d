#include "explain/table.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "terminal/numbers.h"
#include "terminal/terminal.h"
#include "terminal/words.h"

namespace weft::tool {
namespace {

constexpr std::size_t kRanksListed = 32;  // with more ranks than this the table shows least, mean and most

// Columns: label, rows, tokens, pairs, load over the mean, its bar, slices, keys on other ranks, bytes of all gathered
// keys, bytes of touched keys.
constexpr std::size_t kColumns = 10, kBar = 5;
constexpr int kBarWidth = 10;
using Line = std::array<std::string, kColumns>;

// Columns as wide as their contents. The bar has its width already; its UTF-8 and colour codes would be miscounted.
void print_lines(const std::vector<Line>& lines) {
  std::array<std::size_t, kColumns> width = {4, 7, 7, 7, 7, 0, 6, 7, 7, 7};
  for (const Line& line : lines) {
    for (std::size_t i = 0; i < kColumns; ++i) {
      if (i != kBar) width[i] = std::max(width[i], line[i].size());
    }
  }
  for (const Line& line : lines) {
    std::string text;
    for (std::size_t i = 0; i < kColumns; ++i) text += fmt::format("  {:>{}}", line[i], i == kBar ? 0 : width[i]);
    fmt::print("{}\n", text);
  }
}

Line line_of(const std::string& label, const Loads& all, const RankLoad& s, const std::string& shape) {
  Line line{label,
            grouped(all.q_rows),
            grouped(s.tokens),
            grouped(s.pairs),
            fmt::format("{:.{}f}", s.of_mean, s.of_mean < 100 ? 3 : 0),
            shape,
            "-",
            "-",
            bytes_text(all.gathered_keys * all.bytes_per_key),
            "-"};
  if (s.touched) {
    line[6] = grouped(s.touched->slices);
    line[7] = grouped(s.touched->remote);
    line[9] = bytes_text(s.touched->remote * all.bytes_per_key);
  }
  return line;
}

// Each column by itself: the rank with the fewest tokens need not be the one with the fewest pairs.
template <class Of>
RankLoad summed_up(const Loads& all, Of&& of) {
  const auto over = [&](auto&& get, bool touched) {
    std::vector<Index> values;
    for (const RankLoad& s : all.ranks) {
      if (!touched || s.touched) values.push_back(get(s));
    }
    return of(values);
  };
  RankLoad out;
  out.tokens = over([](const RankLoad& s) { return s.tokens; }, false);
  out.pairs = over([](const RankLoad& s) { return s.pairs; }, false);
  out.touched = Touched{over([](const RankLoad& s) { return s.touched->slices; }, true), 0,
                        over([](const RankLoad& s) { return s.touched->remote; }, true)};
  return out;
}

void add_summary(const Loads& all, std::vector<Line>& lines) {
  const auto least = [](const std::vector<Index>& v) { return *std::min_element(v.begin(), v.end()); };
  const auto most = [](const std::vector<Index>& v) { return *std::max_element(v.begin(), v.end()); };
  const auto mean_of = [](const std::vector<Index>& v) {
    double sum = 0;
    for (const Index x : v) sum += static_cast<double>(x);
    return sum / static_cast<double>(v.size());
  };
  const auto mean = [&](const std::vector<Index>& v) { return static_cast<Index>(mean_of(v) + 0.5); };
  std::vector<Index> pairs;
  for (const RankLoad& s : all.ranks) pairs.push_back(s.pairs);
  const double average = mean_of(pairs);
  const auto show = [&](const char* label, RankLoad s, double of_mean) {
    s.of_mean = of_mean;
    lines.push_back(line_of(label, all, s, bar(of_mean / all.imbalance, kBarWidth)));
  };
  const double fewest = average > 0 ? static_cast<double>(least(pairs)) / average : 1;
  show("least", summed_up(all, least), fewest);
  show("mean", summed_up(all, mean), 1);
  show("most", summed_up(all, most), all.imbalance);
}

}  // namespace

std::string imbalance_words(double imbalance) {
  if (imbalance < 1.0005) return fmt::format("imbalance {:.3f}: every rank has as many pairs", imbalance);
  return fmt::format("imbalance {:.3f}: the busiest rank has {:.1f} % more pairs than the mean", imbalance,
                     (imbalance - 1) * 100);
}

void print_table(const check::Case& c, const Loads& all) {
  const std::string gap(kBarWidth, ' ');
  std::vector<Line> lines = {
      {"", "", "real", "visible", "load", gap, "", "keys on", "K, V by", "K, V of"},
      {"rank", "rows", "tokens", "pairs", "/ mean", gap, "slices", "other ranks", "all_gather", "touched"}};
  if (all.ranks.size() > kRanksListed) {
    add_summary(all, lines);
  } else {
    for (std::size_t r = 0; r < all.ranks.size(); ++r) {
      const RankLoad& s = all.ranks[r];
      const std::string shape = coloured(bar(s.of_mean / all.imbalance, kBarWidth), static_cast<Index>(r), false);
      lines.push_back(line_of(std::to_string(r), all, s, shape));
    }
  }
  print_lines(lines);
  if (all.counted < c.ranks)
    fmt::print("(slices and keys touched: of {} ranks spread over the {}, the rest would take long)\n", all.counted,
               grouped(c.ranks));
}

}  // namespace weft::tool
