// Edges by name; docs/trust.md lists them, and those that tests of other files look at.
#include <cstdint>
#include <limits>
#include <numeric>
#include <thread>

#include <gtest/gtest.h>

#include "check/by_schedule.h"
#include "index.h"
#include "kernel/kernel_problem.h"
#include "kernel/mapped_tensor.h"
#include "rank_tensors.h"
#include "ranks.h"
#include "refusal.h"
#include "weft/plan.h"
#include "weft/prepare.h"

namespace weft::test {
namespace {

using check::Case;

constexpr LayoutKind kLayouts[] = {LayoutKind::contiguous, LayoutKind::dual_chunk, LayoutKind::zigzag,
                                   LayoutKind::striped, LayoutKind::balanced};

// By every schedule, against the dense softmax; what the capability table refuses is refused with its words. Returns
// how many were computed.
Index expect_right(const Case& c, const std::string& kernel = "") {
  check::Oracle oracle(c, check::executor_arithmetic(c));
  Index computed = 0;
  for (const ScheduleKind kind : schedule_kinds()) {
    const ScheduleOptions options{.kind = kind, .ulysses = c.ranks % 2 == 0 ? 2 : 1};
    const check::Tried tried = try_schedule(oracle, c, {.schedule = options, .kernel = kernel});
    EXPECT_FALSE(tried.failure) << *tried.failure << "\nweft verify " << flags(c) << " " << check::flags(options);
    if (!tried.report) continue;
    ++computed;
    EXPECT_TRUE(tried.report->ok()) << tried.report->fault.value_or("a number is wrong") << "\nweft verify " << flags(c)
                                    << " " << check::flags(options);
  }
  return computed;
}

Case case_of(const std::vector<Index>& lengths, Index ranks, LayoutKind layout) {
  Case c{.layout = layout, .ranks = ranks, .sink = Case::SinkKind::learnable};
  c.q = {.cu_seqlens = {0}};
  const Index multiple = layout == LayoutKind::dual_chunk ? 2 * ranks : 1;
  std::vector<Index> padded = {0};
  for (const Index n : lengths) {
    c.q.cu_seqlens.push_back(c.q.cu_seqlens.back() + n);
    padded.push_back(padded.back() + ceil_div(n, multiple) * multiple);
  }
  if (multiple > 1) c.q.cu_seqlens_padded = padded;
  c.mask.causal = true;
  return c;
}

void expect_right_everywhere(const std::vector<Index>& lengths, std::initializer_list<Index> ranks) {
  for (const LayoutKind layout : kLayouts)
    for (const Index n : ranks) EXPECT_GE(expect_right(case_of(lengths, n, layout)), 3) << name(layout) << ", " << n;
}

TEST(Edges, NoTokens) {
  expect_right_everywhere({}, {1, 2, 4});
  expect_right_everywhere({0, 0, 0}, {1, 3});
}

TEST(Edges, OneToken) { expect_right_everywhere({1}, {1, 2, 5}); }

TEST(Edges, MoreRanksThanTokens) { expect_right_everywhere({2, 0, 1}, {4, 8, 13}); }

// One token, two ranks, one of them without a row: heads in groups cut tensors of no rows too.
TEST(Edges, HeadGroupsOfNoRows) {
  Case c{.layout = LayoutKind::contiguous, .ranks = 2, .heads_q = 2, .heads_k = 2};
  c.q = {.cu_seqlens = {0, 1}};
  check::Oracle oracle(c, check::executor_arithmetic(c));
  for (const char* kernel : {"reference", "cpu"}) {
    const check::Tried tried =
        try_schedule(oracle, c, {.schedule = {.kind = ScheduleKind::all_gather, .head_groups = 2}, .kernel = kernel});
    EXPECT_FALSE(tried.failure) << *tried.failure;
  }
}

// Tokens 0 .. 4 are real and lie on rank 0; three ranks hold padding alone, one of them in the middle.
TEST(Edges, RanksOfPaddingAlone) {
  Case c{.ranks = 4, .sink = Case::SinkKind::off_by_one};
  c.q = {.cu_seqlens = {0, 5, 9}, .cu_seqlens_padded = {0, 16, 32}};
  for (const LayoutKind layout : {LayoutKind::contiguous, LayoutKind::dual_chunk, LayoutKind::zigzag}) {
    c.layout = layout;
    EXPECT_GE(expect_right(c), 4);
  }
  c.layout = LayoutKind::contiguous;
  const Problem problem = check::problem_of(c);
  const std::vector<Index> pairs = pairs_by_rank(problem, check::layouts_of(c, problem).q);
  EXPECT_EQ(pairs, (std::vector<Index>{25, 0, 16, 0}));
}

// Each token sees itself: its output is its value, to the bit, and its lse the only logit, 0 of a query of zeros.
TEST(Edges, AMillionDocumentsOfOneToken) {
  const Index n = 1'000'000, ranks = 8, dim = 2;
  const std::vector<Index> ones(at(n), 1);
  const Problem problem(Stream::from_lengths(ones), {.causal = true});
  EXPECT_EQ(problem.visible_pairs(), n);
  for (const LayoutKind kind :
       {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::striped, LayoutKind::balanced}) {
    const Layouts layouts = make_layouts(kind, problem, ranks);
    Index pairs = 0;
    for (Index rank = 0; rank < ranks; rank += kSanitized ? 4 : 1) {
      const Schedule s = make_schedule(problem, layouts, rank, {1, 1}, {.kind = ScheduleKind::exact});
      for (const Plan& plan : s.plans) pairs += visible_pairs(plan);
      EXPECT_EQ(traffic(s, {.dtype = DType::f32, .dim_qk = dim, .dim_v = dim}, Pass::forward).bytes_received, 0);
    }
    EXPECT_EQ(pairs, kSanitized ? n / 4 : n) << name(kind);
  }
  const Plan plan = make_plan(problem, RunList::sequence_order(n), RunList::sequence_order(n));
  std::vector<float> q(at(n * dim), 0.0F), v(q), out(at(n * dim), NAN), lse(at(n), NAN);
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i % 1009);
  const auto view = [&](std::vector<float>& of) { return thd(of.data(), DType::f32, n, 1, dim); };
  attend({.q = view(q),
          .k = view(q),
          .v = view(v),
          .slices = plan.slices,
          .out = view(out),
          .lse = token_heads(lse.data(), DType::f32, n, 1)});
  EXPECT_EQ(out, v);
  EXPECT_EQ(lse, std::vector<float>(at(n), 0.0F));
}

TEST(Edges, AMillionDocumentsArePacked) {
  const Index n = 1'000'000;
  const std::vector<Index> ones(at(n), 1);
  const Packs packs = pack_documents(ones, {.budget = 1024});
  EXPECT_EQ(packs.report.packs, ceil_div(n, 1024));
  EXPECT_EQ(packs.report.tokens, n);
}

TEST(Edges, OneDocumentOfTenMillionIsPlanned) {
  const Index n = 10'000'000, ranks = 16;
  const Problem problem(Stream::from_lengths(std::vector<Index>{n}).padded_to(2 * ranks), {.causal = true});
  EXPECT_EQ(problem.visible_pairs(), n * (n + 1) / 2);
  for (const LayoutKind layout : kLayouts) {
    const Layouts layouts = make_layouts(layout, problem, ranks);
    for (const ScheduleKind kind : schedule_kinds()) {
      const ScheduleOptions options{.kind = kind};
      Index pairs = 0;  // times heads
      for (Index rank = 0; rank < ranks; ++rank) {
        Schedule s = make_schedule(problem, layouts, rank, {ranks, ranks}, options);
        for (const Step& step : s.steps)
          pairs += visible_pairs(s.plans[at(step.plan)]) * (step.heads_q.end - step.heads_q.begin);
      }
      EXPECT_EQ(pairs, n * (n + 1) / 2 * ranks) << name(layout) << " " << name(kind);
    }
  }
}

const Index kSchedules = static_cast<Index>(schedule_kinds().size());

TEST(Edges, Heads1And128) {
  for (const auto& [hq, hk] : {std::pair<Index, Index>{1, 1}, {128, 128}, {128, 1}}) {
    Case c = case_of({7, 4}, 2, LayoutKind::zigzag);
    c.heads_q = hq;
    c.heads_k = hk;
    EXPECT_EQ(expect_right(c), kSchedules) << hq << ":" << hk;
  }
}

class EdgesOfKernels : public BackwardKernelTest {};
WEFT_FOR_EACH_CPU_KERNEL(EdgesOfKernels);

TEST_P(EdgesOfKernels, Widths1And3And255And256And512) {
  for (const Index dim : {1, 3, 255, 256, 512}) {
    if (find_kernel(kernel()).refusal({.pass = Pass::backward, .dtype = dtype(), .dim_qk = dim, .dim_v = dim}))
      continue;
    Case c = case_of({19, 14}, 2, LayoutKind::contiguous);
    c.dim_qk = dim;
    c.dim_v = dim == 3 ? 1 : dim;
    c.dtype = dtype();
    EXPECT_EQ(expect_right(c, kernel()), kSchedules) << dim;
  }
}

// Rows 2^25 elements apart, so that offsets pass 2^31 at row 64 and 2^32 at row 128.
struct Far : MappedTensor {
  Far(DType dtype, Index rows, Index heads, Index dim) : MappedTensor(dtype, rows, heads, dim, size_of(dtype) << 25) {}
};

// What a rank gives and gets, once in tensors that lie close and once in such that lie far apart.
template <class Held>
std::vector<std::vector<double>> run_rank(Communicator& comm, const Problem& problem, const Layouts& layouts,
                                          ScheduleKind kind) {
  const RankTensors<Held> t(layouts.q.rows(), 2, 4, static_cast<unsigned>(comm.rank()) + 5);
  Executor executor(comm, make_schedule(problem, layouts, comm.rank(), {2, 2}, {.kind = kind}));
  t.run(executor);
  std::vector<std::vector<double>> results;
  for (const Held* one : {&t.out, &t.lse, &t.dq, &t.dk, &t.dv}) results.push_back(to_f64(one->view));
  return results;
}

TEST(Edges, OffsetsPast32BitsThroughTheExecutor) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{170, 92}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 2);
  ASSERT_GT(layouts.q.rows(), 129);
  for (const ScheduleKind kind : schedule_kinds()) {
    run_ranks(2, [&](Communicator& comm) {
      const auto near = run_rank<check::Tensor>(comm, problem, layouts, kind);
      const auto far = run_rank<Far>(comm, problem, layouts, kind);
      for (std::size_t i = 0; i < near.size(); ++i)
        EXPECT_EQ(bits(far[i]), bits(near[i])) << name(kind) << ", tensor " << i;
    });
  }
}

// One query of `q` for every element, and keys of `keys`; values 1, 2, 3, ..
struct Row {
  std::vector<double> out, lse, dq;
};
Row attend_row(const std::string& kernel, DType dtype, double q, const std::vector<double>& keys, Attention attention) {
  const Index n = static_cast<Index>(keys.size());
  KernelProblem problem =
      make_problem({.tq = 1, .tk = n, .hq = 1, .dqk = 1, .dv = 1, .dtype = dtype}, {{0, 1, 0, n}}, 1);
  std::vector<double> values(keys.size());
  std::iota(values.begin(), values.end(), 1.0);
  problem.p.q.set({q});
  problem.p.k.set(keys);
  problem.p.v.set(values);
  problem.p.dout.set({1});
  const Outputs got(problem.p);
  KernelForwardArgs forward = got.forward_args(problem);
  KernelBackwardArgs backward = got.backward_args(problem);
  forward.attention = backward.attention = attention;
  forward.max_logit = {};
  attend(forward, kernel);
  attend_backward(backward, kernel);
  return {got.forward.out.values(), got.forward.lse.values(), got.backward.dq.values()};
}

// Products that go under are logits of 0: the mean.
TEST_P(EdgesOfKernels, SubnormalLogits) {
  const double tiny = dtype() == DType::f16 ? 0x1p-24 : 0x1p-130;
  const Row row = attend_row(kernel(), dtype(), tiny, {tiny, -tiny, tiny, -tiny}, {.scale = 1});
  EXPECT_EQ(row.out[0], 2.5);
  EXPECT_NEAR(row.lse[0], std::log(4.0), 1e-6);
}

// The largest takes all, however far the others are below; nothing overflows.
TEST_P(EdgesOfKernels, HugeLogits) {
  const double huge = dtype() == DType::f16 ? 60000 : 0x1p63;
  const Row row = attend_row(kernel(), dtype(), huge, {-huge, huge, huge / 2}, {.scale = 1});
  EXPECT_EQ(row.out[0], 2);
  EXPECT_NEAR(row.lse[0] / (huge * huge), 1, 1e-2);
  EXPECT_EQ(row.dq[0], 0);
}

// A key at minus infinity is a key that is not there. Plus infinity has no answer: it shows as NaN, not as a number.
TEST_P(EdgesOfKernels, InfiniteLogits) {
  const double inf = std::numeric_limits<double>::infinity();
  const Row without = attend_row(kernel(), dtype(), 1, {0, -inf, 0}, {.scale = 1});
  EXPECT_EQ(without.out[0], 2);
  EXPECT_NEAR(without.lse[0], std::log(2.0), 1e-6);
  const Row past = attend_row(kernel(), dtype(), 1, {0, inf, 0}, {.scale = 1});
  EXPECT_TRUE(std::isnan(past.out[0])) << past.out[0];
}

TEST_P(EdgesOfKernels, SinkAtMinusInfinityIsNone) {
  const float sink = -std::numeric_limits<float>::infinity();
  const Attention with{.sink = Sink::learnable(per_head(&sink, DType::f32, 1))};
  const Row a = attend_row(kernel(), dtype(), 1, {0.5, -1, 2}, with),
            b = attend_row(kernel(), dtype(), 1, {0.5, -1, 2}, {});
  EXPECT_EQ(bits(a.out), bits(b.out));
  EXPECT_EQ(bits(a.lse), bits(b.lse));
  EXPECT_EQ(bits(a.dq), bits(b.dq));
}

TEST_P(EdgesOfKernels, ScaleZeroIsTheMean) {
  const Row row = attend_row(kernel(), dtype(), 3, {5, -1, 2, 7}, {.scale = 0});
  EXPECT_EQ(row.out[0], 2.5);
  EXPECT_NEAR(row.lse[0], std::log(4.0), 1e-6);
  EXPECT_EQ(row.dq[0], 0);
}

KernelProblem plain_problem(DType dtype) {
  return make_problem({.tq = 37, .tk = 41, .hq = 2, .dqk = 12, .dv = 20, .dtype = dtype},
                      {{0, 37, 0, 41, -kUnlimited, 4}}, 8);
}

TEST_P(EdgesOfKernels, ReadOnlyInputs) {
  const KernelProblem problem = plain_problem(dtype());
  const Outputs plain(problem.p), closed(problem.p);
  plain.run(problem, kernel(), Pass::backward);
  const MappedTensor q(problem.p.q), k(problem.p.k), v(problem.p.v), dout(problem.p.dout), out(plain.forward.out),
      lse(plain.forward.lse);
  for (const MappedTensor* t : {&q, &k, &v, &dout, &out, &lse}) t->make_read_only();
  KernelForwardArgs forward = closed.forward_args(problem);
  read_from(forward, q.view, k.view, v.view);
  attend(forward, kernel());
  KernelBackwardArgs backward = closed.backward_args(problem);
  read_from(backward, q.view, k.view, v.view);
  backward.dout = dout.view;
  backward.out = out.view;
  backward.lse = lse.view;
  attend_backward(backward, kernel());
  expect_same_bits(closed, plain, Pass::backward);
}

// A whole element past a vector's boundary is as good as any place; a byte past an element's is refused.
TEST_P(EdgesOfKernels, MisalignedMemory) {
  const KernelProblem problem = plain_problem(dtype());
  const Outputs plain(problem.p), moved(problem.p);
  plain.run(problem, kernel(), Pass::backward);
  std::vector<std::vector<std::byte>> held;
  const auto copy = [&](const Buffer& from, Index past) {
    const ConstTensorView shape = from.view();
    held.emplace_back(at(shape.rows * shape.heads * shape.dim * size_of(shape.dtype) + 256));
    auto address = reinterpret_cast<std::uintptr_t>(held.back().data());
    std::byte* data = held.back().data() + (128 - address % 128) + at(past);
    TensorView view = thd(static_cast<void*>(data), shape.dtype, shape.rows, shape.heads, shape.dim);
    if (past % size_of(shape.dtype) == 0) from_f64(from.values(), view);
    return view;
  };
  const Index one = size_of(dtype());
  KernelForwardArgs forward = moved.forward_args(problem);
  read_from(forward, copy(problem.p.q, one), copy(problem.p.k, 3 * one), copy(problem.p.v, 5 * one));
  forward.out = copy(moved.forward.out, 7 * one);
  attend(forward, kernel());
  KernelBackwardArgs backward = moved.backward_args(problem);
  read_from(backward, forward.q, forward.k, forward.v);
  write_to(backward, copy(moved.backward.dq, one), copy(moved.backward.dk, 3 * one), copy(moved.backward.dv, one));
  backward.out = forward.out;
  backward.dout = copy(problem.p.dout, 9 * one);
  attend_backward(backward, kernel());
  EXPECT_EQ(bits(to_f64(forward.out)), bits(plain.forward.out));
  EXPECT_EQ(bits(to_f64(backward.dq)), bits(plain.backward.dq));
  EXPECT_EQ(bits(to_f64(backward.dk)), bits(plain.backward.dk));
  EXPECT_EQ(bits(to_f64(backward.dv)), bits(plain.backward.dv));

  const auto odd = [&](const Buffer& b) { return copy(b, 1); };
  KernelForwardArgs wrong = forward;
  wrong.k = odd(problem.p.k);
  expect_refusal([&] { attend(wrong, kernel()); }, {"k is", "1 bytes past", "align it"});
  KernelBackwardArgs wrong_back = backward;
  wrong_back.dv = odd(moved.backward.dv);
  expect_refusal([&] { attend_backward(wrong_back, kernel()); }, {"dv is", "1 bytes past", "align it"});
}

// Sixteen worlds of four ranks, all at work at once, and each right to the bit.
TEST(Edges, SixtyFourExecutorsAtOnce) {
  const RanksProblem p{.problem = Problem(Stream::from_lengths(std::vector<Index>{37, 5, 22}), {.causal = true}),
                       .sink = true};
  RanksInput input(p);
  const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, 4);
  std::vector<RanksResult> want;
  for (const ScheduleKind kind : schedule_kinds()) want.push_back(run_on_ranks(p, input, layouts, {.kind = kind}));
  std::atomic<Index> right = 0;
  std::vector<std::thread> worlds;
  for (std::size_t w = 0; w < 16; ++w) {
    worlds.emplace_back([&, w] {
      RanksInput own(p);
      for (std::size_t i = 0; i < want.size(); ++i) {
        const std::size_t n = (w + i) % want.size();
        const RanksResult got = run_on_ranks(p, own, layouts, {.kind = schedule_kinds()[n]});
        right += same_bytes(got, want[n]);
      }
    });
  }
  for (std::thread& world : worlds) world.join();
  EXPECT_EQ(right, 16 * static_cast<Index>(want.size()));
}

}  // namespace
}  // namespace weft::test
