// Communicators: what is moved against naive loops, what is counted, and how calls that cannot end do end.
#include "weft/communicator.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <sys/resource.h>

#include "letters.h"
#include "refusal.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define WEFT_TEST_SANITIZED
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define WEFT_TEST_SANITIZED
#endif
#endif

namespace weft {
namespace {

using namespace test;
using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }
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
  EXPECT_FALSE(none.under_way());
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
  expect_refusal([&] { run_ranks(2, nothing, {.bandwidth = -1}); }, {"-1 bytes per second"});
}

// ---- sides that do not agree

// What each rank's wait() throws, if it does.
std::vector<std::optional<std::string>> errors(Index ranks, const std::function<Request(Communicator&)>& call) {
  std::vector<std::optional<std::string>> result(at(ranks));
  run(ranks, [&](Communicator& c) {
    Request request = call(c);
    try {
      request.wait();
    } catch (const Error& e) {
      result[at(c.rank())] = e.what();
    }
  });
  return result;
}

void expect_text(const std::optional<std::string>& error, std::initializer_list<std::string> parts) {
  ASSERT_TRUE(error.has_value());
  for (const std::string& part : parts) EXPECT_NE(error->find(part), std::string::npos) << *error;
}

TEST(Disagreement, Sizes) {
  std::vector<float> memory(64);
  const auto result = errors(3, [&](Communicator& c) {
    std::vector<Message> sends, receives;
    if (c.rank() == 0) sends.push_back({2, {{memory.data(), 1, 1, 16}}});
    if (c.rank() == 2) receives.push_back({0, {{memory.data() + 32, 1, 1, 12}}});
    return c.exchange(std::move(sends), std::move(receives));
  });
  expect_text(result[2], {"call 0", "rank 0 sends 16 bytes to rank 2", "receives 12"});
  expect_text(result[0], {"rank 2", "gave up"});
  EXPECT_FALSE(result[1].has_value());
}

TEST(Disagreement, MissingMessage) {
  std::vector<float> memory(64);
  const auto result = errors(2, [&](Communicator& c) {
    std::vector<Message> sends, receives;
    if (c.rank() == 0) sends.push_back({1, {{memory.data(), 1, 1, 16}}});
    if (c.rank() == 1) receives.assign(2, {0, {{memory.data() + 32, 1, 1, 16}}});
    return c.exchange(std::move(sends), std::move(receives));
  });
  expect_text(result[1], {"call 0", "rank 1 receives more messages from rank 0 than the 1", "16 bytes"});
  EXPECT_FALSE(result[0].has_value());
}

TEST(Disagreement, UnwantedMessages) {
  std::vector<float> memory(64);
  const auto result = errors(3, [&](Communicator& c) {  // 0 and 1 to each other, 2 to itself
    return c.exchange({{c.rank() == 2 ? 2 : 1 - c.rank(), {{memory.data(), 1, 1, 16}}}}, {});
  });
  expect_text(result[0], {"rank 0 sends 16 bytes to rank 1", "does not receive"});
  expect_text(result[1], {"rank 1 sends 16 bytes to rank 0", "does not receive"});
  expect_text(result[2], {"rank 2 sends 16 bytes to rank 2", "does not receive"});
}

TEST(Disagreement, UnwantedAfterOthers) {
  std::vector<float> memory(64);
  const auto result = errors(2, [&](Communicator& c) {
    if (c.rank() == 0) return c.exchange(std::vector<Message>(2, {1, {{memory.data(), 1, 1, 16}}}), {});
    return c.exchange({}, {{0, {{memory.data() + 32, 1, 1, 16}}}});
  });
  expect_text(result[0], {"rank 0 sends 16 bytes to rank 1", "does not receive"});
  EXPECT_FALSE(result[1].has_value());
}

TEST(Disagreement, AddOfWhatIsNotF32) {
  std::vector<float> memory(64);
  const auto result = errors(2, [&](Communicator& c) {
    if (c.rank() == 0) return c.exchange({{1, {{memory.data(), 2, 1, 6, 8, 0}}}}, {});
    return c.exchange({}, {{0, {{memory.data() + 32, 1, 1, 12}}, Combine::add}});
  });
  expect_text(result[1], {"rank 1 adds what rank 0 sends", "f32"});
}

TEST(Disagreement, NamedThroughRunRanks) {
  std::vector<float> memory(64);
  expect_refusal(
      [&] {
        run(4, [&](Communicator& c) {
          const std::unique_ptr<Communicator> pair = c.split(c.rank() / 2, 0);
          std::vector<Block> all(2, {memory.data(), 1, 1, 8});
          if (c.rank() == 3) all[0].bytes = 4;
          std::vector<float> mine(2);
          std::vector<float> from(4);
          all[0].data = from.data(), all[1].data = from.data() + 2;
          pair->all_gather(block(mine), all).wait();
        });
      },
      {"rank 3: call 0", "rank 0 of a split (2 of all) sends 8 bytes", "receives 4"});
}

// ---- ranks that fail

struct Quick {  // nothing may wait for a time limit
  Clock::time_point start = Clock::now();
  ~Quick() { EXPECT_LT(seconds_since(start), 10); }
};

TEST(Failure, OfOneEndsAll) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    const Quick quick;
    std::atomic<int> told = 0;
    const auto body = [&](Communicator& c) {
      std::vector<float> memory(1000);
      std::vector<std::vector<float>> all(5, std::vector<float>(1000));
      for (int step = 0;; ++step) {
        Request request = c.all_gather(block(memory), blocks(all));
        if (c.rank() == 2 && step == repeat % 5) throw Error("boom", "be calm");
        try {
          request.wait();
        } catch (const Error& e) {
          if (std::string(e.what()).find("rank 2 failed: boom; be calm") != std::string::npos) ++told;
          throw;
        }
      }
    };
    expect_refusal([&] { run(5, body); }, {"rank 2: boom", "be calm"});
    EXPECT_EQ(told, 4);
  }
}

TEST(Failure, BeforeAnyCall) {
  const Quick quick;
  expect_refusal(
      [] {
        run(3, [](Communicator& c) {
          if (c.rank() == 1) throw Error("early", "later");
          (void)c.split(0, 0);
        });
      },
      {"rank 1: early"});
}

TEST(Failure, OtherExceptionsStayWhatTheyAre) {
  const auto fail = [](auto exception) {
    run(3, [&](Communicator& c) {
      float one = 1;
      if (c.rank() == 1) throw exception;
      c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
    });
  };
  EXPECT_THROW(fail(std::out_of_range("far")), std::out_of_range);
  EXPECT_THROW(fail(42), int);
  try {
    fail(std::length_error("long"));
  } catch (const std::length_error& e) {
    EXPECT_STREQ(e.what(), "long");
  }
}

TEST(Failure, LeavingEarly) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    const Quick quick;
    std::atomic<int> told = 0;
    const auto body = [&](Communicator& c) {
      if (c.rank() == 1 && repeat % 2 == 0) return;
      float one = 1;
      try {
        c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
        if (c.rank() == 1) return;
        c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
      } catch (const Error& e) {  // who is told last may learn it from one who was told before
        if (std::string(e.what()).find("rank 1 has left") != std::string::npos) ++told;
        throw;
      }
    };
    expect_refusal([&] { run(4, body); }, {"rank 1 has left"});
    EXPECT_EQ(told, 3);
  }
}

// Rank 1 comes only after the others have given it up.
void miss_time_limit(double time_limit, std::initializer_list<std::string> parts) {
  const Quick quick;
  std::atomic<int> gave_up = 0;
  const auto body = [&](Communicator& c) {
    float one = 1;
    while (c.rank() == 1 && gave_up < 3) sleep(0.001);
    try {
      c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
    } catch (const Error&) {
      ++gave_up;
      throw;
    }
  };
  expect_refusal([&] { run(4, body, {.time_limit = time_limit}); }, parts);
}

TEST(Failure, TimeLimit) {
  for (int repeat = 0; repeat < 50; ++repeat) miss_time_limit(0.01, {"waited 0.01 seconds in call 0 for rank "});
  miss_time_limit(1, {"waited 1 seconds in call 0 for rank 1;"});  // all others come within a second
}

TEST(Failure, InOneGroupEndsTheOthers) {
  const Quick quick;
  expect_refusal(
      [] {
        run(4, [](Communicator& c) {
          const std::unique_ptr<Communicator> pair = c.split(c.rank() / 2, 0);
          float one = 1;
          if (c.rank() == 3) throw Error("boom", "be calm");
          for (int i = 0; c.rank() == 2 || i < 100; ++i) pair->all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
          c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();
        });
      },
      {"rank 3: boom"});
}

// The buffers of a rank that fails go as soon as it has unwound, and others may be copying from them just then.
TEST(Failure, WhileOthersCopyFromIt) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    const Quick quick;
    std::atomic<int> others_came = 0;
    const auto body = [&](Communicator& c) {
      const Index rows = 50000;  // with gaps, so that copies take long and a sanitizer looks at every row
      std::vector<float> memory(at(5 * rows), 1.0f), into(at(4 * rows));
      std::vector<Message> sends, receives;
      for (Index peer = 1; peer < 4 && c.rank() == 0; ++peer) {
        sends.push_back({peer, {{memory.data(), rows, 1, 16, 20, 0}}});
      }
      if (c.rank() != 0) receives.push_back({0, {block(into)}});
      Request request = c.exchange(std::move(sends), std::move(receives));
      if (c.rank() == 0) {
        while (others_came < 1 + repeat % 3) std::this_thread::yield();
        sleep(repeat * 5e-6);
        throw std::runtime_error("gone");
      }
      ++others_came;
      request.wait();
    };
    EXPECT_THROW(run(4, body), std::runtime_error);
  }
}

TEST(Failure, CaughtByItsRank) {
  const Quick quick;
  run(2, [](Communicator& c) {
    float one = 1;
    try {
      Request request = c.all_reduce(&one, DType::f32, 1, Reduce::sum);
      if (c.rank() == 0) throw std::runtime_error("caught");
      request.wait();
    } catch (const Error& e) {
      EXPECT_EQ(c.rank(), 1);
      EXPECT_NE(std::string(e.what()).find("rank 0 gave up call 0"), std::string::npos) << e.what();
    } catch (const std::runtime_error&) {
      EXPECT_EQ(c.rank(), 0);
    }
    one = 1;
    c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();  // both go on
    EXPECT_EQ(one, 2);
  });
}

TEST(Failure, RequestThatOutlivesItsRank) {
  std::vector<float> memory(2, 1);
  std::vector<Request> kept(2);
  run(2,
      [&](Communicator& c) { kept[at(c.rank())] = c.all_reduce(&memory[at(c.rank())], DType::f32, 1, Reduce::sum); });
  expect_refusal([&] { kept[0].wait(); }, {"rank 1 has left"});
}

#ifndef WEFT_TEST_SANITIZED  // they reserve more memory than any limit
TEST(FailureDeathTest, ThreadsThatCannotBeStarted) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto starve = [] {
    Index pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const rlimit limit{static_cast<rlim_t>(pages * 4096 + (Index{96} << 20)), RLIM_INFINITY};
    if (setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(3);
    bool ran = false;
    try {
      run_ranks(500, [&](Communicator&) { ran = true; });
    } catch (const Error& e) {
      std::_Exit(!ran && std::string(e.what()).find("of 500 could not be started") != std::string::npos ? 0 : 1);
    }
    std::_Exit(2);
  };
  EXPECT_EXIT(starve(), testing::ExitedWithCode(0), "");
}
#endif

// ---- the slowed link

double time_of(Communicator& c, Index calls, Index bytes, double work) {
  std::vector<std::vector<char>> sent(at(calls), std::vector<char>(at(bytes))), received = sent;
  float one = 1;
  c.all_reduce(&one, DType::f32, 1, Reduce::sum).wait();  // start together
  const Clock::time_point start = Clock::now();
  std::vector<Request> requests;
  for (Index i = 0; i < calls; ++i) {
    requests.push_back(c.send_receive((c.rank() + 1) % c.ranks(), block(sent[at(i)]),
                                      (c.rank() + c.ranks() - 1) % c.ranks(), block(received[at(i)])));
  }
  if (work > 0) sleep(work);
  for (Request& request : requests) request.wait();
  return seconds_since(start);
}

TEST(SlowLink, TakesBytesPerBandwidth) {
  const ThreadRanks how{.time_limit = 60, .bandwidth = 1e6};
  run(3, [](Communicator& c) { EXPECT_GE(time_of(c, 1, 100000, 0), 0.1); }, how);
  run(3, [](Communicator& c) { EXPECT_GE(time_of(c, 2, 100000, 0), 0.2); }, how);  // one link
}

TEST(SlowLink, LatencyIsPerCall) {
  run(2, [](Communicator& c) { EXPECT_GE(time_of(c, 3, 1, 0), 0.15); }, {.time_limit = 60, .latency = 0.05});
}

TEST(SlowLink, RunsUnderWork) {
  run(2, [](Communicator& c) { EXPECT_LT(time_of(c, 1, 600000, 0.6), 1.1); }, {.time_limit = 60, .bandwidth = 1e6});
}

TEST(SlowLink, IsSharedBySplits) {
  const auto body = [](Communicator& c) {
    const std::unique_ptr<Communicator> other = c.split(0, 0);
    std::vector<char> a(100000), b(100000), x(100000), y(100000);
    const Clock::time_point start = Clock::now();
    Request first = c.send_receive(1 - c.rank(), block(a), 1 - c.rank(), block(x));
    Request second = other->send_receive(1 - c.rank(), block(b), 1 - c.rank(), block(y));
    second.wait();
    first.wait();
    EXPECT_GE(seconds_since(start), 0.2);
  };
  run(2, body, {.time_limit = 60, .bandwidth = 1e6});
}

TEST(SlowLink, SelfIsFree) {
  const auto body = [](Communicator& c) {
    std::vector<char> a(100000), x(100000);
    c.send_receive(c.rank(), block(a), c.rank(), block(x)).wait();
  };
  const Quick quick;
  run(2, body, {.time_limit = 60, .bandwidth = 100, .latency = 100});
}

TEST(SlowLink, FailureEndsIt) {
  const Quick quick;
  const auto body = [](Communicator& c) {
    std::vector<char> a(100000);
    if (c.rank() == 0) c.exchange({}, {{1, {block(a)}}}).wait();  // a day on this link
    if (c.rank() == 1) {
      c.exchange({{0, {block(a)}}}, {}).wait();
      sleep(0.05);
      throw Error("boom", "be calm");
    }
  };
  expect_refusal([&] { run(2, body, {.time_limit = 60, .bandwidth = 1}); }, {"rank 1: boom"});
}

}  // namespace
}  // namespace weft
