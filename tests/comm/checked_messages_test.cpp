// Messages of checked ranks carry what they belong to: each part of it that differs is told by the receiver.
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

}  // namespace
}  // namespace weft::test
