// Fingerprints that come in the order of a stream nobody waits for: looked at when they have come, by the calls that
// follow. The stream is a list of flags.
#include "comm/signs_in_flight.h"

#include <gtest/gtest.h>

#include "refusal.h"

namespace weft::test {
namespace {

using detail::CallSign;
using detail::SignedCalls;
using detail::SignsInFlight;

// What lies in the stream behind a call, and what became of it.
struct Fate {
  bool came = false;
  int looked_at = 0;
  bool abandoned = false, ended = false;
};

class Made final : public SignsInFlight::Arriving {
 public:
  Made(Fate& fate, std::string differ) : fate_(fate), differ_(std::move(differ)) {}
  ~Made() override { fate_.ended = true; }
  bool came() override { return fate_.came; }
  std::optional<std::string> disagreement() const override {
    ++fate_.looked_at;
    return differ_.empty() ? std::nullopt : std::optional(differ_);
  }
  void abandon() noexcept override { fate_.abandoned = true; }

 private:
  Fate& fate_;
  std::string differ_;
};

TEST(SignsInFlight, AreLookedAtOnceTheyHaveCome) {
  Fate first, second, third;
  std::string told;
  {
    SignsInFlight signs([&](const std::string& words) { told += words; });
    signs.add(std::make_unique<Made>(first, ""));
    signs.add(std::make_unique<Made>(second, "ranks 0 and 1 differ in the mask"));
    signs.add(std::make_unique<Made>(third, "the same again"));
    signs.check();
    EXPECT_EQ(first.looked_at, 0);
    first.came = true;
    signs.check();
    EXPECT_TRUE(first.ended && first.looked_at == 1 && second.looked_at == 0);
    second.came = true;
    expect_refusal([&] { signs.check(); }, {"ranks 0 and 1 differ in the mask", "give every rank the same problem"});
    EXPECT_EQ(told, "ranks 0 and 1 differ in the mask");
    signs.check();  // once is enough
    EXPECT_TRUE(second.ended && !second.abandoned && third.looked_at == 0);
  }
  EXPECT_TRUE(third.abandoned && third.looked_at == 0);  // the stream may still write there
}

// Where a queue was given up, what an earlier pass has sent may lie in place of what should have come: the transport
// knows, and its error is the one.
TEST(SignsInFlight, TheTransportMayKnowMore) {
  Fate fate{.came = true};
  SignsInFlight signs([](const std::string&) { throw Error("lost rank 2", "see what became of it"); });
  signs.add(std::make_unique<Made>(fate, "rank 2 is in pass 7, a backward"));
  expect_refusal([&] { signs.check(); }, {"lost rank 2"});
  EXPECT_TRUE(fate.ended);
}

// A collective carries the fingerprint of its pass once, whatever messages went before; messages after it carry none.
TEST(SignedCalls, OneCollectiveCarriesThem) {
  CallSign sign;
  sign.parts[CallSign::pass] = 4;
  float x = 0;
  const std::vector<Message> to_next = {{1, {{.data = &x, .rows = 1, .bytes = sizeof x}}}};
  SignedCalls calls(3);
  calls.begin(sign);
  EXPECT_EQ(calls.meet(0, to_next, {}).to, std::vector<Index>{1});
  const detail::SignedPeers all = calls.meet_all();
  EXPECT_EQ(all.to, (std::vector<Index>{0, 1, 2}));
  EXPECT_EQ(all.from, all.to);
  EXPECT_EQ(all.mine, sign);
  EXPECT_TRUE(calls.meet_all().empty());
  EXPECT_TRUE(calls.meet(0, std::vector<Message>{{2, to_next[0].blocks}}, to_next).empty());
  sign.parts[CallSign::pass] = 8;  // the next pass
  calls.begin(sign);
  EXPECT_EQ(calls.meet(0, to_next, to_next).from, std::vector<Index>{1});
  EXPECT_TRUE(calls.meet(0, to_next, to_next).empty());
  EXPECT_EQ(calls.meet_all().to.size(), 3u);
}

}  // namespace
}  // namespace weft::test
