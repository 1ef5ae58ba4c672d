// The checks that check schedules: random cases by all of them, and an oracle that sees one wrong element.
#include "check/by_schedule.h"

#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include "check/answer.h"
#include "check/cases/random_case.h"
#include "index.h"

namespace weft::check {
namespace {

std::vector<ScheduleOptions> ways(const Case& c) {
  std::vector<ScheduleOptions> all;
  for (const ScheduleKind kind : schedule_kinds())
    all.push_back({.kind = kind, .ulysses = std::gcd(c.ranks, Index{2})});
  all.push_back({.key_order = KeyOrder::rank, .head_groups = min_of(c.heads_k, 2)});
  all.push_back({.kind = ScheduleKind::hybrid, .ulysses = c.ranks, .outer = ScheduleKind::all_gather});
  all.push_back({.kind = ScheduleKind::all_to_all, .head_groups = min_of(c.heads_q, 3)});
  all.push_back(
      {.kind = ScheduleKind::hybrid, .head_groups = min_of(c.heads_k, 2), .ulysses = std::gcd(c.ranks, Index{2})});
  return all;
}

// Few enough for sanitizers; `weft verify --random N --schedule all` takes many.
TEST(BySchedule, random_cases) {
  constexpr unsigned long long kCases = 60;
  Index right = 0, refused = 0;
  for (unsigned long long seed = 0; seed < kCases; ++seed) {
    RandomChoices choices(seed);
    const Case c = random_case(choices);
    Oracle oracle(c, executor_arithmetic(c));
    for (const ScheduleOptions& options : ways(c)) {
      const Tried tried = try_schedule(oracle, c, {.schedule = options, .checked = seed % 2 == 1});
      EXPECT_FALSE(tried.failure) << *tried.failure << "\n  weft verify " << flags(c) << " " << flags(options);
      if (tried.report) {
        EXPECT_TRUE(tried.report->ok()) << "weft verify " << flags(c) << " " << flags(options);
      }
      right += tried.report ? 1 : 0;
      refused += tried.refused ? 1 : 0;
    }
  }
  EXPECT_GT(right, 300);
  EXPECT_EQ(refused, 0);  // keys in sequence order of striped layouts would be: no case asks for them
}

Case some_case();

// What ranks sum of f64 is f64: all schedules, checked or not, to the last digits and the last byte.
TEST(BySchedule, f64_to_its_last_digits) {
  for (const Index ranks : {1, 2, 4}) {
    for (const LayoutKind layout : {LayoutKind::zigzag, LayoutKind::striped}) {
      Case c = some_case();
      c.dtype = DType::f64;
      c.ranks = ranks;
      c.layout = layout;
      Oracle oracle(c, executor_arithmetic(c));
      for (const ScheduleOptions& options : ways(c)) {
        for (const bool checked : {false, true}) {
          const AttendReport report = check_schedule(oracle, c, {.schedule = options, .checked = checked});
          EXPECT_TRUE(report.ok()) << report.keys << " " << ranks << " " << report.fault.value_or("");
          EXPECT_EQ(report.measures.size(), 7u);
          for (const Measure& m : report.measures) EXPECT_LE(m.norm, 1e-14) << m.tensor << " " << report.keys;
        }
      }
    }
  }
}

Case some_case() {
  return {.q = {.cu_seqlens = {0, 9, 30}, .cu_seqlens_padded = {1, 12, 34}},
          .mask = {.causal = true},
          .heads_q = 4,
          .heads_k = 2,
          .dim_qk = 6,
          .dim_v = 5,
          .sink = Case::SinkKind::learnable};
}

// The right answer by the reference, on one rank.
Results answer(Oracle& oracle) {
  return answer_of(oracle, {.out = DType::f32, .lse = DType::f64, .gradients = DType::f64}, "reference");
}

void expect_right(const std::vector<Measure>& measures) {
  for (const Measure& m : measures) EXPECT_LT(m.worst, 1) << m.tensor << " at " << m.where;
}

// The one tensor that is wrong, and where.
void expect_wrong(const std::vector<Measure>& measures, const std::string& tensor, const std::string& where) {
  for (const Measure& m : measures) {
    EXPECT_EQ(!(m.worst < 1), m.tensor == tensor) << m.tensor;
    if (m.tensor == tensor) {
      EXPECT_NE(m.where.find(where), std::string::npos) << m.where;
    }
  }
}

// The answer with one element changed, compared.
std::vector<Measure> spoiled(Oracle& oracle, Tensor Results::* tensor, Index token, Index head, double by) {
  Results r = answer(oracle);
  const TensorView& view = (r.*tensor).view;
  std::vector<double> row(at(view.dim));
  load_row(view, token, head, row.data());
  row[0] += by;
  store_row(view, token, head, row.data());
  return oracle.compare(r);
}

TEST(Oracle, sees_one_wrong_element) {
  const Case c = some_case();
  Oracle oracle(c, exact_arithmetic(DType::f32));
  expect_right(oracle.compare(answer(oracle)));
  expect_wrong(spoiled(oracle, &Results::out, 5, 3, 1e-4), "out", "token 5, head 3, element 0");
  expect_wrong(spoiled(oracle, &Results::dk, 20, 1, 1e-9), "dk", "token 20, head 1");
  expect_wrong(spoiled(oracle, &Results::lse, 0, 2, std::nan("")), "lse", "token 0, head 2");  // of padding
  Results r = answer(oracle);
  r.dsink[1] += 1e-9;
  expect_wrong(oracle.compare(r), "dsink", "head 1");
}

TEST(Oracle, some_rows) {
  const Case c = some_case();
  Oracle oracle(c, exact_arithmetic(DType::f32), 3);
  const std::vector<Measure> right = oracle.compare(answer(oracle));
  expect_right(right);
  EXPECT_EQ(right.size(), 6u);  // no max_logit
  std::vector<Index> chosen;    // a dout that is not 0
  Index other = -1;
  for (Index t = 0; t < oracle.dout().view.rows; ++t) {
    const double x = load_one(oracle.dout().view, t, 0);
    if (x != 0 && !std::isnan(x)) chosen.push_back(t);
    if (x == 0) other = t;
  }
  ASSERT_EQ(chosen.size(), 3u);
  ASSERT_GE(other, 0);
  const auto token = [](Index t) { return "token " + std::to_string(t); };
  expect_wrong(spoiled(oracle, &Results::out, chosen[1], 1, 1e-3), "out", token(chosen[1]) + ", head 1");
  expect_right(spoiled(oracle, &Results::out, other, 1, 1e-3));
  expect_wrong(spoiled(oracle, &Results::dq, other, 0, 1e-30), "dq", token(other));    // where dout is 0, dq is
  expect_wrong(spoiled(oracle, &Results::dv, 13, 1, 1e-6), "dv", "token 13, head 1");  // every key is compared
}

TEST(BySchedule, what_another_case_would_answer_is_wrong) {
  Case c = some_case();
  c.layout = LayoutKind::zigzag;
  c.ranks = 3;
  Oracle oracle(c, executor_arithmetic(c));
  EXPECT_TRUE(check_schedule(oracle, c, {}).ok());
  Case other = c;
  other.mask.left = 2;
  Oracle expects_window(other, executor_arithmetic(other));
  Results r = answer(oracle);
  EXPECT_GE(expects_window.compare(r)[0].worst, 1);
}

}  // namespace
}  // namespace weft::check
