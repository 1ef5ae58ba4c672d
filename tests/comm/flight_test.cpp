// Flight records as files: of all communicators of the process, at the first failure.
#include "weft/flight.h"

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include <gtest/gtest.h>

#include "refusal.h"
#include "weft/communicator.h"

namespace weft::test {
namespace {

std::string contents(const std::string& path) {
  std::ifstream in(path);
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

// A barrier that the last rank does not come to.
void hang() {
  EXPECT_NE(error_of([] {
              run_ranks(3,
                        [](Communicator& c) {
                          double one = 1;
                          c.all_reduce(&one, DType::f64, 1, Reduce::sum).wait();
                          if (c.rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(300));
                          if (c.rank() != 2) c.all_reduce(&one, DType::f64, 1, Reduce::sum).wait();
                        },
                        {.time_limit = 0.1});
            }),
            "");
}

TEST(FlightFile, HoldsAllRanksAtTheFirstFailure) {
  const std::string path = testing::TempDir() + "weft_flight_test.json";
  keep_flight_file({.path = path});
  hang();
  const std::string text = contents(path);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3);
  for (const char* rank : {"\"rank\":0,", "\"rank\":1,", "\"rank\":2,"})
    expect_parts(text, {std::string("{\"weft_flight\":1,") + rank + "\"ranks\":3,\"comm\":\"threads\""});
  expect_parts(text,
               {"\"number\":1,\"kind\":\"exchange\",\"pass\":\"\",\"step\":-1,\"to\":\"", "\"state\":\"failed\""});
  std::filesystem::remove(path);
  hang();
  EXPECT_FALSE(std::filesystem::exists(path)) << "the first failure is what counts";
  keep_flight_file({});
  expect_refusal([] { keep_flight_file({.path = "/no/such/folder/file"}); }, {"/no/such/folder/file"});
}

}  // namespace
}  // namespace weft::test
