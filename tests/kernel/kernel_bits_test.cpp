// What no bit of a result may depend on: padding, how queries were cut, where rows begin, threads, views.
#include <limits>
#include <thread>

#include <gtest/gtest.h>

#include "kernel/kernel_features.h"

namespace weft::test {
namespace {

class KernelBits : public ForwardKernelTest {
 protected:
  void TearDown() override { set_cpu_threads(0); }
  Pass last() const {  // forward alone if there is no backward
    const KernelRequest request{.pass = Pass::backward, .dtype = dtype(), .dim_qk = 16, .dim_v = 16};
    return find_kernel(kernel()).refusal(request) ? Pass::forward : Pass::backward;
  }
};
WEFT_FOR_EACH_KERNEL(KernelBits);

// Several tiles, grouped heads, padding everywhere, a learnable sink.
KernelProblem packed(DType dtype, const Mask& mask = {.causal = true}, Index first = 5) {
  const Stream stream = padded({first, first + 150, first + 160, first + 400}, {141, 1, 233}, first + 410);
  const AttentionProblem base{.hq = 4, .hk = 2, .dqk = 40, .dv = 24, .dtype = dtype, .sink = Sink::Kind::learnable};
  KernelProblem problem{"", masked(base, stream, mask)};
  Random random(31);
  problem.p.fill(random);
  return problem;
}

void fill_unused(const Buffer& buffer, const std::vector<bool>& used, const std::vector<double>& values) {
  std::vector<double> row(at(buffer.view().dim));
  std::size_t n = 0;
  for (Index r = 0; r < buffer.view().rows; ++r) {
    for (Index head = 0; head < buffer.view().heads && !used[at(r)]; ++head) {
      for (double& x : row) x = values[n++ % values.size()];
      store_row(buffer.view(), r, head, row.data());
    }
  }
}

TEST_P(KernelBits, DoNotDependOnPadding) {
  constexpr double kInf = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();
  for (const Mask& mask : {Mask{.causal = true}, Mask{.left = 30, .right = 5}}) {
    std::vector<KernelProblem> problems;
    for (int i = 0; i < 2; ++i) problems.push_back(packed(dtype(), mask));
    const Outputs zeros(problems[0].p), filled(problems[1].p);
    const std::vector<double> values[] = {{0}, {kNan, kInf, -kInf, 1e4, kNan}};
    for (std::size_t i = 0; i < 2; ++i) {
      const AttentionProblem& p = problems[i].p;
      for (const Buffer* b : {&p.q, &p.dout}) fill_unused(*b, p.q_used, values[i]);
      for (const Buffer* b : {&p.k, &p.v}) fill_unused(*b, p.k_used, values[i]);
      attend((i == 0 ? zeros : filled).forward_args(problems[i]), kernel());
    }
    expect_same_bits(filled, zeros, Pass::forward);
    if (last() == Pass::forward) continue;
    for (std::size_t i = 0; i < 2; ++i) {  // what the backward reads of padding is not the forward's either
      const Outputs& outputs = i == 0 ? zeros : filled;
      fill_unused(outputs.forward.out, problems[i].p.q_used, values[i]);
      fill_unused(outputs.forward.lse, problems[i].p.q_used, values[i]);
      attend_backward(outputs.backward_args(problems[i]), kernel());
    }
    fill_unused(filled.forward.out, problems[1].p.q_used, {0});
    fill_unused(filled.forward.lse, problems[1].p.q_used, {0});
    expect_same_bits(filled, zeros, Pass::backward);
  }
}

// Rows `tokens` of a tensor; kNoToken: NaN.
Buffer rows_of(const Buffer& whole, const std::vector<Index>& tokens) {
  const ConstTensorView from = whole.view();
  Buffer result(from.dtype, static_cast<Index>(tokens.size()), from.heads, from.dim);
  std::vector<double> row(at(from.dim));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    for (Index head = 0; head < from.heads && tokens[i] != kNoToken; ++head) {
      load_row(from, tokens[i], head, row.data());
      store_row(result.view(), static_cast<Index>(i), head, row.data());
    }
  }
  return result;
}

// Whole Q against each rank's part of it, keys in sequence order.
TEST_P(KernelBits, DoNotDependOnHowQueriesAreCut) {
  const std::vector<Index> real = {150, 1, 77, 0, 200};
  const Packing packing = Packing(lengths(real)).padded_to(48);  // 2·ranks divides it for all ranks here
  const std::vector<Index> rank_counts = fewer_if_sanitized<Index>({3, 8, 1, 2, 4}, 2);
  const std::vector<Mask> masks =
      fewer_if_sanitized<Mask>({{.left = 64, .right = 10}, {.causal = true}, {.causal = true, .chunk = 50}}, 1);
  std::size_t cuts = 0;
  for (const Mask& mask : masks) {
    const Problem problem(packing, mask);
    KernelProblem whole{"", masked({.hq = 4, .hk = 2, .dqk = 40, .dv = 24, .dtype = dtype()}, packing, mask)};
    Random random(32);
    whole.p.fill(random);
    const Outputs want(whole.p);
    attend(want.forward_args(whole), kernel());
    for (const LayoutKind kind : {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::dual_chunk}) {
      for (const Index ranks : rank_counts) {
        const Layout layout = make_layouts(kind, problem, ranks).q;
        for (Index rank = 0; rank < ranks; ++rank) {
          SCOPED_TRACE(std::string(name(kind)) + ", rank " + std::to_string(rank) + " of " + std::to_string(ranks));
          const Plan plan = make_plan(problem, layout.runs(rank), layout.sequence_order());
          const std::vector<Index> tokens = layout.tokens(rank);
          const Buffer q = rows_of(whole.p.q, tokens);
          const Buffer out(dtype(), plan.q_rows, 4, 24), lse(DType::f32, plan.q_rows, 4, 1);
          ForwardArgs args = want.forward_args(whole);
          args.q = q.view();
          args.slices = plan.slices;
          args.out = out.view();
          args.lse = lse.view();
          args.max_logit = {};
          attend(args, kernel());
          std::vector<Index> real_rows, real_tokens;
          for (Index row = 0; row < plan.q_rows; ++row) {
            if (tokens[at(row)] == kNoToken || !whole.p.q_used[at(tokens[at(row)])]) continue;
            real_rows.push_back(row);
            real_tokens.push_back(tokens[at(row)]);
          }
          ASSERT_EQ(bits(rows_of(out, real_rows)), bits(rows_of(want.forward.out, real_tokens)));
          ASSERT_EQ(bits(rows_of(lse, real_rows)), bits(rows_of(want.forward.lse, real_tokens)));
          cuts += real_rows.size();
        }
      }
    }
  }
  EXPECT_EQ(cuts, masks.size() * 3 * rank_counts.size() * 428);  // every real token, every time
}

// The same documents further on in a longer buffer.
TEST_P(KernelBits, DoNotDependOnTheFirstOffset) {
  const KernelProblem near = packed(dtype(), {.causal = true}, 0);
  const Outputs want(near.p);
  want.run(near, kernel(), last());
  for (const Index first : fewer_if_sanitized<Index>({7, 101, 1, 64}, 2)) {
    KernelProblem far = packed(dtype(), {.causal = true}, first);
    std::vector<Index> tokens, back;
    for (Index t = -first; t < near.p.tq; ++t) tokens.push_back(t < 0 ? kNoToken : t);
    for (Index t = 0; t < near.p.tq; ++t) back.push_back(t + first);
    far.p.q = rows_of(near.p.q, tokens);
    far.p.k = rows_of(near.p.k, tokens);
    far.p.v = rows_of(near.p.v, tokens);
    far.p.dout = rows_of(near.p.dout, tokens);
    far.p.sink_logits.set(near.p.sink_logits.values());
    const Outputs got(far.p);
    got.run(far, kernel(), last());
    EXPECT_EQ(bits(rows_of(got.forward.out, back)), bits(want.forward.out)) << first;
    EXPECT_EQ(bits(rows_of(got.forward.lse, back)), bits(want.forward.lse)) << first;
  }
}

TEST_P(KernelBits, DoNotDependOnThreads) {
  const KernelProblem problem = packed(dtype());
  const Outputs one(problem.p);
  set_cpu_threads(1);
  one.run(problem, kernel(), last());
  for (const int threads : fewer_if_sanitized<int>({2, 1, 2, 3, 0}, 2)) {
    SCOPED_TRACE(threads);
    set_cpu_threads(threads);
    const Outputs again(problem.p);
    again.run(problem, kernel(), last());
    expect_same_bits(again, one, last());
  }
}

// Ranks that are threads share the kernels.
TEST_P(KernelBits, DoNotDependOnOtherCalls) {
  const KernelProblem problem = packed(dtype());
  std::vector<Outputs> outputs;
  for (int i = 0; i < 4; ++i) outputs.emplace_back(problem.p);
  outputs[0].run(problem, kernel(), last());
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < 4; ++i) {
    threads.emplace_back([&, i] { outputs[i].run(problem, kernel(), last()); });
  }
  for (std::thread& t : threads) t.join();
  for (std::size_t i = 1; i < 4; ++i) expect_same_bits(outputs[i], outputs[0], last());
}

// One fused tensor of q, k and v, by heads or by dim, and one of their gradients; or strided views of each.
TEST_P(KernelBits, DoNotDependOnViews) {
  const auto problem_of = [&](ViewKind view) {
    KernelProblem problem{"",
                          {.tq = 75,
                           .tk = 75,
                           .hq = 3,
                           .hk = 3,
                           .dqk = 20,
                           .dv = 20,
                           .dtype = dtype(),
                           .view = view,
                           .slices = {{0, 30, 0, 30, -20, 0}, {30, 70, 30, 75, -kUnlimited, 3}}}};
    Random random(33);
    problem.p.fill(random);
    return problem;
  };
  const KernelProblem plain = problem_of(ViewKind::thd);
  const AttentionProblem& p = plain.p;
  const Outputs want(p);
  want.run(plain, kernel(), last());
  for (const ViewKind view : {ViewKind::sbhd, ViewKind::gaps, ViewKind::head_major}) {
    SCOPED_TRACE(static_cast<int>(view));
    const KernelProblem strided = problem_of(view);
    const Outputs got(strided.p);
    got.run(strided, kernel(), last());
    expect_same_bits(got, want, last());
  }
  const Buffer by_heads(dtype(), p.tq, 9, 20), by_heads_back(dtype(), p.tq, 9, 20);
  const Buffer by_dim(dtype(), p.tq, 3, 60), by_dim_back(dtype(), p.tq, 3, 60);
  const std::pair<QkvViews<void>, QkvViews<void>> fused[] = {
      {qkv_3hd(by_heads.view(), 3, 3), qkv_3hd(by_heads_back.view(), 3, 3)},
      {qkv_h3d(by_dim.view()), qkv_h3d(by_dim_back.view())}};
  for (const auto& [in, grad] : fused) {
    from_f64(p.q.values(), in.q);
    from_f64(p.k.values(), in.k);
    from_f64(p.v.values(), in.v);
    const Outputs got(p);
    ForwardArgs forward = got.forward_args(plain);
    forward.q = in.q;
    forward.k = in.k;
    forward.v = in.v;
    attend(forward, kernel());
    expect_same_bits(got, want, Pass::forward);
    if (last() == Pass::forward) continue;
    BackwardArgs backward = got.backward_args(plain);
    backward.q = in.q;
    backward.k = in.k;
    backward.v = in.v;
    backward.dq = grad.q;
    backward.dk = grad.k;
    backward.dv = grad.v;
    attend_backward(backward, kernel());
    EXPECT_EQ(bits(to_f64(grad.q)), bits(want.backward.dq));
    EXPECT_EQ(bits(to_f64(grad.k)), bits(want.backward.dk));
    EXPECT_EQ(bits(to_f64(grad.v)), bits(want.backward.dv));
  }
}

}  // namespace
}  // namespace weft::test
