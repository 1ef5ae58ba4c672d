// Ranks whose memory is a GPU's: the same contract as on the CPU, in the order of streams. As threads that see each
// other's memory, and over a transport that moves memory of the host alone.
#include "weft/communicator.h"

#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "comm/plain_ranks.h"
#include "device/device.h"
#include "index.h"
#include "refusal.h"

namespace weft {
namespace {

Place here() { return {.kind = DeviceKind::cuda, .device = 0, .stream = device::thread_stream()}; }

// Floats on the GPU.
class Numbers {
 public:
  explicit Numbers(const std::vector<float>& values) : memory_(device::make_memory(here())), size_(values.size()) {
    data_ = static_cast<float*>(memory_->allocate(bytes()));
    device::to_device(here(), data_, values.data(), static_cast<Index>(bytes()));
  }
  explicit Numbers(std::size_t size) : Numbers(std::vector<float>(size, -1.0F)) {}
  ~Numbers() { memory_->deallocate(data_, bytes()); }
  Numbers(const Numbers&) = delete;

  std::vector<float> values() const {
    std::vector<float> out(size_);
    const device::HostCopy copy{out.data(), data_, static_cast<Index>(bytes())};
    device::to_host(here(), {&copy, 1});
    return out;
  }
  Block block(Index first, Index count) const { return {.data = data_ + first, .rows = 1, .bytes = count * 4}; }
  // Every `stride`-th group of `count`.
  Block strided(Index first, Index rows, Index count, Index stride) const {
    return {.data = data_ + first, .rows = rows, .parts = 1, .bytes = count * 4, .row_stride = stride * 4};
  }

 private:
  std::size_t bytes() const { return size_ * sizeof(float); }
  std::unique_ptr<device::Memory> memory_;
  std::size_t size_;
  float* data_ = nullptr;
};

enum class Ranks { threads, staged };

class DeviceCommunicator : public testing::TestWithParam<Ranks> {
 protected:
  void SetUp() override {
    if (device::count() == 0) GTEST_SKIP() << "no GPU";
  }
  static void run(Index count, const std::function<void(Communicator&)>& body, const ThreadRanks& how = {}) {
    const auto over = [&](Communicator& threads) {
      test::PlainRanks plain(threads);
      body(GetParam() == Ranks::staged ? static_cast<Communicator&>(plain) : threads);
    };
    run_ranks(count, over, how);
  }
};
INSTANTIATE_TEST_SUITE_P(Over, DeviceCommunicator, testing::Values(Ranks::threads, Ranks::staged),
                         [](const auto& at) { return at.param == Ranks::threads ? "threads" : "staged"; });

TEST_P(DeviceCommunicator, GathersFromAllRanks) {
  run(4, [](Communicator& ranks) {
    const auto on = ranks.on(here());
    on->use(here().stream);
    for (Index count : {1, 3, 4, 1000}) {
      const Numbers mine(std::vector<float>(at(count), static_cast<float>(ranks.rank())));
      const Numbers all(at(4 * count));
      std::vector<Block> places;
      for (Index r = 0; r < 4; ++r) places.push_back(all.block(r * count, count));
      on->all_gather(mine.block(0, count), places).wait();
      const std::vector<float> got = all.values();
      for (Index i = 0; i < 4 * count; ++i) ASSERT_EQ(got[at(i)], static_cast<float>(i / count));
    }
    EXPECT_EQ(ranks.traffic().bytes_received, 3 * 4 * (1 + 3 + 4 + 1000));
  });
}

TEST_P(DeviceCommunicator, SumsInTheOrderOfRanks) {
  run(3, [](Communicator& ranks) {
    const auto on = ranks.on(here());
    on->use(here().stream);
    std::vector<float> values(3 * 5);
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<float>(i + 1) * (1.0F + static_cast<float>(ranks.rank()));
    const Numbers parts(values), mine(5);
    std::vector<Block> blocks;
    for (Index r = 0; r < 3; ++r) blocks.push_back(parts.block(r * 5, 5));
    on->reduce_scatter(blocks, mine.block(0, 5)).wait();
    const std::vector<float> got = mine.values();
    for (std::size_t i = 0; i < 5; ++i) EXPECT_EQ(got[i], static_cast<float>(at(ranks.rank()) * 5 + i + 1) * 6.0F);
  });
}

// Numbers of which sums depend on the order.
std::vector<float> uneven(Index rank, Index size) {
  std::vector<float> values;
  for (Index i = 0; i < size; ++i)
    values.push_back((rank % 3 == 0 ? 1e8F : 1.0F) / static_cast<float>(7 * rank + i % 1000 + 3) *
                     (rank % 2 == 0 ? 1 : -1));
  return values;
}

// Into rows side by side and apart, from more ranks than one launch takes, onto what is there or over it.
TEST_P(DeviceCommunicator, AddsAtOnceInTheOrderOfTheList) {
  constexpr Index kRanks = 11, kRows = 40, kWidth = 6, kSize = kRows * kWidth;
  run(kRanks, [](Communicator& ranks) {
    const auto on = ranks.on(here());
    on->use(here().stream);
    for (const Index apart : {kWidth, kWidth + 2, kWidth + 3}) {
      for (const bool replace : {false, true}) {
        const Numbers mine(uneven(ranks.rank(), kSize)), to(uneven(100, kRows * apart));
        std::vector<Message> sends, receives;
        std::vector<float> want = uneven(100, kRows * apart);
        for (Index i = 0; i < kRanks; ++i) {
          sends.push_back({i, {mine.block(0, kSize)}});
          const Index peer = (i * 3 + ranks.rank()) % kRanks;  // the order of the list is not that of ranks
          const bool first = replace && i == 0;
          receives.push_back({.peer = peer,
                              .blocks = {to.strided(0, kRows, kWidth, apart)},
                              .combine = first ? Message::Combine::replace : Message::Combine::add,
                              .at_once = true});
          const std::vector<float> part = uneven(peer, kSize);
          for (Index n = 0; n < kSize; ++n) {
            float& sum = want[at(n / kWidth * apart + n % kWidth)];
            sum = first ? part[at(n)] : sum + part[at(n)];
          }
        }
        on->exchange(std::move(sends), std::move(receives)).wait();
        EXPECT_EQ(to.values(), want) << "rows " << apart << " apart" << (replace ? ", over what is there" : "");
      }
    }
  });
}

// A rank comes late. Who has sent does not wait for it, and changes what it sent.
TEST_P(DeviceCommunicator, AddsAtOnceWhatLateRanksSend) {
  constexpr Index kRanks = 4, kSize = 3000;
  for (const Index late : {0, 1, 2, 3}) {
    run(kRanks, [&](Communicator& ranks) {
      const auto on = ranks.on(here());
      on->use(here().stream);
      const Numbers mine(uneven(ranks.rank(), kSize)), other(std::vector<float>(kSize, 1e20F)), to(uneven(9, kSize));
      const std::vector<Index> order = {3, 0, 2};
      std::vector<Message> receives;
      std::vector<float> want = uneven(9, kSize);
      for (const Index peer : order) {
        receives.push_back(
            {.peer = peer, .blocks = {to.block(0, kSize)}, .combine = Message::Combine::add, .at_once = true});
        const std::vector<float> part = uneven(peer, kSize);
        for (std::size_t i = 0; i < part.size(); ++i) want[i] += part[i];
      }
      if (ranks.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(30));
      if (ranks.rank() == 1) {
        on->exchange({}, std::move(receives)).wait();
        EXPECT_EQ(to.values(), want) << "rank " << late << " was late";
      } else {
        on->exchange({{1, {mine.block(0, kSize)}}}, {}).wait();
        device::copy(here(), std::vector{other.block(0, kSize)}, std::vector{mine.block(0, kSize)});
        device::synchronize(here());
      }
    });
  }
}

TEST_P(DeviceCommunicator, CutsBytesIntoOtherBlocks) {
  run(2, [](Communicator& ranks) {
    const auto on = ranks.on(here());
    on->use(here().stream);
    std::vector<float> values(24);
    std::iota(values.begin(), values.end(), static_cast<float>(100 * ranks.rank()));
    const Numbers from(values), to(24);
    const Index peer = 1 - ranks.rank();
    // Six rows of two, four apart, become twelve in a row: and back into rows of three.
    on->exchange({{peer, {from.strided(0, 6, 2, 4)}}}, {{peer, {to.strided(1, 4, 3, 5)}}}).wait();
    const std::vector<float> got = to.values();
    for (Index i = 0; i < 12; ++i) {
      const float want = static_cast<float>(100 * peer + i / 2 * 4 + i % 2);
      EXPECT_EQ(got[at(1 + i / 3 * 5 + i % 3)], want) << i;
    }
    EXPECT_EQ(got[0], -1.0F);
    EXPECT_EQ(got[4], -1.0F);
  });
}

// Many calls under way, waited for in different orders, each reusing what the one before sent.
TEST_P(DeviceCommunicator, WaitsInAnyOrder) {
  run(4, [](Communicator& ranks) {
    const auto on = ranks.on(here());
    on->use(here().stream);
    constexpr Index kSize = 4096;
    for (int round = 0; round < 50; ++round) {
      const float value = static_cast<float>(ranks.rank() + 10 * round);
      const Numbers a(std::vector<float>(kSize, value)), b(std::vector<float>(kSize, value + 1000)), to_a(kSize),
          to_b(kSize);
      const Index next = (ranks.rank() + 1) % 4, last = (ranks.rank() + 3) % 4;
      Request first = on->send_receive(next, a.block(0, kSize), last, to_a.block(0, kSize));
      Request second = on->send_receive(last, b.block(0, kSize), next, to_b.block(0, kSize));
      if (ranks.rank() % 2 == 0) {
        first.wait();
        second.wait();
      } else {
        second.wait();
        first.wait();
      }
      const std::vector<float> got_a = to_a.values(), got_b = to_b.values();
      ASSERT_EQ(got_a[0], static_cast<float>(last + 10 * round));
      ASSERT_EQ(got_a[kSize - 1], static_cast<float>(last + 10 * round));
      ASSERT_EQ(got_b[kSize / 2], static_cast<float>(next + 10 * round + 1000));
    }
  });
}

TEST_P(DeviceCommunicator, NamesMessagesThatDoNotFit) {
  const auto mismatch = [](Communicator& ranks) {
    const auto on = ranks.on(here());
    const Numbers from(8), to(8);
    const Index peer = 1 - ranks.rank();
    on->send_receive(peer, from.block(0, ranks.rank() == 0 ? 4 : 8), peer, to.block(0, 8)).wait();
  };
  expect_refusal([&] { run(2, mismatch, {.time_limit = 10}); }, {"rank 0 sends 16 bytes to rank 1, which receives 32"});
}

TEST_P(DeviceCommunicator, EndsWhenARankFails) {
  const auto one_fails = [](Communicator& ranks) {
    const auto on = ranks.on(here());
    if (ranks.rank() == 1) throw Error("broken on purpose", "mend it");
    const Numbers from(8), to(8);
    on->send_receive(1, from.block(0, 8), 1, to.block(0, 8)).wait();
  };
  expect_refusal([&] { run(2, one_fails, {.time_limit = 10}); }, {"broken on purpose"});
}

}  // namespace
}  // namespace weft
