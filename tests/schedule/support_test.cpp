// The capability table is true: what it refuses is refused by every entry point with its words, and what it admits is
// computed and right. A row that this test does not know fails it.
#include "weft/support.h"

#include <functional>
#include <map>

#include <gtest/gtest.h>

#include "check/attend.h"
#include "check/by_schedule.h"
#include "index.h"
#include "rank_tensors.h"
#include "refusal.h"
#include "weft/capacity.h"
#include "weft/executor.h"
#include "weft/reference.h"

namespace weft {
namespace {

using check::Case;

constexpr Index kRanks = 4;  // also the stride of the table's striped rows

// Documents of several lengths in one piece a rank, so that each row changes one thing.
Case usual() {
  return {.q = {.cu_seqlens = {0, 13, 30, 40}},
          .mask = {.causal = true},
          .ranks = kRanks,
          .heads_q = 4,
          .heads_k = 4,
          .dim_qk = 16,
          .dim_v = 16};
}

void make_batch(Case& c) {
  c.layout = LayoutKind::dual_chunk;
  c.q = {.cu_seqlens = {0, 13, 29, 37}, .cu_seqlens_padded = {0, 16, 32, 48}};
}

// Tokens dealt out one by one.
std::vector<std::vector<Run>> striped_runs(Index tokens) {
  std::vector<std::vector<Run>> runs;
  for (Index r = 0; r < kRanks; ++r)
    runs.push_back({{.row = 0, .token = r, .count = tokens / kRanks, .stride = kRanks}});
  return runs;
}

std::vector<std::vector<Run>> pieces(Index tokens) {
  std::vector<std::vector<Run>> runs;
  const Index count = tokens / kRanks;
  for (Index r = kRanks; r-- > 0;) runs.push_back({{.row = 1, .token = r * count, .count = count}});
  return runs;
}

using Change = std::function<void(Case&)>;

// One field of the case.
template <class Field, class Value>
Change set(Field Case::* field, const Value& value) {
  return [=](Case& c) { c.*field = value; };
}
Change mask(const Mask& m) { return set(&Case::mask, m); }
Change keys(const std::vector<Index>& cu_seqlens) { return set(&Case::k, check::Side{.cu_seqlens = cu_seqlens}); }
Change both(const Change& a, const Change& b) {
  return [=](Case& c) {
    a(c);
    b(c);
  };
}
Change heads(Index q, Index k, const std::vector<Index>& map = {}) {
  return both(both(set(&Case::heads_q, q), set(&Case::heads_k, k)), set(&Case::head_map, map));
}
Change widths(Index qk, Index v) { return both(set(&Case::dim_qk, qk), set(&Case::dim_v, v)); }
Change batch(Case::Format format) { return both(make_batch, set(&Case::format, format)); }
Change explicit_runs(const std::vector<std::vector<Run>>& runs) {
  return both(set(&Case::layout, LayoutKind::explicit_runs), set(&Case::runs, runs));
}

using Meanings = std::map<std::string, std::map<std::string, Change>>;

Meanings problem_meanings() {
  const Change nothing = [](Case&) {};
  const std::vector<Slice> slices{{0, 20, 0, 20, -kUnlimited, 0}, {20, 40, 3, 17}};
  const check::Side padded{.cu_seqlens = usual().q.cu_seqlens, .cu_seqlens_padded = {3, 19, 40, 51}, .tokens = 55};
  const check::Side empty{.cu_seqlens = {0, 0, 13, 13, 40, 40}};
  return {{"mask",
           {{"full", mask({})},
            {"causal", nothing},
            {"bottom_right", both(mask({.causal = true, .align = Align::bottom_right}), keys({0, 20, 30, 51}))},
            {"window", mask({.causal = true, .left = 5})},
            {"window_right", mask({.left = 4, .right = 3})},
            {"chunked", mask({.causal = true, .chunk = 6})},
            {"slices", mask({.slices = slices})}}},
          {"layout",
           {{"contiguous", set(&Case::layout, LayoutKind::contiguous)},
            {"dual_chunk", make_batch},
            {"zigzag", set(&Case::layout, LayoutKind::zigzag)},
            {"striped", set(&Case::layout, LayoutKind::striped)},
            {"balanced", set(&Case::layout, LayoutKind::balanced)},
            {"placed", set(&Case::layout, LayoutKind::placed)},
            {"explicit", explicit_runs(pieces(40))},
            {"striped, keys in sequence order", set(&Case::layout, LayoutKind::striped)},
            {"striped queries, other keys",
             both(both(explicit_runs(striped_runs(40)), set(&Case::k_runs, pieces(40))), keys(usual().q.cu_seqlens))}}},
          {"packing",
           {{"any lengths", nothing},
            {"empty sequences", set(&Case::q, empty)},
            {"padding between sequences", set(&Case::q, padded)},
            {"cross-attention", keys({0, 20, 20, 51})}}}};
}

Meanings tensor_meanings() {
  const Change nothing = [](Case&) {};
  Meanings all = {
      {"format", {{"thd", nothing}, {"bshd", batch(Case::Format::bshd)}, {"sbhd", batch(Case::Format::sbhd)}}},
      {"heads",
       {{"grouped-query", heads(6, 2)},
        {"head map", heads(5, 3, {2, 0, 2, 1, 2})},
        {"widths 192/128", widths(192, 128)},
        {"widths 576/512", widths(576, 512)}}},
      {"feature",
       {{"softcap", set(&Case::softcap, 3)},
        {"sink off_by_one", set(&Case::sink, Case::SinkKind::off_by_one)},
        {"sink learnable", set(&Case::sink, Case::SinkKind::learnable)},
        {"max_logit", nothing},  // is always asked for
        {"scale", set(&Case::scale, 0.7)},
        {"device_plan, on a GPU", nothing},  // there: cuda/graph_test.cpp
        {"cu_seqlens on a GPU", nothing},
        {"source in place of K and V", nothing},  // run/source_test.cpp
        {"bias", nothing},
        {"dropout", nothing}}}};
  for (const DType type : {DType::f32, DType::bf16, DType::f16, DType::f64, DType::f8_e4m3, DType::f8_e5m2})
    all["dtype"][std::string(name(type))] = set(&Case::dtype, type);
  return all;
}

// What each row means, as a change of the usual case.
const Meanings& meanings() {
  static const Meanings all = [] {
    Meanings both_kinds = problem_meanings();
    both_kinds.merge(tensor_meanings());
    return both_kinds;
  }();
  return all;
}

std::optional<Case> case_of(const SupportRow& row) {
  const auto group = meanings().find(row.group);
  if (group == meanings().end() || !group->second.contains(row.name)) return {};
  Case c = usual();
  group->second.at(row.name)(c);
  return c;
}

void expect_words(const Refusal& words, const std::string& entry, const std::function<void()>& call) {
  EXPECT_EQ(error_of(call), words.problem + "; " + words.remedy) << entry;
}

// Arguments of a call on `rows` rows that asks for what the row does.
struct Call {
  Call(const Case& c, const Use& use, Index q_rows, Index k_rows)
      : bytes(at(max_of(q_rows, k_rows) * c.heads_q * max_of(c.dim_qk, c.dim_v) * 8), std::byte{}) {
    const auto view = [&](DType type, Index rows, Index heads, Index dim) {
      return thd(static_cast<void*>(bytes.data()), type, rows, heads, dim);
    };
    Attention attention{.head_map = c.head_map, .dropout = use.dropout};
    if (use.bias) attention.bias = view(DType::f32, q_rows, c.heads_q, 1);
    forward = {.q = view(c.dtype, q_rows, c.heads_q, c.dim_qk),
               .k = view(c.dtype, k_rows, c.heads_k, c.dim_qk),
               .v = view(c.dtype, k_rows, c.heads_k, c.dim_v),
               .attention = attention,
               .out = view(c.dtype, q_rows, c.heads_q, c.dim_v),
               .lse = view(DType::f32, q_rows, c.heads_q, 1)};
    // Refused before anybody looks at it.
    if (use.device_plan) forward.device_plan = reinterpret_cast<DevicePlan*>(bytes.data());
    backward = {.q = forward.q,
                .k = forward.k,
                .v = forward.v,
                .device_plan = forward.device_plan,
                .attention = attention,
                .dout = forward.out,
                .out = forward.out,
                .lse = forward.lse,
                .dq = view(DType::f32, q_rows, c.heads_q, c.dim_qk),
                .dk = view(DType::f32, k_rows, c.heads_k, c.dim_qk),
                .dv = view(DType::f32, k_rows, c.heads_k, c.dim_v)};
  }

  std::vector<std::byte> bytes;
  ForwardArgs forward;
  BackwardArgs backward;
};

void expect_refused_alone(const Case& c, const SupportRow& row) {
  const Refusal& words = *row.one_rank;
  const Call call(c, row.use, 8, 8);
  expect_words(words, "attend", [&] { attend(call.forward); });
  expect_words(words, "attend by cpu", [&] { attend(call.forward, "cpu"); });
  expect_words(words, "attend_backward", [&] { attend_backward(call.backward); });
  expect_words(words, "reference_forward", [&] { reference_forward(call.forward); });
  expect_words(words, "reference_backward", [&] { reference_backward(call.backward); });
}

// Steps by hand on one rank, which go through attend, attend_backward and the functions of the reference.
void expect_right_alone(Case c) {
  if (c.layout == LayoutKind::explicit_runs) c.layout = LayoutKind::contiguous;
  c.ranks = 1;
  c.format = Case::Format::thd;
  for (const char* kernel : {"reference", "cpu"}) {
    if (kernel != check::kReference && c.dtype == DType::f64) continue;
    const auto reports = check_attention(c, find_kernel(kernel).name);
    EXPECT_FALSE(reports.empty());
    for (const check::AttendReport& report : reports) {
      for (const check::Measure& m : report.measures)
        EXPECT_LT(m.worst, 1) << kernel << ", " << report.keys << ": " << m.tensor << " at " << m.where;
    }
  }
}

template <class Args>
concept TakesSlices = requires(Args args) { args.slices; } || requires(Args args) { args.device_plan; };
static_assert(!TakesSlices<ExecutorForwardArgs> && !TakesSlices<ExecutorBackwardArgs> && TakesSlices<ForwardArgs>);

void expect_refused(const Case& c, const SupportRow& row, const Refusal& words, const ScheduleOptions& options) {
  const Problem problem = problem_of(c);
  const Layouts layouts = layouts_of(c, problem);
  const Heads heads{.q = c.heads_q, .k = c.heads_k, .map = c.head_map};
  Use by_layout = row.use;
  by_layout.schedule = options.kind;
  by_layout.dtype = DType::f32;
  by_layout.bias = false;
  by_layout.dropout = 0;
  by_layout.device_plan = false;
  by_layout.device_lengths = false;
  by_layout.source = false;
  if (refusal(by_layout))
    return expect_words(words, "make_schedule", [&] { make_schedule(problem, layouts, 0, heads, options); });
  if (row.use.device_lengths)
    return expect_words(words, "capacity_schedule", [&] {
      capacity_schedule({.ranks = kRanks, .rank = 0, .q_rows = 8, .k_rows = 8}, heads, options);
    });
  if (row.use.device_plan) return;  // an executor's arguments have no such field
  if (row.use.source) return;       // refused in run/source_test.cpp
  run_ranks(kRanks, [&](Communicator& communicator) {
    Executor executor(communicator, make_schedule(problem, layouts, communicator.rank(), heads, options));
    const test::RankTensors<> tensors(
        {layouts.q.rows(), layouts.k.rows(), c.heads_q, c.heads_k, c.dim_qk, c.dim_v, c.dtype});
    test::RankArgs args = tensors.args();
    const Call call(c, row.use, layouts.q.rows(), layouts.k.rows());
    args.forward.attention = args.backward.attention = call.forward.attention;
    expect_words(words, "Executor::forward", [&] { executor.forward(args.forward); });
    expect_words(words, "Executor::backward", [&] { executor.backward(args.backward); });
  });
}

void expect_right(const Case& c, const ScheduleOptions& options) {
  check::Oracle oracle(c, check::executor_arithmetic(c));
  const check::AttendReport report = check_schedule(oracle, c, {.schedule = options});
  EXPECT_FALSE(report.fault) << *report.fault;
  for (const check::Measure& m : report.measures) EXPECT_LT(m.worst, 1) << m.tensor << " at " << m.where;
}

TEST(Support, every_row_says_what_is_so) {
  for (const SupportRow& row : support_table()) {
    SCOPED_TRACE(row.group + " " + row.name);
    const std::optional<Case> c = case_of(row);
    ASSERT_TRUE(c) << "this test does not know the row: say here what it means";
    if (row.one_rank)
      expect_refused_alone(*c, row);
    else
      expect_right_alone(*c);
    ASSERT_EQ(row.schedules.size(), schedule_kinds().size());
    for (std::size_t i = 0; i < row.schedules.size(); ++i) {
      const ScheduleOptions options{.kind = schedule_kinds()[i], .key_order = row.use.key_order};
      SCOPED_TRACE(name(options.kind));
      if (row.schedules[i])
        expect_refused(*c, row, *row.schedules[i], options);
      else
        expect_right(*c, options);
    }
  }
}

// The other way round: whatever this test knows is in the table.
TEST(Support, every_meaning_is_a_row) {
  std::size_t known = 0;
  for (const auto& [group, rows] : meanings()) known += rows.size();
  EXPECT_EQ(support_table().size(), known);
}

TEST(Support, what_is_not_there_is_refused_by_its_row) {
  std::size_t found = 0;
  for (const SupportRow& row : support_table()) {
    if (row.name != "bias" && row.name != "dropout") continue;
    ++found;
    EXPECT_TRUE(row.one_rank.has_value()) << row.name;
  }
  EXPECT_EQ(found, 2u);
}

TEST(Support, refusals_have_a_way_out) {
  for (const SupportRow& row : support_table()) {
    for (const std::optional<Refusal>& refused : row.schedules) {
      if (!refused) continue;
      EXPECT_FALSE(refused->problem.empty() || refused->remedy.empty()) << row.name;
    }
  }
}

}  // namespace
}  // namespace weft
