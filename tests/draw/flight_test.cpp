// Where ranks parted, from their last calls.
#include "draw/flight/flight.h"

#include <gtest/gtest.h>

namespace weft::draw {
namespace {

FlightCall call(Index number, const std::string& pass, Index step, const std::string& state) {
  return {.number = number,
          .kind = "exchange",
          .pass = pass,
          .step = step,
          .state = state,
          .begun = 10.0 + 1.0 * static_cast<double>(number),
          .seconds = 0.5};
}

Flight four() {
  Flight flight{.comm = "threads", .ranks = 4};
  for (Index rank = 0; rank < 4; ++rank)
    flight.recorded.push_back(
        {.rank = rank, .time = 20, .calls = {call(6, "forward", 1, "done"), call(7, "forward", 2, "done")}});
  return flight;
}

TEST(Flight, RanksThatAgreeHaveNotParted) {
  const Parting all = parting(four());
  EXPECT_EQ(all.call, -1);
  EXPECT_EQ(all.words, std::vector<std::string>{"All records agree up to call #7"});
}

TEST(Flight, ARankThatDidNotCome) {
  Flight flight = four();
  for (const std::size_t rank : {0, 1, 3}) flight.recorded[rank].calls.push_back(call(8, "backward", 1, "waiting"));
  const Parting parted = parting(flight);
  EXPECT_EQ(parted.call, 8);
  EXPECT_EQ(parted.words,
            (std::vector<std::string>{
                "They parted at call #8, exchange of backward step 1: ranks 0, 1, 3 have made it",
                "rank 2 has not: its last is #7 exchange of forward step 2, done 2.5 s before this was written"}));
}

TEST(Flight, ARankThatMadeAnotherCall) {
  Flight flight = four();
  flight.recorded[1].calls[1] = call(7, "backward", 0, "waiting");
  flight.recorded.pop_back();
  const Parting parted = parting(flight);
  EXPECT_EQ(parted.call, 7);
  EXPECT_EQ(parted.words,
            (std::vector<std::string>{"They parted at call #7, exchange of forward step 2: ranks 0, 2 have made it",
                                      "rank 1 made another one: exchange of backward step 0",
                                      "There is no record of rank 3: look there first, or give its file too"}));
}

// A record holds 64 calls: what one rank has forgotten already is no difference.
TEST(Flight, OldCallsOfOneRankAreNotCompared) {
  Flight flight = four();
  flight.recorded[0].calls.insert(flight.recorded[0].calls.begin(), call(5, "forward", 0, "done"));
  EXPECT_EQ(parting(flight).call, -1);
}

}  // namespace
}  // namespace weft::draw
