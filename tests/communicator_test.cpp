#include "weft/communicator.h"

#include <gtest/gtest.h>

#include <numeric>

#include "refusal.h"

namespace weft {
namespace {

template <class T>
Block block(std::vector<T>& values) {
  return {.data = values.data(), .rows = 1, .bytes = static_cast<Index>(values.size() * sizeof(T))};
}

TEST(Communicator, AllReduce) {
  for (Index ranks = 1; ranks <= 8; ++ranks) {
    run_ranks(ranks, [&](Communicator& c) {
      std::vector<double> values{static_cast<double>(c.rank()), 1};
      c.all_reduce(values.data(), DType::f64, 2, Reduce::sum).wait();
      EXPECT_EQ(values, (std::vector<double>{static_cast<double>(ranks * (ranks - 1)) / 2, static_cast<double>(ranks)}));
    });
  }
}

TEST(Communicator, RankFails) {
  expect_refusal(
      [] {
        run_ranks(4, [](Communicator& c) {
          float value = 1;
          if (c.rank() == 2) throw Error("boom", "be calm");
          c.all_reduce(&value, DType::f32, 1, Reduce::max).wait();
        });
      },
      {"rank 2: boom"});
}

}  // namespace
}  // namespace weft
