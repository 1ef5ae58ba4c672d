// Messages of checked ranks carry what they belong to: each part of it that differs is told by the receiver.
#include <array>
#include <functional>

#include <gtest/gtest.h>

#include "comm/checked.h"
#include "comm/letters.h"
#include "refusal.h"
#include "weft/communicator.h"

namespace weft::test {
namespace {

// What rank 1 says of a message of rank 0, in the second of two calls; rank 0 does something else before it.
std::string told(const std::function<void(Communicator&)>& before) {
  std::string said;
  run_ranks(2, [&](Communicator& c) {
    const std::unique_ptr<Communicator> checked = make_checked(c);
    std::vector<float> from(4, 1.0F), to(4, 0.0F);
    checked->send_receive(1 - c.rank(), block(from), 1 - c.rank(), block(to)).wait();
    if (c.rank() == 0) before(c);
    Request request =
        checked->exchange(c.rank() == 0 ? std::vector<Message>{{1, {block(from)}}} : std::vector<Message>{},
                          c.rank() == 1 ? std::vector<Message>{{0, {block(to)}}} : std::vector<Message>{});
    const std::string error = error_of([&] { request.wait(); });
    if (c.rank() == 1) said = error;
  });
  return said;
}

TEST(CheckedMessages, OfTheSameCallAreTaken) {
  EXPECT_EQ(told([](Communicator&) {}), "");
}

TEST(CheckedMessages, OfAnotherCallAreRefused) {
  expect_parts(told([](Communicator& c) { ++c.calls().exchanges; }),
               {"call 2: rank 1 received the message of another call from rank 0"});
}

// A message as checked ranks send it: 16 bytes, then what it belongs to.
struct Sealed {
  std::array<float, 4> payload = {1, 2, 3, 4};
  std::uint64_t call = 1, route = 1, size = sizeof(payload), sum = 0;  // from rank 0 to rank 1
};

// What rank 1, which is checked, says of a message that rank 0 has put together by itself.
std::string told_of(const std::function<void(Sealed&)>& spoil) {
  std::string said;
  run_ranks(2, [&](Communicator& c) {
    Sealed sealed;
    const Block payload{.data = sealed.payload.data(), .rows = 1, .bytes = sizeof(sealed.payload)};
    sealed.sum = checksum({&payload, 1});
    spoil(sealed);
    if (c.rank() == 0) {
      const std::string ignored =
          error_of([&] { c.exchange({{1, {{.data = &sealed, .rows = 1, .bytes = sizeof(sealed)}}}}, {}).wait(); });
      return;
    }
    const std::unique_ptr<Communicator> checked = make_checked(c);
    std::vector<float> to(4);
    said = error_of([&] { checked->exchange({}, {{0, {block(to)}}}).wait(); });
    EXPECT_TRUE(!said.empty() || to == (std::vector<float>{1, 2, 3, 4}));
  });
  return said;
}

TEST(CheckedMessages, EachPartOfASealIsCompared) {
  EXPECT_EQ(told_of([](Sealed&) {}), "");
  expect_parts(told_of([](Sealed& s) { ++s.call; }), {"the message of another call from rank 0"});
  expect_parts(told_of([](Sealed& s) { s.route = 2; }), {"a message meant for another rank from rank 0"});
  expect_parts(told_of([](Sealed& s) { s.size -= 4; }), {"a message of another size from rank 0"});
  expect_parts(told_of([](Sealed& s) { s.payload[3] = 5; }), {"other bytes than were sent from rank 0"});
}

}  // namespace
}  // namespace weft::test
