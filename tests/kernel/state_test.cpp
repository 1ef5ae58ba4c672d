#include "weft/state.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace weft {
namespace {

template <class T>
class StateTest : public testing::Test {};
using Accumulators = testing::Types<float, double>;
TYPED_TEST_SUITE(StateTest, Accumulators);

constexpr Index kWidth = 3;

// A state with its accumulator, and how the algebra is used on both.
template <class T>
struct Partial {
  RowState<T> state;
  std::vector<T> accumulator = std::vector<T>(kWidth, std::numeric_limits<T>::quiet_NaN());  // empty: never read

  Partial() = default;
  Partial(T logit, std::vector<T> v) : state(state_of(logit)), accumulator(std::move(v)) {}
  void add(const Partial& other) {
    merge_row(state, accumulator.data(), other.state, other.accumulator.data(), kWidth);
  }
};

template <class T>
Partial<T> sum_of(Partial<T> a, const Partial<T>& b) {
  a.add(b);
  return a;
}

template <class T>
std::vector<Partial<T>> random_keys(std::mt19937& random, int count, double spread) {
  std::uniform_real_distribution<double> uniform(-1, 1);
  std::vector<Partial<T>> keys;
  for (int i = 0; i < count; ++i) {
    const T logit = random() % 10 == 0 ? kMinusInfinity<T> : static_cast<T>(spread * uniform(random));
    std::vector<T> v(kWidth);
    for (T& x : v) x = static_cast<T>(uniform(random));
    keys.emplace_back(logit, v);
  }
  return keys;
}

// lse and outputs of the whole row in long double, from the formula.
struct Exact {
  long double lse = -INFINITY;
  std::vector<long double> out = std::vector<long double>(kWidth, 0);
};

template <class T>
Exact exact(const std::vector<Partial<T>>& keys, long double sink) {
  long double top = sink, total = 0;
  for (const auto& key : keys) top = std::max<long double>(top, key.state.max);
  Exact result;
  if (top == -INFINITY) return result;
  total = std::exp(sink - top);
  for (const auto& key : keys) {
    const long double p = std::exp(static_cast<long double>(key.state.max) - top);
    total += p;
    for (std::size_t i = 0; i < kWidth; ++i) result.out[i] += p * static_cast<long double>(key.accumulator[i]);
  }
  for (auto& x : result.out) x /= total;
  result.lse = top + std::log(total);
  return result;
}

template <class T>
void expect_near(const Partial<T>& got, const Exact& want, T sink, const std::string& what) {
  const FinishedRow<T> finished = finish(got.state, sink);
  const T unit = std::numeric_limits<T>::epsilon();
  if (std::isinf(want.lse)) {
    EXPECT_EQ(finished.lse, kMinusInfinity<T>) << what;
    EXPECT_EQ(finished.weight, 0) << what;
    return;
  }
  // exp of a difference up to 2·spread loses that many units.
  const T tolerance = unit * (16 + 4 * std::abs(finished.lse) + 4 * std::abs(got.state.max));
  EXPECT_NEAR(finished.lse, static_cast<T>(want.lse), tolerance) << what;
  for (std::size_t i = 0; i < kWidth && finished.weight > 0; ++i) {
    EXPECT_NEAR(got.accumulator[i] * finished.weight, static_cast<T>(want.out[i]), 8 * tolerance) << what;
  }
}

TYPED_TEST(StateTest, TheDefaultIsTheIdentityBitForBit) {
  using T = TypeParam;
  for (const T logit : {T(-1e4), T(-0.3), T(0), T(80), T(1e30)}) {
    const Partial<T> key(logit, {1, -2, T(0.1)});
    for (const Partial<T>& both : {sum_of(key, {}), sum_of({}, key)}) {
      EXPECT_EQ(both.state, key.state);
      EXPECT_EQ(both.accumulator, key.accumulator);
    }
    const MergedState<T> merged = merge(RowState<T>{}, key.state);
    EXPECT_EQ(merged.weight_a, 0);
    EXPECT_EQ(merged.weight_b, 1);
  }
}

TYPED_TEST(StateTest, TwoEmptyStatesMergeToEmpty) {
  using T = TypeParam;
  const MergedState<T> merged = merge(RowState<T>{}, RowState<T>{});
  EXPECT_EQ(merged.state, RowState<T>{});
  EXPECT_EQ(merged.weight_a, 0);
  EXPECT_EQ(merged.weight_b, 0);
  EXPECT_TRUE(is_empty(merged.state));
  EXPECT_TRUE(is_empty(merge(merged.state, state_of(kMinusInfinity<T>)).state));
}

TYPED_TEST(StateTest, MergeCommutesExactly) {
  using T = TypeParam;
  std::mt19937 random(2);
  for (int i = 0; i < 1000; ++i) {
    const auto keys = random_keys<T>(random, 4, 20);
    const Partial<T> a = sum_of(keys[0], keys[1]), b = sum_of(keys[2], keys[3]);
    const MergedState<T> ab = merge(a.state, b.state), ba = merge(b.state, a.state);
    EXPECT_EQ(ab.state, ba.state);
    EXPECT_EQ(ab.weight_a, ba.weight_b);
    EXPECT_EQ(ab.weight_b, ba.weight_a);
    if (is_empty(a.state) && is_empty(b.state)) continue;
    EXPECT_EQ(sum_of(a, b).accumulator, sum_of(b, a).accumulator);
  }
}

TYPED_TEST(StateTest, MergeAssociatesWithinAFewUnits) {
  using T = TypeParam;
  std::mt19937 random(3);
  for (int i = 0; i < 1000; ++i) {
    const auto keys = random_keys<T>(random, 3, 2);
    const Partial<T> left = sum_of(sum_of(keys[0], keys[1]), keys[2]);
    const Partial<T> right = sum_of(keys[0], sum_of(keys[1], keys[2]));
    EXPECT_EQ(left.state.max, right.state.max);
    EXPECT_NEAR(left.state.sum, right.state.sum, 8 * std::numeric_limits<T>::epsilon() * left.state.sum);
    for (std::size_t c = 0; c < kWidth && !is_empty(left.state); ++c) {
      EXPECT_NEAR(left.accumulator[c], right.accumulator[c], 24 * std::numeric_limits<T>::epsilon());
    }
  }
}

// Keys in any order, in any groups, merged in any order: the same row as in one pass.
TYPED_TEST(StateTest, AnySplitGivesTheWholeRow) {
  using T = TypeParam;
  std::mt19937 random(4);
  for (int trial = 0; trial < 300; ++trial) {
    const double spread = trial % 3 == 0 ? 1000 : 5;
    auto keys = random_keys<T>(random, static_cast<int>(random() % 12), spread);
    const T sink = trial % 2 == 0 ? kMinusInfinity<T> : static_cast<T>(spread / 2);
    const Exact want = exact(keys, sink);
    std::shuffle(keys.begin(), keys.end(), random);
    std::vector<Partial<T>> groups(1 + random() % 5);
    for (const auto& key : keys) groups[random() % groups.size()].add(key);
    while (groups.size() > 1) {
      std::shuffle(groups.begin(), groups.end(), random);
      groups[groups.size() - 2].add(groups.back());
      groups.pop_back();
    }
    expect_near(groups[0], want, sink, "trial " + std::to_string(trial));
  }
}

TYPED_TEST(StateTest, RowsMergeWithTheirAccumulators) {
  using T = TypeParam;
  std::vector<RowState<T>> a = {state_of(T(1)), {}, state_of(T(2)), {}};
  const std::vector<RowState<T>> b = {state_of(T(1)), state_of(T(3)), {}, {}};
  std::vector<T> x = {10, 20, 30, 40};
  const std::vector<T> y = {1, 2, 3, 4};
  for (std::size_t i = 0; i < 4; ++i) merge_row(a[i], &x[i], b[i], &y[i], 1);
  EXPECT_EQ(a, (std::vector<RowState<T>>{{1, 2}, {3, 1}, {2, 1}, {}}));
  EXPECT_EQ(x, (std::vector<T>{11, 2, 30, 40}));
}

TYPED_TEST(StateTest, FinishWithoutKeys) {
  using T = TypeParam;
  EXPECT_EQ(finish(RowState<T>{}).lse, kMinusInfinity<T>);
  EXPECT_EQ(finish(RowState<T>{}).weight, 0);
  EXPECT_EQ(finish(RowState<T>{}, T(1.25)).lse, T(1.25));
  EXPECT_EQ(finish(RowState<T>{}, T(1.25)).weight, 0);
}

TYPED_TEST(StateTest, TheSinkEntersOnceAtTheEnd) {
  using T = TypeParam;
  const RowState<T> four =
      merge(merge(state_of(T(0)), state_of(T(0))).state, merge(state_of(T(0)), state_of(T(0))).state).state;
  EXPECT_EQ(four.sum, 4);
  const FinishedRow<T> plain = finish(four), off_by_one = finish(four, T(0));
  EXPECT_FLOAT_EQ(static_cast<float>(plain.lse), std::log(4.0f));
  EXPECT_EQ(plain.weight, T(0.25));
  EXPECT_FLOAT_EQ(static_cast<float>(off_by_one.lse), std::log(5.0f));
  EXPECT_EQ(off_by_one.weight, T(1) / 5);
  const FinishedRow<T> drowned = finish(four, T(1e6));  // a sink that takes everything
  EXPECT_EQ(drowned.lse, T(1e6));
  EXPECT_EQ(drowned.weight, 0);
}

TYPED_TEST(StateTest, HugeLogitsDoNotOverflow) {
  using T = TypeParam;
  const T huge = std::numeric_limits<T>::max() / 4;
  const Partial<T> both = sum_of(Partial<T>(huge, {1, 2, 3}), Partial<T>(-huge, {4, 5, 6}));
  EXPECT_EQ(both.accumulator, (std::vector<T>{1, 2, 3}));
  EXPECT_EQ(finish(both.state).lse, huge);
  EXPECT_EQ(finish(both.state, -huge).weight, 1);
}

TYPED_TEST(StateTest, ANanIsNeverHidden) {
  using T = TypeParam;
  const RowState<T> nan = state_of(std::numeric_limits<T>::quiet_NaN());
  for (const RowState<T>& other : {RowState<T>{}, state_of(T(3))}) {
    EXPECT_TRUE(std::isnan(finish(merge(nan, other).state).lse));
    EXPECT_TRUE(std::isnan(finish(merge(other, nan).state, T(0)).lse));
  }
}

}  // namespace
}  // namespace weft
