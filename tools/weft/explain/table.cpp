#include "explain/table.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "terminal/numbers.h"
#include "terminal/terminal.h"
#include "terminal/words.h"

namespace weft::tool {
namespace {

constexpr std::size_t kListed = 32;  // more ranks than this are summed up

// Label, rows, tokens, pairs, share of the mean, its bar, slices, keys on other ranks, bytes of all keys, of touched
// ones.
constexpr std::size_t kColumns = 10, kBar = 5;
constexpr int kBarWidth = 10;
using Line = std::array<std::string, kColumns>;

// Columns as wide as what is in them; the bar has its width already, and bytes that take no room.
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

Line line_of(const std::string& label, const Shares& all, const Share& s, const std::string& shape) {
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

// One number a column, each for itself: the rank with the fewest tokens need not be the one with the fewest pairs.
template <class Of>
Share summed_up(const Shares& all, Of&& of) {
  const auto over = [&](auto&& get, bool touched) {
    std::vector<Index> values;
    for (const Share& s : all.ranks) {
      if (!touched || s.touched) values.push_back(get(s));
    }
    return of(values);
  };
  Share out;
  out.tokens = over([](const Share& s) { return s.tokens; }, false);
  out.pairs = over([](const Share& s) { return s.pairs; }, false);
  out.touched = Touched{over([](const Share& s) { return s.touched->slices; }, true), 0,
                        over([](const Share& s) { return s.touched->remote; }, true)};
  return out;
}

void add_summary(const Shares& all, std::vector<Line>& lines) {
  const auto least = [](const std::vector<Index>& v) { return *std::min_element(v.begin(), v.end()); };
  const auto most = [](const std::vector<Index>& v) { return *std::max_element(v.begin(), v.end()); };
  const auto mean_of = [](const std::vector<Index>& v) {
    double sum = 0;
    for (const Index x : v) sum += static_cast<double>(x);
    return sum / static_cast<double>(v.size());
  };
  const auto mean = [&](const std::vector<Index>& v) { return static_cast<Index>(mean_of(v) + 0.5); };
  std::vector<Index> pairs;
  for (const Share& s : all.ranks) pairs.push_back(s.pairs);
  const double average = mean_of(pairs);
  const auto show = [&](const char* label, Share s, double of_mean) {
    s.of_mean = of_mean;
    lines.push_back(line_of(label, all, s, bar(of_mean / all.balance, kBarWidth)));
  };
  const double fewest = average > 0 ? static_cast<double>(least(pairs)) / average : 1;
  show("least", summed_up(all, least), fewest);
  show("mean", summed_up(all, mean), 1);
  show("most", summed_up(all, most), all.balance);
}

}  // namespace

std::string balance_words(double balance) {
  if (balance < 1.0005) return fmt::format("balance {:.3f}: every rank has the same share of pairs", balance);
  return fmt::format("balance {:.3f}: the busiest rank has {:.1f} % more pairs than the mean", balance,
                     (balance - 1) * 100);
}

void print_table(const check::Case& c, const Shares& all) {
  const std::string gap(kBarWidth, ' ');
  std::vector<Line> lines = {
      {"", "", "real", "visible", "share", gap, "", "keys on", "K, V by", "K, V of"},
      {"rank", "rows", "tokens", "pairs", "of mean", gap, "slices", "other ranks", "all_gather", "touched"}};
  if (all.ranks.size() > kListed) {
    add_summary(all, lines);
  } else {
    for (std::size_t r = 0; r < all.ranks.size(); ++r) {
      const Share& s = all.ranks[r];
      const std::string shape = coloured(bar(s.of_mean / all.balance, kBarWidth), static_cast<Index>(r), false);
      lines.push_back(line_of(std::to_string(r), all, s, shape));
    }
  }
  print_lines(lines);
  if (all.counted < c.ranks)
    fmt::print("(slices and keys touched: of {} ranks spread over the {}, the rest would take long)\n", all.counted,
               grouped(c.ranks));
}

}  // namespace weft::tool
