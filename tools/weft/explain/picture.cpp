#include "explain/picture.h"

#include <algorithm>

#include <fmt/format.h>

#include "explain/axis.h"
#include "index.h"
#include "terminal/numbers.h"
#include "terminal/terminal.h"
#include "terminal/words.h"

namespace weft::tool {
namespace {

constexpr Index kMaxQueries = 64, kMaxKeys = 96;
constexpr std::size_t kListed = 8;  // slices of a rank
constexpr int kMargin = 12;

void print_line(std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  fmt::print("{}\n", line);
}

std::string cell(Index rank, bool solid, bool upper, const std::string& fill) {
  return coloured(letter(rank, upper) + fill, rank, solid);
}

// A line for each rank, a column for each token: the layout, and the load of each rank.
void draw_owners(const Axis& axis, const char* title, const Loads& loads, bool bars) {
  print_line(fmt::format("{:<{}}{}", title, kMargin, axis.ruler()));
  const auto mark = [&](Index rank, Index token, const std::string& fill) {
    if (axis.owner[at(token)] != rank) return " " + fill;
    return axis.real[at(token)] ? cell(rank, true, true, fill) : "·" + fill;
  };
  Index most = 1;
  for (const RankLoad& load : loads.ranks) most = max_of(most, load.pairs);
  for (Index rank = 0; rank < static_cast<Index>(loads.ranks.size()); ++rank) {
    const auto paint = [&](Index t, const std::string& fill) { return mark(rank, t, fill); };
    std::string line =
        fmt::format("{:<{}}{}", fmt::format("{} rank {}", letter(rank), rank), kMargin, axis.line(paint, " ", "│"));
    if (bars) {
      const RankLoad& load = loads.ranks[at(rank)];
      line += fmt::format("   {} {} pairs",
                          coloured(bar(static_cast<double>(load.pairs) / static_cast<double>(most), 12), rank, false),
                          grouped(load.pairs));
    }
    print_line(line);
  }
  fmt::print("\n");
}

// The pairs that the slices of all ranks cover. Made from the plans, so that picture and slices cannot disagree.
class Grid {
 public:
  Grid(const Axis& q, const Axis& k) : keys_(k.tokens), cells_(at(q.tokens * k.tokens), false) {}

  void cover(const Plan& plan, const std::vector<Index>& q_tokens, const std::vector<Index>& k_tokens) {
    for (const Slice& s : plan.slices)
      for (Index q = s.q_begin; q < s.q_end; ++q)
        for (Index k = s.k_begin; k < s.k_end; ++k)
          if (sees(s, q, k)) cells_[cell(q_tokens[at(q)], k_tokens[at(k)])] = true;
  }
  bool operator()(Index q, Index k) const { return cells_[cell(q, k)]; }

 private:
  std::size_t cell(Index q, Index k) const { return at(q * keys_ + k); }

  Index keys_;
  std::vector<bool> cells_;
};

char holder(const Axis& axis, Index token) {
  const Index rank = axis.owner[at(token)];
  return rank == kNobody || !axis.real[at(token)] ? '\0' : letter(rank);
}

void draw_grid(const Axis& q, const Axis& k, const Grid& grid) {
  fmt::print(
      "Who sees whom: a line for each query, a column for each key.   {} key on the query's rank   {} key on another "
      "rank\n\n",
      coloured("A", 0, true), coloured("a", 0, false));
  print_line(fmt::format("{:>{}}{}", "key  ", kMargin, k.ruler()));
  const auto owner = [&](Index t, const std::string& fill) {
    return holder(k, t) == '\0' ? "·" + fill : cell(k.owner[at(t)], true, true, fill);
  };
  print_line(fmt::format("{:<{}}{}", " query", kMargin, k.line(owner, " ", "│")));
  fmt::print("{:{}}{}\n", "", kMargin, k.rule());
  for (Index i = 0; i < q.tokens; ++i) {
    const Index owner_of_query = q.owner[at(i)];
    if (i > 0 && q.begins[at(i)]) fmt::print("{:{}}{}\n", "", kMargin, k.rule());
    const auto paint = [&](Index j, const std::string& fill) {
      if (!grid(i, j)) return " " + fill;
      const bool local = owner_of_query == k.owner[at(j)];
      return cell(owner_of_query, local, local, fill);
    };
    const std::string symbol = holder(q, i) == '\0' ? "·" : cell(owner_of_query, true, true, "");
    print_line(fmt::format("{:>6}  {}   {}", i, symbol, k.line(paint, " ", "│")));
  }
  fmt::print("\n");
}

std::string band(const Slice& s) {
  if (is_unlimited(s.lo) && is_unlimited(s.hi)) return "every pair";
  if (is_unlimited(s.lo)) return fmt::format("k - q <= {}", s.hi);
  if (is_unlimited(s.hi)) return fmt::format("k - q >= {}", s.lo);
  return fmt::format("{} <= k - q <= {}", s.lo, s.hi);
}

// "row 0: tokens [0, 3)   row 3: tokens [21, 24)"
std::string runs_words(std::vector<Run> runs) {
  constexpr std::size_t kRunsListed = 4;
  std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.row < b.row; });
  std::string words = runs.empty() ? "   no rows" : "";
  for (std::size_t i = 0; i < std::min(runs.size(), kRunsListed); ++i) {
    const Run& r = runs[i];
    words += fmt::format("   row {}: tokens [{}, {})", r.row, r.token, r.token + (r.count - 1) * r.stride + 1);
    if (r.stride != 1) words += fmt::format(" step {}", r.stride);
  }
  if (runs.size() > kRunsListed) words += fmt::format("   … and {} more", runs.size() - kRunsListed);
  return words;
}

void list_slices(Index rank, const std::vector<Run>& runs, const Plan& plan) {
  fmt::print("{} rank {}{}\n", coloured(std::string(1, letter(rank)), rank, true), rank, runs_words(runs));
  for (std::size_t i = 0; i < std::min(plan.slices.size(), kListed); ++i) {
    const Slice& s = plan.slices[i];
    fmt::print("      q {:<10} k {:<10} {}\n", fmt::format("[{}, {})", s.q_begin, s.q_end),
               fmt::format("[{}, {})", s.k_begin, s.k_end), band(s));
  }
  if (plan.slices.size() > kListed) fmt::print("      … and {} more\n", plan.slices.size() - kListed);
}

// The token of each row of the key buffer.
std::vector<Index> key_tokens(const Layout& keys, KeyOrder order) {
  std::vector<Index> tokens;
  if (order == KeyOrder::sequence) {
    for (Index t = 0; t < keys.stream().tokens(); ++t) tokens.push_back(t);
    return tokens;
  }
  for (Index r = 0; r < keys.ranks(); ++r) {
    const std::vector<Index> own = keys.tokens(r);
    tokens.insert(tokens.end(), own.begin(), own.end());
  }
  return tokens;
}

}  // namespace

bool fits_picture(const check::Case& c, const Problem& problem, const Layouts& layouts) {
  constexpr Index kMaxRows = 4096;  // explicit runs may leave any gaps between rows
  return problem.packing().q().tokens() <= kMaxQueries && problem.packing().k().tokens() <= kMaxKeys &&
         c.ranks <= kLetters && layouts.q.rows() <= kMaxRows && layouts.k.rows() <= kMaxRows;
}

std::string picture_limits() {
  return fmt::format("{} query tokens, {} key tokens and {} ranks", kMaxQueries, kMaxKeys, kLetters);
}

void draw_picture(const check::Case& c, const Problem& problem, const Layouts& layouts, KeyOrder order,
                  const Loads& loads) {
  const Axis q(layouts.q), k(layouts.k);
  const bool self = problem.packing().self();
  draw_owners(q, self ? "token" : "query", loads, true);
  if (!self) draw_owners(k, "key", loads, false);

  const RunList keys = key_buffer(layouts, order);
  const std::vector<Index> tokens = key_tokens(layouts.k, order);
  std::vector<Plan> plans;
  Grid grid(q, k);
  for (Index r = 0; r < c.ranks; ++r) {
    plans.push_back(make_plan(problem, layouts.q.runs(r), keys));
    grid.cover(plans.back(), layouts.q.tokens(r), tokens);
  }
  draw_grid(q, k, grid);
  fmt::print("Slices: q in the rank's own rows, k in {}.\n\n",
             order == KeyOrder::sequence ? "tokens of the whole stream (sequence order)"
                                         : "rows of all ranks' buffers, one after another (rank order)");
  for (Index r = 0; r < c.ranks; ++r) list_slices(r, layouts.q.runs(r).runs(), plans[at(r)]);
}

}  // namespace weft::tool
