// Packing: every way in gives the same streams; everything a caller can get wrong is refused with its values.
#include "weft/packing.h"

#include <gtest/gtest.h>

#include "refusal.h"

namespace weft {
namespace {

using Indices = std::vector<Index>;

TEST(Packing, WaysInAgree) {
  const Indices lengths{5, 0, 7}, cu{0, 5, 5, 12};
  const std::vector<std::int32_t> narrow{0, 5, 5, 12};
  const Stream s = Stream::from_lengths(lengths);
  EXPECT_EQ(s, Stream::from_cu_seqlens({.cu_seqlens = cu}));
  EXPECT_EQ(s, Stream::from_cu_seqlens(narrow));
  EXPECT_EQ(s, Stream::from_used(cu, lengths));
  EXPECT_EQ(s.sequences(), 3);
  EXPECT_EQ(s.tokens(), 12);
  EXPECT_EQ(s.used_tokens(), 12);
  EXPECT_EQ(s.used(1), 0);
}

TEST(Packing, PaddedWaysInAgree) {
  const Indices lengths{5, 0, 7}, cu{0, 5, 5, 12}, padded{0, 6, 6, 15};
  const std::vector<std::int32_t> narrow{0, 5, 5, 12}, narrow_padded{0, 6, 6, 15};
  const Stream s = Stream::from_lengths(lengths).padded_to(3);
  EXPECT_EQ(s, Stream::from_cu_seqlens({.cu_seqlens = cu, .cu_seqlens_padded = padded}));
  EXPECT_EQ(s, Stream::from_cu_seqlens(narrow, narrow_padded));
  EXPECT_EQ(s, Stream::from_used(padded, lengths));
  EXPECT_EQ(s.padded(2), 9);
  EXPECT_EQ(s.used_tokens(), 12);
}

TEST(Packing, FirstOffsetAndRowsPastTheLast) {
  const Indices padded{4, 10, 14}, used{3, 4};
  const Stream s = Stream::from_used(padded, used, 20);
  EXPECT_EQ(s.extent(), (Range{4, 14}));
  EXPECT_EQ(s.tokens(), 20);
  // Prefix sums that do not start at zero keep their offset.
  const Indices cu{3, 5, 9};
  EXPECT_EQ(Stream::from_cu_seqlens({.cu_seqlens = cu}).offset(0), 3);
  EXPECT_EQ(Stream::from_cu_seqlens({.cu_seqlens = cu}).used(1), 4);
}

TEST(Packing, Batch) {
  const Indices used{2, 0, 5};
  const Stream s = Stream::from_batch(3, 5, used);
  EXPECT_EQ(s.tokens(), 15);
  EXPECT_EQ(s.offset(2), 10);
  EXPECT_EQ(s.used(0), 2);
  EXPECT_EQ(Stream::from_batch(3, 5).used(0), 5);
  EXPECT_EQ(Stream::from_batch(0, 5).tokens(), 0);
}

TEST(Packing, NoSequences) {
  EXPECT_EQ(Stream().sequences(), 0);
  EXPECT_EQ(Stream::from_lengths({}), Stream());
  EXPECT_EQ(Packing().sequences(), 0);
}

TEST(Packing, CrossAttention) {
  const Packing p(Stream::from_lengths(Indices{3, 4}), Stream::from_lengths(Indices{6, 0}));
  EXPECT_FALSE(p.self());
  EXPECT_EQ(p.padded_to(4).k().tokens(), 8);
  EXPECT_TRUE(Packing(Stream::from_lengths(Indices{3})).self());
}

TEST(Packing, Refusals) {
  const Indices good{0, 5, 12}, falling{0, 5, 4}, negative{-1, 4}, shorter{0, 4, 12}, two{0, 12};
  const auto cu = [](const Indices& a, const Indices& b = {}, std::optional<Index> tokens = {}) {
    return [=] { (void)Stream::from_cu_seqlens({.cu_seqlens = a, .cu_seqlens_padded = b, .tokens = tokens}); };
  };
  expect_refusal(cu({}), {"cu_seqlens is empty", "n + 1"});
  expect_refusal(cu(falling), {"cu_seqlens[2] = 4", "cu_seqlens[1] = 5", "never fall"});
  expect_refusal(cu(negative), {"cu_seqlens[0] = -1"});
  expect_refusal(cu(good, falling), {"cu_seqlens_padded[2] = 4"});
  expect_refusal(cu(good, two), {"3 entries", "2"});
  expect_refusal(cu(good, shorter), {"sequence 0", "5 used", "4 rows", "padded_to"});
  expect_refusal(cu(good, {}, 11), {"11 rows", "12"});
  expect_refusal(cu(good, {}, kMaxTokens + 1), {"2147483648", "2147483647", "split"});
  expect_refusal([&] { (void)Stream::from_used(good, Indices{1}); }, {"3 padded offsets", "1 used"});
  expect_refusal([&] { (void)Stream::from_used(good, Indices{1, -2}); }, {"sequence 1", "-2"});
  expect_refusal([] { (void)Stream::from_lengths(Indices{4, -3}); }, {"sequence 1", "-3"});
  expect_refusal([] { (void)Stream::from_lengths(Indices{kMaxTokens, 1}); }, {"sequence 1", "2147483647"});
  expect_refusal([] { (void)Stream::from_batch(-1, 4); }, {"-1"});
  expect_refusal([] { (void)Stream::from_batch(1 << 20, 1 << 20); }, {"1048576", "split the batch"});
  expect_refusal([] { (void)Stream::from_batch(2, 4, Indices{1}); }, {"1 used lengths", "batch of 2"});
  expect_refusal([] { (void)Stream::from_batch(1, 4, Indices{5}); }, {"sequence 0", "5 used"});
  expect_refusal([] { (void)Stream().padded_to(0); }, {"multiple of 0"});
  expect_refusal([] { (void)Stream::from_lengths(Indices{1, 1}).padded_to(kMaxTokens); }, {"4294967294", "limit"});
  expect_refusal([] { (void)Packing(Stream::from_lengths(Indices{1}), Stream()); }, {"1 sequences", "0"});
}

}  // namespace
}  // namespace weft
