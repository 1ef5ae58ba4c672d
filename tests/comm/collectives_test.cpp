// Collectives that a transport makes itself, against those made of messages; and the record of the last calls.
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "comm/flight.h"
#include "comm/letters.h"
#include "comm/plain_ranks.h"
#include "refusal.h"
#include "weft/communicator.h"

namespace weft::test {
namespace {

// Ranks whose transport has collectives: those of another communicator, which counts how often they are asked for.
class WithCollectives final : public PlainRanks {
 public:
  using PlainRanks::PlainRanks;
  std::string_view name() const override { return "with collectives"; }
  bool has_collectives() const override { return true; }
  Index gathers = 0, sums = 0, swaps = 0;

 private:
  std::unique_ptr<Request::Pending> start_all_gather(const Block& mine, std::span<const Block> all) override {
    ++gathers;
    return forwarded(inner().all_gather(mine, all));
  }
  std::unique_ptr<Request::Pending> start_reduce_scatter(std::span<const Block> parts, const Block& mine) override {
    ++sums;
    return forwarded(inner().reduce_scatter(parts, mine));
  }
  std::unique_ptr<Request::Pending> start_all_to_all(std::span<const Block>, std::span<const Block>) override {
    ++swaps;
    return nullptr;
  }
};

TEST(Collectives, EqualBlocksGoToTheTransport) {
  run_ranks(3, [](Communicator& threads) {
    WithCollectives c(threads);
    std::vector<float> mine = values(5, 1, c.rank());
    std::vector<std::vector<float>> all(3, std::vector<float>(5)), parts;
    c.all_gather(block(mine), blocks(all)).wait();
    for (Index r = 0; r < 3; ++r) EXPECT_EQ(all[at(r)], values(5, 1, r));
    for (Index r = 0; r < 3; ++r) parts.push_back(values(5, 2, c.rank(), r));
    c.reduce_scatter(blocks(parts), block(mine)).wait();
    EXPECT_FLOAT_EQ(mine[4], value(2, 0, c.rank(), 4) + value(2, 1, c.rank(), 4) + value(2, 2, c.rank(), 4));
    EXPECT_EQ(c.gathers, 1);
    EXPECT_EQ(c.sums, 1);
    EXPECT_EQ(c.exchanges, 0);
    // Counted as the messages that they stand for.
    EXPECT_EQ(c.traffic(),
              (Traffic{.bytes_sent = 80, .bytes_received = 80, .messages_sent = 4, .messages_received = 4}));
    c.all_to_all(blocks(parts), blocks(all)).wait();  // the transport has none: messages
    EXPECT_EQ(all[1], values(5, 2, 1, c.rank()));
    EXPECT_EQ(c.swaps, 1);
    EXPECT_EQ(c.exchanges, 1);
    EXPECT_EQ(c.traffic().messages_sent, 6);
  });
}

TEST(Collectives, OtherBlocksAreMessages) {
  run_ranks(2, [](Communicator& threads) {
    WithCollectives c(threads);
    std::vector<float> mine = values(3 + c.rank(), 1, c.rank()), first(3), second(4);
    c.all_gather(block(mine), std::vector{block(first), block(second)}).wait();
    EXPECT_EQ(second, values(4, 1, 1));
    std::vector<double> wide(2, 1.5), sum(2);
    c.reduce_scatter(std::vector{block(wide), block(wide)}, block(sum), DType::f64).wait();
    EXPECT_EQ(sum[1], 3.0);
    EXPECT_EQ(c.gathers + c.sums, 0);
    EXPECT_EQ(c.exchanges, 2);
    c.all_gather({}, std::vector<Block>(2)).wait();  // nothing to gather
    EXPECT_EQ(c.gathers, 0);
    expect_refusal([&] { c.all_gather({nullptr, 1, 1, 8}, std::vector<Block>(2, {nullptr, 1, 1, 8})); },
                   {"null pointer"});
  });
}

TEST(FlightRecord, NamesCallsStepsPeersAndBytes) {
  run_ranks(3, [](Communicator& c) {
    const Index next = (c.rank() + 1) % 3, last = (c.rank() + 2) % 3;
    std::vector<float> from(4), to(4);
    EXPECT_EQ(c.flight_record(), "");
    Request request;
    {
      const detail::PassLabel pass("forward");
      detail::label_step(2);
      request = c.send_receive(next, block(from), last, block(to));
    }
    expect_parts(c.flight_record(), {"#0 exchange of forward step 2, 16 bytes to " + std::to_string(next),
                                     "16 bytes from " + std::to_string(last), "posted for"});
    request.wait();
    expect_parts(c.flight_record(), {"done after"});
    for (int i = 0; i < 70; ++i) c.send_receive(next, block(from), last, block(to)).wait();
    const std::string record = c.flight_record();
    EXPECT_EQ(std::count(record.begin(), record.end(), '\n'), 64);
    EXPECT_EQ(record.find("#6 "), std::string::npos);
    expect_parts(record, {"#7 exchange, ", "#70 exchange, "});
    const std::unique_ptr<Communicator> part = c.split(0, 0);
    EXPECT_EQ(part->flight_record(), "");  // a record of its own
  });
}

TEST(FlightRecord, EndsTheErrorsOfTimeLimitsAndLostPeers) {
  expect_refusal(
      [] {
        run_ranks(2,
                  [](Communicator& c) {
                    double one = 1;
                    const detail::PassLabel pass("backward");
                    detail::label_step(1);
                    if (c.rank() == 0) c.all_reduce(&one, DType::f64, 1, Reduce::sum).wait();
                    if (c.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
                  },
                  {.time_limit = 0.1});
      },
      {"rank 0 waited 0.1 seconds in call 0 for rank 1", "last calls: #0 exchange of backward step 1, 8 bytes to 1",
       "waiting for 0.1"});
  run_ranks(2, [](Communicator& c) {
    double one = 1;
    if (c.rank() == 1) return;
    try {
      c.all_reduce(&one, DType::f64, 1, Reduce::sum).wait();
      ADD_FAILURE() << "a rank that left was not missed";
    } catch (const PeerError& e) {
      EXPECT_TRUE(e.consequence());
      EXPECT_TRUE(e.has_calls());
      expect_parts(e.what(), {"rank 1 has left", "last calls: #0 exchange"});
    }
    expect_parts(c.flight_record(), {"failed after"});
  });
}

}  // namespace
}  // namespace weft::test
