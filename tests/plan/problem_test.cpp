// Masks: the slices that DESIGN's table promises, and what is refused.
#include <gtest/gtest.h>

#include "refusal.h"
#include "weft/mask.h"

namespace weft {
namespace {

using Indices = std::vector<Index>;

Stream lengths(const Indices& l) { return Stream::from_lengths(l); }
constexpr Index kInf = kUnlimited;

TEST(Problem, SlicesOfPlainMasks) {
  const Packing p(lengths({4, 3}));
  EXPECT_EQ(Problem(p, {}).global_slices(), (std::vector<Slice>{{0, 4, 0, 4, -kInf, kInf}, {4, 7, 4, 7, -kInf, kInf}}));
  EXPECT_EQ(Problem(p, {.causal = true}).global_slices(),
            (std::vector<Slice>{{0, 4, 0, 4, -kInf, 0}, {4, 7, 4, 7, -kInf, 0}}));
  EXPECT_EQ(Problem(p, {.left = 1, .right = 2}).global_slices(),
            (std::vector<Slice>{{0, 4, 0, 4, -1, 2}, {4, 7, 4, 7, -1, 2}}));
  // causal caps right at 0, so causal + (512, 512) is (512, 0)
  EXPECT_EQ(Problem(p, {.causal = true, .left = 512, .right = 512}).global_slices(),
            Problem(p, {.left = 512, .right = 0}).global_slices());
}

TEST(Problem, BottomRightShiftsTheBand) {
  const Packing p(lengths({2}), lengths({5}));
  EXPECT_EQ(Problem(p, {.causal = true}).global_slices(), (std::vector<Slice>{{0, 2, 0, 2, -kInf, 0}}));
  EXPECT_EQ(Problem(p, {.causal = true, .align = Align::bottom_right}).global_slices(),
            (std::vector<Slice>{{0, 2, 0, 5, -kInf, 3}}));
  // More queries than keys: the first queries see nothing and lie in no slice.
  const Packing q(lengths({5}), lengths({2}));
  EXPECT_EQ(Problem(q, {.causal = true, .align = Align::bottom_right}).global_slices(),
            (std::vector<Slice>{{3, 5, 0, 2, -kInf, -3}}));
}

TEST(Problem, ChunksAreSlices) {
  const Packing p(lengths({7}));
  EXPECT_EQ(Problem(p, {.causal = true, .chunk = 3}).global_slices(),
            (std::vector<Slice>{{0, 3, 0, 3, -kInf, 0}, {3, 6, 3, 6, -kInf, 0}, {6, 7, 6, 7, -kInf, 0}}));
  // bottom_right: chunks are counted from the keys' start, floors go toward minus infinity
  const Packing cross(lengths({4}), lengths({6}));
  EXPECT_EQ(Problem(cross, {.align = Align::bottom_right, .chunk = 4}).global_slices(),
            (std::vector<Slice>{{0, 2, 0, 4, -kInf, kInf}, {2, 4, 4, 6, -kInf, kInf}}));
}

TEST(Problem, EmptyAndPaddedSequences) {
  const Indices padded{2, 5, 9}, used{0, 2};
  const Problem p(Stream::from_used(padded, used, 12), {.causal = true});
  EXPECT_EQ(p.global_slices(), (std::vector<Slice>{{5, 7, 5, 7, -kInf, 0}}));
  EXPECT_EQ(p.visible_pairs(), 3);
  EXPECT_EQ(Problem(Packing(), {}).visible_pairs(), 0);
}

TEST(Problem, PairsInClosedFormAtFullSize) {
  const Problem whole(Stream::from_lengths(Indices{kMaxTokens}), {});
  EXPECT_EQ(whole.visible_pairs(), kMaxTokens * kMaxTokens);
  const Problem causal(Stream::from_lengths(Indices{kMaxTokens}), {.causal = true});
  EXPECT_EQ(causal.visible_pairs(), kMaxTokens / 2 * kMaxTokens + kMaxTokens);  // kMaxTokens is odd: n(n+1)/2
  const Problem wide(Stream::from_lengths(Indices{10}), {.left = INT64_MAX, .right = INT64_MAX, .chunk = INT64_MAX});
  EXPECT_EQ(wide.visible_pairs(), 100);
}

TEST(Problem, OwnSlices) {
  // A shared prefix 0:4 and two branches 4:7 and 7:9 that see it and themselves.
  const std::vector<Slice> tree{
      {0, 4, 0, 4, -kInf, 0}, {4, 7, 0, 4}, {4, 7, 4, 7, -kInf, 0}, {7, 9, 0, 4}, {7, 9, 7, 9, -kInf, 0}};
  const Problem p(lengths({9}), {.slices = tree});
  EXPECT_EQ(p.visible_pairs(), 10 + 12 + 6 + 8 + 3);
  // One rectangle may be shared by disjoint bands, and rows or keys by any number of slices.
  EXPECT_EQ(Problem(lengths({9}), {.slices = {{{0, 9, 0, 9, -kInf, -1}, {0, 9, 0, 9, 0, 0}, {0, 9, 0, 9, 1, kInf}}}})
                .visible_pairs(),
            81);
  EXPECT_EQ(Problem(lengths({9}), {.slices = std::vector<Slice>{}}).visible_pairs(), 0);
}

TEST(Problem, Refusals) {
  const auto mask = [](const Mask& m) { return [m] { (void)Problem(Stream::from_lengths(Indices{4, 5}), m); }; };
  expect_refusal(mask({.left = -2}), {"window left = -2", "-1 for unlimited"});
  expect_refusal(mask({.right = -7}), {"window right = -7"});
  expect_refusal(mask({.chunk = 0}), {"chunk size 0", "1 or more"});
  expect_refusal(mask({.chunk = -5}), {"chunk size -5"});
  expect_refusal(mask({.causal = true, .slices = std::vector<Slice>{}}), {"its own slices", "lo and hi"});
  expect_refusal(mask({.slices = {{{0, 10, 0, 9}}}}), {"slice 0", "query range 0:10", "0:9"});
  expect_refusal(mask({.slices = {{{0, 1, 0, 1}, {0, 1, -1, 2}}}}), {"slice 1", "key range -1:2"});
  expect_refusal(mask({.slices = {{{3, 2, 0, 9}}}}), {"query range 3:2"});
  expect_refusal(mask({.slices = {{{0, 2, 0, 2, 1, 0}}}}), {"lo 1", "hi 0", "lo is above hi"});
  expect_refusal(mask({.slices = {{{0, 5, 0, 5}, {5, 9, 0, 9}, {4, 6, 4, 9, 0, kInf}}}}),
                 {"slices 0 ", " and 2 ", "overlap", "query 4, key 4"});
  expect_refusal(mask({.slices = {{{0, 5, 0, 5, -kInf, 0}, {0, 5, 0, 5, 0, kInf}}}}), {"overlap", "query 0, key 0"});
  const Indices padded{0, 6, 12}, used{4, 6};
  const auto padding = [&](Slice s) {
    return [=] { (void)Problem(Stream::from_used(padded, used), {.slices = {{s}}}); };
  };
  expect_refusal(padding({0, 5, 0, 4}), {"slice 0", "query token 4 is padding", "split the slice"});
  expect_refusal(padding({0, 4, 5, 6}), {"key token 5 is padding"});
  expect_refusal(padding({6, 12, 0, 12}), {"key token 4 is padding"});
}

TEST(Problem, OverlapIsFoundAmongMany) {
  // 20,000 disjoint slices of one query range each, then one that touches the last: found, and in good time.
  std::vector<Slice> slices;
  for (Index i = 0; i < 20000; ++i) slices.push_back({0, 40000, 2 * i, 2 * i + 2});
  const Stream stream = Stream::from_lengths(Indices{40000});
  EXPECT_EQ(Problem(stream, {.slices = slices}).visible_pairs(), Index{40000} * 40000);
  slices.push_back({39999, 40000, 39999, 40000});
  expect_refusal([&] { (void)Problem(stream, {.slices = slices}); },
                 {"slices 19999", "20000", "query 39999, key 39999"});
}

}  // namespace
}  // namespace weft
