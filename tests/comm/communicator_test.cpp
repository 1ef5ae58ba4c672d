// Communicators: what is moved against naive loops, and what is counted.
#include "weft/communicator.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include <gtest/gtest.h>

#include "comm/letters.h"
#include "refusal.h"

namespace weft {
namespace {

using namespace test;
void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Runs body on ranks; no failure of it may be lost, and nothing may take long.
void run(Index ranks, const std::function<void(Communicator&)>& body, const ThreadRanks& how = {.time_limit = 60}) {
  run_ranks(ranks, body, how);
}

// ---- exchanges of random messages, cut at random

void random_exchanges(std::uint64_t seed) {
  Random random(seed);
  const Index ranks = 1 + static_cast<Index>(seed % 8);
  const std::vector<std::vector<Letter>> calls = random_calls(random, ranks);
  run(ranks, [&](Communicator& c) { exchange_letters(c, calls, seed); });
}

TEST(Communicator, RandomExchanges) {
  for (std::uint64_t seed = 0; seed < 300 && !HasFailure(); ++seed) random_exchanges(seed);
}

// ---- collectives

TEST(Communicator, AllGather) {
  for (Index ranks = 1; ranks <= 8; ++ranks) {
    run(ranks, [&](Communicator& c) {
      EXPECT_EQ(c.ranks(), ranks);
      EXPECT_EQ(c.name(), "threads");
      const auto count = [](Index rank) { return rank * 5 % 7; };  // rank 0 has nothing
      std::vector<float> mine = values(count(c.rank()), 1, c.rank());
      std::vector<std::vector<float>> all;
      Index total = 0;
      for (Index rank = 0; rank < ranks; ++rank) {
        all.emplace_back(at(count(rank)), -1.0f);
        if (rank != c.rank()) total += count(rank);
      }
      c.all_gather(block(mine), blocks(all)).wait();
      for (Index rank = 0; rank < ranks; ++rank) EXPECT_EQ(all[at(rank)], values(count(rank), 1, rank));
      EXPECT_EQ(c.traffic().bytes_received, 4 * total);
      EXPECT_EQ(c.traffic().bytes_sent, 4 * count(c.rank()) * (ranks - 1));
    });
  }
}

TEST(Communicator, AllGatherInPlace) {
  run(4, [](Communicator& c) {
    std::vector<std::vector<float>> all(4, std::vector<float>(100));
    all[at(c.rank())] = values(100, 1, c.rank());
    c.all_gather(block(all[at(c.rank())]), blocks(all)).wait();
    for (Index rank = 0; rank < 4; ++rank) EXPECT_EQ(all[at(rank)], values(100, 1, rank));
  });
}

TEST(Communicator, ReduceScatterAddsInTheOrderOfRanks) {
  for (Index ranks = 1; ranks <= 8; ++ranks) {
    for (int repeat = 0; repeat < 5; ++repeat) {  // whoever comes first: the same bits
      run(ranks, [&](Communicator& c) {
        const auto count = [](Index rank) { return rank == 1 ? 0 : 3 + 4 * rank; };
        std::vector<std::vector<float>> parts;
        for (Index rank = 0; rank < ranks; ++rank) parts.push_back(values(count(rank), 2, c.rank(), rank));
        std::vector<float> mine(at(count(c.rank())), std::nanf("")), expected = values(count(c.rank()), 2, 0, c.rank());
        if ((c.rank() + repeat) % 3 == 0) sleep(0.001);
        Request request = c.reduce_scatter(blocks(parts), block(mine));
        for (Index rank = 1; rank < ranks; ++rank) {
          for (std::size_t i = 0; i < expected.size(); ++i) {
            expected[i] += value(2, rank, c.rank(), static_cast<Index>(i));
          }
        }
        request.wait();
        EXPECT_EQ(mine, expected);
        EXPECT_EQ(c.traffic().bytes_received, 4 * count(c.rank()) * (ranks - 1));
      });
    }
  }
}

TEST(Communicator, AllToAll) {
  for (Index ranks = 1; ranks <= 8; ++ranks) {
    run(ranks, [&](Communicator& c) {
      const auto count = [](Index from, Index to) { return (from * 3 + to * 5) % 4 * 10; };
      std::vector<std::vector<float>> to, from;
      for (Index rank = 0; rank < ranks; ++rank) {
        to.push_back(values(count(c.rank(), rank), 3, c.rank(), rank));
        from.emplace_back(at(count(rank, c.rank())));
      }
      c.all_to_all(blocks(to), blocks(from)).wait();
      for (Index rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(from[at(rank)], values(count(rank, c.rank()), 3, rank, c.rank()));
      }
    });
  }
}

TEST(Communicator, RingOfSendReceives) {
  for (Index ranks = 1; ranks <= 8; ++ranks) {
    run(ranks, [&](Communicator& c) {
      std::vector<float> held = values(50, 4, c.rank()), coming(50);
      const Index next = (c.rank() + 1) % ranks, last = (c.rank() + ranks - 1) % ranks;
      for (Index step = 1; step < ranks; ++step) {
        Request request = c.send_receive(next, block(held), last, block(coming));
        EXPECT_EQ(held, values(50, 4, (c.rank() + ranks - step + 1) % ranks));  // may be read meanwhile
        request.wait();
        std::swap(held, coming);
        EXPECT_EQ(held, values(50, 4, (c.rank() + ranks - step) % ranks));
      }
      EXPECT_EQ(c.traffic(), (Traffic{200 * (ranks - 1), 200 * (ranks - 1), ranks - 1, ranks - 1}));
    });
  }
}

// Digits that f32 does not have survive; in the order of ranks.
TEST(Communicator, SumsOfF64) {
  for (const Index ranks : {1, 2, 5}) {
    run(ranks, [&](Communicator& c) {
      std::vector<std::vector<double>> parts(at(ranks), std::vector<double>(7));
      std::vector<double> want(7, 0), sum(7, -1), added(7, 0);
      for (Index rank = 0; rank < ranks; ++rank) {
        for (Index i = 0; i < 7; ++i) {
          parts[at(rank)][at(i)] = 1.0 / (3.0 + static_cast<double>(c.rank() + 10 * rank + i));
          want[at(i)] += 1.0 / (3.0 + static_cast<double>(rank + 10 * c.rank() + i));
        }
      }
      const auto whole = [](std::vector<double>& v) { return Block{.data = v.data(), .rows = 1, .bytes = 56}; };
      std::vector<Block> blocks;
      std::vector<Message> sends, receives;
      for (Index rank = 0; rank < ranks; ++rank) {
        blocks.push_back(whole(parts[at(rank)]));
        sends.push_back({rank, {blocks.back()}});
        receives.push_back({rank, {whole(added)}, Combine::add_f64});
      }
      c.reduce_scatter(blocks, whole(sum), DType::f64).wait();
      EXPECT_EQ(sum, want);
      c.exchange(std::move(sends), std::move(receives)).wait();
      EXPECT_EQ(added, want);
      const Block odd{.data = sum.data(), .rows = 1, .bytes = 12};
      expect_refusal([&] { (void)c.exchange({}, {{0, {odd}, Combine::add_f64}}); }, {"f64", "8 bytes"});
      expect_refusal([&] { (void)c.reduce_scatter(blocks, whole(sum), DType::bf16); }, {"bf16", "f32 or f64"});
    });
  }
}

// Two calls add to one place; ranks wait for them, for a third and for a fourth that starts later in different orders.
TEST(Communicator, SumsAreMadeInTheirOwnWait) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    run(3, [&](Communicator& c) {
      std::vector<std::vector<float>> first, second;
      for (Index rank = 0; rank < 3; ++rank) {
        first.push_back(values(30, 8, c.rank(), rank));
        second.push_back(values(30, 9, c.rank(), rank));
      }
      std::vector<float> sum(30, 0.25f);
      const auto add_all = [&](std::vector<std::vector<float>>& parts) {
        std::vector<Message> sends, receives;
        for (Index peer = 0; peer < 3; ++peer) {
          sends.push_back({peer, {block(parts[at(peer)])}});
          receives.push_back({peer, {block(sum)}, Combine::add});
        }
        return c.exchange(std::move(sends), std::move(receives));
      };
      const auto expected = [&](std::vector<float> so_far, Index seed) {
        for (Index rank = 0; rank < 3; ++rank) {
          for (Index i = 0; i < 30; ++i) so_far[at(i)] += value(seed, rank, c.rank(), i);
        }
        return so_far;
      };
      const std::vector<float> before = sum;
      float one = 1, late = 1;
      Request a = add_all(first), b = add_all(second), other = c.all_reduce(&one, DType::f32, 1, Reduce::sum);
      if (c.rank() == repeat % 3) {
        other.wait();
        c.all_reduce(&late, DType::f32, 1, Reduce::sum).wait();
        EXPECT_EQ(sum, before);
        b.wait();
        EXPECT_EQ(sum, expected(before, 9));
        a.wait();
        EXPECT_EQ(sum, expected(expected(before, 9), 8));
      } else {
        a.wait();
        EXPECT_EQ(sum, expected(before, 8));
        b.wait();
        EXPECT_EQ(sum, expected(expected(before, 8), 9));
        other.wait();
        c.all_reduce(&late, DType::f32, 1, Reduce::sum).wait();
      }
      EXPECT_EQ(one + late, 6);
    });
  }
}

template <class T>
void all_reduce(Index ranks, DType dtype) {
  std::vector<std::vector<T>> sums(at(ranks));
  run(ranks, [&](Communicator& c) {
    std::vector<T> numbers, expected, largest;
    for (Index i = 0; i < 20; ++i) {
      numbers.push_back(value(5, c.rank(), i));
      T sum = value(5, 0, i), most = sum;
      for (Index rank = 1; rank < ranks; ++rank) {
        sum += static_cast<T>(value(5, rank, i));
        most = std::max(most, static_cast<T>(value(5, rank, i)));
      }
      expected.push_back(sum);
      largest.push_back(most);
    }
    std::vector<T> most = numbers;
    Request sum = c.all_reduce(numbers.data(), dtype, 20, Reduce::sum);
    Request max = c.all_reduce(most.data(), dtype, 20, Reduce::max);
    max.wait();
    sum.wait();
    EXPECT_EQ(numbers, expected);
    EXPECT_EQ(most, largest);
    c.all_reduce(nullptr, dtype, 0, Reduce::sum).wait();
  });
}

TEST(Communicator, AllReduce) {
  for (Index ranks = 1; ranks <= 8; ++ranks) {
    all_reduce<float>(ranks, DType::f32);
    all_reduce<double>(ranks, DType::f64);
  }
}

TEST(Communicator, AllReduceShowsNan) {
  for (Index bad = 0; bad < 3; ++bad) {
    run(3, [&](Communicator& c) {
      double most = c.rank() == bad ? std::nan("") : -std::numeric_limits<double>::infinity();
      c.all_reduce(&most, DType::f64, 1, Reduce::max).wait();
      EXPECT_TRUE(std::isnan(most));
    });
  }
}

TEST(Communicator, SixtyFourRanks) {
  run(64, [](Communicator& c) {
    std::vector<std::vector<float>> to(64), from(64, std::vector<float>(3));
    for (Index rank = 0; rank < 64; ++rank) to[at(rank)] = values(3, 6, c.rank(), rank);
    double sum = 1;
    Request swap = c.all_to_all(blocks(to), blocks(from));
    c.all_reduce(&sum, DType::f64, 1, Reduce::sum).wait();
    swap.wait();
    EXPECT_EQ(sum, 64);
    for (Index rank = 0; rank < 64; ++rank) EXPECT_EQ(from[at(rank)], values(3, 6, rank, c.rank()));
  });
}

// ---- rows of tensors

// Sends rows of one view to the next rank, which has them in another view.
void pass_rows(const TensorView& from, const TensorView& to, Range rows, Range into) {
  for (Index row = 0; row < from.rows; ++row) {
    for (Index head = 0; head < from.heads; ++head) {
      for (Index i = 0; i < from.dim; ++i) from.at<float>(row, head)[i] = value(7, row, head, i);
    }
  }
  std::vector<Block> sent, received;
  append_blocks(from, rows, sent);
  append_blocks(to, into, received);
  run(2, [&](Communicator& c) {
    std::vector<Message> sends, receives;
    if (c.rank() == 0) sends.push_back({1, sent});
    if (c.rank() == 1) receives.push_back({0, received});
    c.exchange(std::move(sends), std::move(receives)).wait();
  });
  for (Index row = 0; row < to.rows; ++row) {
    const bool in = row >= into.begin && row < into.end;
    for (Index head = 0; head < to.heads; ++head) {
      for (Index i = 0; i < to.dim; ++i) {
        const float expected = in ? value(7, row - into.begin + rows.begin, head, i) : 0;
        EXPECT_EQ(to.at<float>(row, head)[i], expected) << row << " " << head << " " << i;
      }
    }
  }
}

TEST(Blocks, AnyViewToAnyView) {
  const Index batch = 3, length = 5, heads = 4, dim = 6, rows = batch * length;
  const auto views = [&](std::vector<float>& memory) {
    memory.assign(at(rows * heads * dim * 3), 0.0f);
    float* data = memory.data();
    const auto hd3 = qkv_3hd(thd(data, DType::f32, rows, 3 * heads, dim), heads, heads);
    const auto h3d = qkv_h3d(sbhd(data, DType::f32, batch, length, heads, 3 * dim));
    return std::vector<TensorView>{thd(data, DType::f32, rows, heads, dim),
                                   sbhd(data, DType::f32, batch, length, heads, dim), hd3.k, h3d.v, h3d.q};
  };
  std::vector<float> a, b;
  for (std::size_t from = 0; from < 5; ++from) {
    for (std::size_t to = 0; to < 5; ++to) {
      for (const Index first : {0, 3, 9}) {
        for (const Index count : {0, 1, 4, 6})
          pass_rows(views(a)[from], views(b)[to], {first, first + count}, {7, 7 + count});
      }
    }
  }
}

TEST(Blocks, AsFewAsCanBe) {
  std::vector<float> memory(1000);
  const auto of = [](const TensorView& view, Range rows) {
    std::vector<Block> result;
    append_blocks(view, rows, result);
    return result;
  };
  float* data = memory.data();
  const std::vector<Block> whole = of(thd(data, DType::f32, 10, 4, 6), {2, 7});
  ASSERT_EQ(whole.size(), 1u);
  EXPECT_EQ(whole[0].rows * whole[0].parts, 1);  // contiguous
  EXPECT_EQ(whole[0].data, data + 48);
  EXPECT_EQ(whole[0].size(), 5 * 24 * 4);
  const std::vector<Block> k = of(qkv_3hd(thd(data, DType::f32, 10, 12, 6), 4, 4).k, {2, 7});
  ASSERT_EQ(k.size(), 1u);
  EXPECT_EQ(k[0].rows, 5);
  EXPECT_EQ(k[0].parts, 1);  // heads side by side
  const std::vector<Block> v = of(qkv_h3d(thd(data, DType::f32, 10, 4, 18)).v, {2, 7});
  ASSERT_EQ(v.size(), 1u);
  EXPECT_EQ(v[0].parts, 4);
  EXPECT_EQ(of(sbhd(data, DType::f32, 3, 5, 4, 6), {3, 12}).size(), 3u);  // sequences 0, 1, 2
  EXPECT_TRUE(of(thd(data, DType::f32, 10, 4, 6), {4, 4}).empty());
  expect_refusal([&] { of(thd(data, DType::f32, 10, 4, 6), {4, 11}); }, {"[4, 11)", "10 rows"});
  expect_refusal([&] { of(thd(data, DType::f32, 10, 4, 6), {-1, 2}); }, {"[-1, 2)"});
}

// ---- splits

TEST(Communicator, SplitsIntoAMesh) {
  run(6, [](Communicator& c) {  // 2 x 3
    float number = 1;
    Request outside = c.all_reduce(&number, DType::f32, 1, Reduce::sum);
    const std::unique_ptr<Communicator> row = c.split(c.rank() / 3, c.rank()), column = c.split(c.rank() % 3, 0);
    EXPECT_EQ(row->ranks(), 3);
    EXPECT_EQ(row->rank(), c.rank() % 3);
    EXPECT_EQ(column->ranks(), 2);
    EXPECT_EQ(column->rank(), c.rank() / 3);
    double r = static_cast<double>(c.rank()), s = r;
    Request in_row = row->all_reduce(&r, DType::f64, 1, Reduce::sum);
    Request in_column = column->all_reduce(&s, DType::f64, 1, Reduce::sum);
    if (c.rank() % 2 == 0) in_row.wait();  // in different orders
    in_column.wait();
    in_row.wait();
    outside.wait();
    EXPECT_EQ(number, 6);
    EXPECT_EQ(r, c.rank() < 3 ? 3 : 12);
    EXPECT_EQ(s, static_cast<double>(2 * (c.rank() % 3) + 3));
    EXPECT_EQ(c.traffic(), (Traffic{20, 20, 5, 5}));
    EXPECT_EQ(row->traffic(), (Traffic{16, 16, 2, 2}));
    EXPECT_EQ(column->traffic(), (Traffic{8, 8, 1, 1}));
  });
}

TEST(Communicator, SplitsAgain) {
  run(8, [](Communicator& c) {
    const std::unique_ptr<Communicator> half = c.split(c.rank() % 2, -c.rank());  // backwards
    EXPECT_EQ(half->rank(), 3 - c.rank() / 2);
    const std::unique_ptr<Communicator> quarter = half->split(half->rank() / 2, half->rank());
    EXPECT_EQ(quarter->ranks(), 2);
    double ranks = static_cast<double>(c.rank());
    quarter->all_reduce(&ranks, DType::f64, 1, Reduce::sum).wait();
    EXPECT_EQ(static_cast<Index>(ranks), c.rank() / 4 * 8 + 2 + 2 * (c.rank() % 2));
    const std::unique_ptr<Communicator> alone = quarter->split(quarter->rank(), 0);
    EXPECT_EQ(alone->ranks(), 1);
    alone->all_reduce(&ranks, DType::f64, 1, Reduce::sum).wait();
  });
}

TEST(Communicator, SplitOutlivesItsParent) {
  run(4, [](Communicator& c) {
    std::unique_ptr<Communicator> inner = c.split(0, 0)->split(c.rank() / 2, 0);
    float one = 1;
    inner->all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
    EXPECT_EQ(one, 2);
  });
}

// ---- requests

TEST(Request, ThenFollowsWait) {
  Request none;
  EXPECT_FALSE(none.in_flight());
  none.wait();
  run(2, [](Communicator& c) {
    std::vector<int> order;
    float one = 1;
    Request request = c.all_reduce(&one, DType::f32, 1, Reduce::sum)
                          .after([&] { order.push_back(static_cast<int>(one)); })
                          .after([&] { order.push_back(7); });
    EXPECT_TRUE(order.empty());
    request.wait();
    request.wait();
    EXPECT_EQ(order, (std::vector<int>{2, 7}));
  });
}

TEST(Request, ReplacedOneIsWithdrawn) {
  run(2, [](Communicator& c) {
    float a = 1, b = 1;
    Request request = c.all_reduce(&a, DType::f32, 1, Reduce::sum);
    if (c.rank() == 0) {
      request = c.all_reduce(&b, DType::f32, 1, Reduce::sum);
      request.wait();
    } else {
      Request second = c.all_reduce(&b, DType::f32, 1, Reduce::sum);
      second.wait();
      // Rank 0 may have let go before or after this rank took its part; either way it never takes this rank's.
      expect_refusal([&] { request.wait(); }, {"rank 0", "gave up call 0"});
    }
    EXPECT_EQ(b, 2);
  });
}

// ---- refused before anything is posted

TEST(Communicator, RefusesWhatCannotBe) {
  run(3, [](Communicator& c) {
    std::vector<float> memory(8);
    const Block eight = block(memory);
    const auto send = [&](Index peer, Block b) { (void)c.exchange({{peer, {b}}}, {}); };
    const auto add = [&](Block b) { (void)c.exchange({}, {{0, {b}, Combine::add}}); };
    expect_refusal([&] { send(3, eight); }, {"send 0 of 1", "rank 3 of 3"});
    expect_refusal([&] { send(-1, eight); }, {"rank -1"});
    expect_refusal([&] { send(0, {nullptr, 1, 1, 8}); }, {"null pointer", "8 bytes"});
    expect_refusal([&] { send(0, {memory.data(), -1, 1, 8}); }, {"-1 rows"});
    expect_refusal([&] { send(0, {memory.data(), Index{1} << 40, Index{1} << 40, 8}); }, {"2^60"});
    expect_refusal([&] { add({memory.data(), 1, 1, 6}); }, {"receive 0 of 1", "f32"});
    expect_refusal([&] { add({reinterpret_cast<char*>(memory.data()) + 1, 1, 1, 4}); }, {"f32"});
    expect_refusal([&] { add({memory.data(), 2, 1, 4, 6, 0}); }, {"f32", "strides 6"});
    const std::vector<Block> parts(3, Block{memory.data(), 1, 1, 4});
    expect_refusal([&] { (void)c.reduce_scatter(parts, {memory.data(), 1, 1, 6}); }, {"reduce_scatter: mine", "f32"});
    expect_refusal([&] { (void)c.reduce_scatter(std::vector<Block>(3, {memory.data(), 1, 1, 6}), eight); },
                   {"reduce_scatter: part 0", "f32"});
    expect_refusal([&] { (void)c.all_gather(eight, std::vector<Block>{eight, eight}); }, {"2 blocks", "3 ranks"});
    expect_refusal([&] { (void)c.all_to_all({}, {}); }, {"0 blocks"});
    expect_refusal([&] { (void)c.all_reduce(memory.data(), DType::bf16, 1, Reduce::sum); }, {"bf16", "f32 or f64"});
    expect_refusal([&] { (void)c.all_reduce(memory.data(), DType::f32, -1, Reduce::sum); }, {"-1 numbers"});
    EXPECT_EQ(c.traffic(), Traffic{});
    float one = 1;  // nobody lost count
    c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
    EXPECT_EQ(one, 3);
  });
  const auto nothing = [](Communicator&) {};
  expect_refusal([&] { run_ranks(0, nothing); }, {"0 ranks"});
  expect_refusal([&] { run_ranks(2, nothing, {.time_limit = 0}); }, {"time limit of 0"});
  expect_refusal([&] { run_ranks(2, nothing, {.time_limit = std::nan("")}); }, {"time limit"});
  for (const double bad : {1e-300, 1e300, std::numeric_limits<double>::infinity(), -1.0})
    expect_refusal([&] { run_ranks(2, nothing, {.time_limit = bad}); }, {"a time limit of "});
  expect_refusal([&] { run_ranks(Index{1} << 40, nothing); }, {"1099511627776 ranks"});
  expect_refusal([&] { run_ranks(2, nothing, {.bandwidth = -1}); }, {"-1 bytes per second"});
  for (const double bad : {1e-300, 0.5, 1e300, std::numeric_limits<double>::infinity(), std::nan("")})
    expect_refusal([&] { run_ranks(2, nothing, {.bandwidth = bad}); }, {"bytes per second"});
  for (const double bad : {-1.0, 1e300, std::numeric_limits<double>::infinity(), std::nan("")})
    expect_refusal([&] { run_ranks(2, nothing, {.latency = bad}); }, {"seconds a call"});
}

}  // namespace
}  // namespace weft
