// What is drawn: every visible pair by exactly one slice, in the step that the table says; text of any origin as text.
#include <iomanip>
#include <set>
#include <sstream>

#include <gtest/gtest.h>

#include "check/cases/random_case.h"
#include "draw/downsample.h"
#include "draw/figure.h"
#include "draw/formatting.h"
#include "draw/step_keys.h"
#include "index.h"
#include "refusal.h"
#include "weft/cost.h"
#include "weft/error.h"

namespace weft::draw {
namespace {

using Pair = std::pair<Index, Index>;

std::set<Pair> pairs_of(const Problem& problem) {
  std::set<Pair> pairs;
  for (const Slice& s : problem.global_slices())
    for (Index q = s.q_begin; q < s.q_end; ++q)
      for (Index k = s.k_begin; k < s.k_end; ++k)
        if (sees(s, q, k)) pairs.emplace(q, k);
  return pairs;
}

std::vector<Index> owners(const Layout& layout) {
  std::vector<Index> owner(at(layout.stream().tokens()), -1);
  for (Index r = 0; r < layout.ranks(); ++r)
    for (const Index t : layout.tokens(r))
      if (t != kNoToken) owner[at(t)] = r;
  return owner;
}

// The pairs of the panel's slices, each rank's rows and keys as tokens; one that comes twice is a fault. Ranks of a
// group attend the same pairs, each for its heads: the query's own rank stands for them.
void check_panel(const Figure& figure, const Panel& panel) {
  const Layouts& layouts = panel.layouts;
  const std::vector<Index> q_owner = owners(layouts.q), k_owner = owners(layouts.k);
  const Index groups = layouts.q.ranks() / panel.ulysses;
  std::set<Pair> seen;
  for (const PlacedSlice& p : panel.slices) {
    const Index first = p.rank / panel.ulysses * panel.ulysses;
    for (Index row = p.slice.q_begin; row < p.slice.q_end; ++row) {
      const Index part = row / layouts.q.rows(),
                  side = panel.query_ranks;  // of a mesh: own queries first, then backwards
      const Index holder = side > 1 ? p.rank / side * side + (p.rank - part + side) % side : first + part;
      const Index q = layouts.q.tokens(holder)[at(row % layouts.q.rows())];
      for (Index k_row = p.slice.k_begin; k_row < p.slice.k_end; ++k_row) {
        if (!sees(p.slice, row, k_row)) continue;
        const Index k = p.k_shift + k_row * p.k_stride;
        ASSERT_GE(q, 0);
        ASSERT_TRUE(k >= 0 && k < layouts.k.stream().tokens());
        const Index rank_q = q_owner[at(q)], rank_k = k_owner[at(k)];
        const Index gq = rank_q / panel.ulysses, gk = rank_k / panel.ulysses;
        const bool near = static_cast<Index>(panel.step_of.size()) == groups;
        ASSERT_EQ(panel.step_of[at(near ? (gq - gk + groups) % groups : gq * groups + gk)], p.step);
        if (rank_q == p.rank || side > 1) {
          ASSERT_TRUE(seen.emplace(q, k).second) << q << " " << k;
        }
      }
    }
  }
  EXPECT_EQ(seen, pairs_of(figure.subject.problem));
}

TEST(Draw, EveryPairIsDrawnOnceInItsStep) {
  check::RandomChoices random(1);
  int drawn = 0;
  for (int i = 0; i < 400; ++i) {
    const check::Case c = check::random_case(random);
    const Problem problem = check::problem_of(c);
    if (problem.packing().q().tokens() > 200 || problem.packing().k().tokens() > 200) continue;
    const Layouts layouts = check::layouts_of(c, problem);
    if (layouts.q.rows() * c.ranks > 4000) continue;
    for (const ScheduleKind kind : schedule_kinds()) {
      const Subject subject{.problem = problem,
                            .heads_q = 4,
                            .heads_k = 2,
                            .shape = {.dtype = DType::bf16, .dim_qk = 64, .dim_v = 64},
                            .machine = machine_preset("h100-400g")};
      const ScheduleOptions options{
          .kind = kind, .ulysses = c.ranks % 2 == 0 ? 2 : 1, .node = c.ranks % 2 == 0 ? 2 : 1};
      std::optional<Figure> figure;
      try {
        figure = make_figure(subject, {{layouts, options, {}}});
      } catch (const Error&) {  // strides that differ
        continue;
      }
      check_panel(*figure, figure->panels.front());
      if (::testing::Test::HasFatalFailure()) FAIL() << name(kind) << " " << check::flags(c);
      ++drawn;
      if (i % 8 == 0) {
        EXPECT_NE(html(*figure).find("</html>"), std::string::npos);
        EXPECT_NE(svg(*figure).find("</svg>"), std::string::npos);
      }
    }
  }
  EXPECT_GT(drawn, 500);
}

Figure figure_of(const Problem& problem, LayoutKind kind, Index ranks, std::string title = "") {
  const Subject subject{.problem = problem,
                        .heads_q = 4,
                        .heads_k = 2,
                        .shape = {.dtype = DType::bf16, .dim_qk = 64, .dim_v = 64},
                        .machine = machine_preset("h100-400g"),
                        .title = std::move(title)};
  return make_figure(subject, {{make_layouts(kind, problem, ranks), {.kind = ScheduleKind::exact}, {}}});
}

TEST(Draw, PagesStayBelowFiveMegabytes) {
  constexpr std::size_t kMost = 5'000'000;
  const auto check = [&](const std::vector<Index>& lengths, LayoutKind kind, Index ranks, const char* says) {
    const Figure figure = figure_of(Problem(Stream::from_lengths(lengths), {.causal = true}), kind, ranks);
    const std::string page = html(figure);
    EXPECT_LE(page.size(), kMost) << name(kind);
    EXPECT_EQ(page.find(says) != std::string::npos, *says != '\0') << says;
    EXPECT_LE(svg(figure).size(), kMost) << name(kind);
  };
  const std::vector<Index> ones(1'000'000, 1);
  std::vector<Index> mixed, eights(100'000, 8);
  for (Index n = 0; n < 100'000; ++n) mixed.push_back(1 + n * n % 977);
  check(ones, LayoutKind::zigzag, 4, "25 documents are drawn as one");
  check(mixed, LayoutKind::contiguous, 4, "slices of the mask are drawn as one");
  check(mixed, LayoutKind::balanced, 4, "documents are drawn as one");
  check(eights, LayoutKind::dual_chunk, 4, "who holds a token is drawn for");
  EXPECT_NE(html(figure_of(Problem(Stream::from_lengths(std::vector<Index>{9, 30}), {}), LayoutKind::zigzag, 2))
                .find("\"notes\":[]"),
            std::string::npos);
  const Problem small(Stream::from_lengths(std::vector<Index>{9}), {});
  EXPECT_THROW(html(figure_of(small, LayoutKind::zigzag, 2, std::string(6'000'000, 'x'))), Error);
}

TEST(Draw, PicturesSayHowManyRanksTheyTime) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{4096}), {.causal = true});
  EXPECT_NE(svg(figure_of(problem, LayoutKind::zigzag, 64)).find("simulated on h100-400g, 16 of 64 ranks"),
            std::string::npos);
  EXPECT_EQ(svg(figure_of(problem, LayoutKind::zigzag, 8)).find(" of 8 ranks"), std::string::npos);
}

TEST(Draw, RanksThatWouldFillTheMemoryAreRefused) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{8192}), {.causal = true});
  expect_refusal([&] { (void)figure_of(problem, LayoutKind::contiguous, 2048); },
                 {"2048 ranks with 1 documents are too many to draw", "at most 1024 ranks"});
}

TEST(Draw, TheNoteOfAChoiceHasTheTimeOfItsPanel) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{30000, 2000, 768}), {.causal = true});
  const Subject subject{.problem = problem,
                        .heads_q = 32,
                        .heads_k = 8,
                        .shape = {.dtype = DType::bf16, .dim_qk = 128, .dim_v = 128},
                        .machine = machine_preset("h100-400g")};
  for (const LayoutKind kind : {LayoutKind::zigzag, LayoutKind::contiguous, LayoutKind::balanced}) {
    const PanelSpec spec = chosen(subject, make_layouts(kind, problem, 8));
    const Figure figure = make_figure(subject, {spec});
    const Timelines& times = figure.panels[0].times;
    std::ostringstream said;
    said << std::setprecision(3) << ": " << 1e3 * (times.forward.seconds + times.backward.seconds) << " ms (forward "
         << 1e3 * times.forward.seconds << " ms, backward " << 1e3 * times.backward.seconds << " ms)";
    EXPECT_NE(spec.note.find(said.str()), std::string::npos) << spec.note << said.str();
  }
}

TEST(Draw, CoarseThingsHoldTheFineOnes) {
  const std::vector<Index> lengths = {3, 0, 4, 1, 5, 9, 2, 6};
  const Problem problem(Stream::from_lengths(lengths), {.causal = true});
  const BundledSlices mask = bundled(problem.global_slices(), 3);
  EXPECT_EQ(mask.slices.size(), 3U);
  for (const auto& [q, k] : pairs_of(problem)) {
    EXPECT_TRUE(std::any_of(mask.slices.begin(), mask.slices.end(), [&](const Slice& s) { return sees(s, q, k); }));
  }
  const BundledStream stream = bundled(problem.packing().q(), 3);
  EXPECT_EQ(stream.each, 3);
  EXPECT_EQ(stream.offsets, (std::vector<Index>{0, 7, 22, 30}));
  EXPECT_EQ(stream.used, (std::vector<Index>{7, 15, 8}));
  const Layout layout = Layout::striped(problem.packing().q(), 5);
  const Holding all = holding(layout, 5), some = holding(layout, 4);
  EXPECT_EQ(all.stretch, 0);
  EXPECT_EQ(some.stretch, 8);
  const std::vector<Index> owner = owners(layout);
  Index covered = 0;
  for (const auto& [rank, run] : some.parts) {
    EXPECT_EQ(rank, owner[at(min_of(run.token + some.stretch / 2, Index{29}))]);
    covered += run.count;
  }
  EXPECT_EQ(covered, 30);
}

TEST(Draw, TextStaysText) {
  EXPECT_EQ(escaped("<a href='x'>\"&"), "&lt;a href=&#39;x&#39;&gt;&quot;&amp;");
  EXPECT_EQ(escaped("\x01\xff\xc3"), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");
  EXPECT_EQ(escaped("a\u00e9\u20ac\U0001f600"), "a\u00e9\u20ac\U0001f600");
  EXPECT_EQ(escaped("\xed\xa0\x80"), "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd");  // half a surrogate pair
  EXPECT_EQ(escaped("\xc0\xaf"), "\xef\xbf\xbd\xef\xbf\xbd");                  // a slash, written too long
  EXPECT_EQ(json_string("</script>\n\"\\\u2028"), "\"\\u003c/script\\u003e\\u000a\\u0022\\u005c\\u2028\"");
  EXPECT_EQ(json_deltas({5, 7, 7, 1}), "[5,2,0,-6]");
  EXPECT_EQ(json_deltas({}), "[]");
}

TEST(Draw, NumbersForPeople) {
  EXPECT_EQ(grouped(-1234567), "-1,234,567");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(counted(1, "token"), "1 token");
  EXPECT_EQ(bytes_text(1536), "1.50 KiB");
  EXPECT_EQ(short_number(9'996'000), "10.0 M");
}

}  // namespace
}  // namespace weft::draw
