// The law on random problems, one test a layout. A failure is shrunk by rapidcheck and printed as a command.
#include "check/law.h"

#include <cstdlib>
#include <iostream>
#include <map>

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "check/cases/random_case.h"

namespace weft::check {
namespace {

// Each choice is a rapidcheck generator of its own, so that every one of them shrinks toward its low end.
class ShrinkingChoices : public Choices {
 public:
  Index pick(Index low, Index high) override {
    return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<Index>(low, high + 1));
  }
};

const std::vector<std::string> kMasks = {"full",    "causal",         "bottom_right", "window", "window_right",
                                         "chunked", "chunked_window", "slices",       "tree"};

int problems() {
  const char* wanted = std::getenv("WEFT_LAW_PROBLEMS");
  return wanted ? std::atoi(wanted) : 1500;
}

void check_layout(LayoutKind layout) {
  // rapidcheck reads its settings once, from here only; an outer RC_PARAMS (a seed, a reproduction) adds to ours.
  const char* outer = std::getenv("RC_PARAMS");
  const std::string params = "max_success=" + std::to_string(problems()) + " " + (outer ? outer : "");
  setenv("RC_PARAMS", params.c_str(), 1);

  std::map<std::string, int> nontrivial;
  int total = 0;
  const bool holds = rc::check("the law", [&] {
    ShrinkingChoices choices;
    const Case c = random_case(choices, layout);
    const LawReport report = check_law(c);
    if (report.violation) RC_FAIL(*report.violation + "\nreproduce: weft verify " + flags(c));
    nontrivial[mask_class(c)] += report.nontrivial;
    ++total;
  });
  ASSERT_TRUE(holds);
  EXPECT_GE(total, problems());
  std::cout << name(layout) << ": " << total << " problems; not trivial, by mask:";
  for (const std::string& mask : kMasks) {
    std::cout << " " << mask << " " << nontrivial[mask];
    EXPECT_GE(nontrivial[mask], problems() / 34) << mask;  // 500 of 17,000 problems
  }
  std::cout << std::endl;
}

TEST(Law, contiguous) { check_layout(LayoutKind::contiguous); }
TEST(Law, dual_chunk) { check_layout(LayoutKind::dual_chunk); }
TEST(Law, zigzag) { check_layout(LayoutKind::zigzag); }
TEST(Law, striped) { check_layout(LayoutKind::striped); }
TEST(Law, balanced) { check_layout(LayoutKind::balanced); }
TEST(Law, placed) { check_layout(LayoutKind::placed); }
TEST(Law, explicit) { check_layout(LayoutKind::explicit_runs); }

}  // namespace
}  // namespace weft::check
