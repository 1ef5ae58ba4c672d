// What no bit of a result may depend on: padding, how queries were cut, where rows begin, threads, views.
#include <limits>
#include <thread>

#include <gtest/gtest.h>

#include "kernel/query_cuts.h"

namespace weft::test {
namespace {

class KernelBits : public ForwardKernelTest {
 protected:
  void TearDown() override { set_cpu_threads(0); }
  void run(const Outputs& outputs, const KernelProblem& problem) const {
    outputs.run(problem, kernel(), last_pass(), true);
  }
};
WEFT_FOR_EACH_KERNEL(KernelBits);

// Several tiles, grouped heads, padding everywhere, a learnable sink.
KernelProblem packed(DType dtype, const Mask& mask = {.causal = true}, Index first = 5, Index dim = 40) {
  const Stream stream = padded({first, first + 150, first + 160, first + 400}, {141, 1, 233}, first + 410);
  const AttentionProblem base{
      .hq = 4, .hk = 2, .dqk = dim, .dv = dim - 16, .dtype = dtype, .sink = Sink::Kind::learnable};
  return make_problem(base, stream, mask, 31);
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
  for (const Index dim : fewer_if_sanitized<Index>({40, 128, 192, 256, 528}, 1)) {
    if (refusal({.pass = last_pass(), .dim_qk = dim, .dim_v = dim - 16})) continue;
    for (const Mask& mask : {Mask{.causal = true}, Mask{.left = 30, .right = 5}}) {
      SCOPED_TRACE(dim);
      std::vector<KernelProblem> problems;
      for (int i = 0; i < 2; ++i) problems.push_back(packed(dtype(), mask, 5, dim));
      const Outputs zeros(problems[0].p), filled(problems[1].p);
      const Outputs* outputs[] = {&zeros, &filled};
      const std::vector<double> values[] = {{0}, {kNan, kInf, -kInf, 1e4, kNan}};
      for (std::size_t i = 0; i < 2; ++i) {
        const AttentionProblem& p = problems[i].p;
        for (const Buffer* b : {&p.q, &p.dout}) fill_unused(*b, p.q_used, values[i]);
        for (const Buffer* b : {&p.k, &p.v}) fill_unused(*b, p.k_used, values[i]);
        attend_on(kernel(), outputs[i]->forward_args(problems[i]));
      }
      expect_same_bits(filled, zeros, Pass::forward);
      if (last_pass() == Pass::forward) continue;
      for (std::size_t i = 0; i < 2; ++i) {  // what the backward reads of padding is not the forward's either
        fill_unused(outputs[i]->forward.out, problems[i].p.q_used, values[i]);
        fill_unused(outputs[i]->forward.lse, problems[i].p.q_used, values[i]);
        KernelBackwardArgs args = outputs[i]->backward_args(problems[i]);
        args.deterministic = true;
        attend_backward_on(kernel(), args);
      }
      fill_unused(filled.forward.out, problems[1].p.q_used, {0});
      fill_unused(filled.forward.lse, problems[1].p.q_used, {0});
      expect_same_bits(filled, zeros, Pass::backward);
      if (!on_gpu()) continue;
      // Without `deterministic` the bits of dq may change, but no padding reaches it. Both runs are needed for dk:
      // cuda.sm90 then adds it up in another order.
      for (std::size_t i = 0; i < 2; ++i) attend_backward_on(kernel(), outputs[i]->backward_args(problems[i]));
      for (const double x : filled.backward.dq.values()) ASSERT_FALSE(std::isnan(x));
      EXPECT_EQ(bits(filled.backward.dk), bits(zeros.backward.dk));
      EXPECT_EQ(bits(filled.backward.dv), bits(zeros.backward.dv));
    }
  }
}

TEST_P(KernelBits, DeterministicIsTheSameOnEveryRun) {
  for (const Index dim : {80, 528}) {
    if (refusal({.pass = last_pass(), .dim_qk = dim, .dim_v = dim - 16})) continue;
    const KernelProblem problem = packed(dtype(), {.causal = true}, 5, dim);
    const Outputs first(problem.p);
    run(first, problem);
    for (int i = 0; i < (on_gpu() ? 4 : 1); ++i) {
      const Outputs again(problem.p);
      run(again, problem);
      expect_same_bits(again, first, last_pass());
    }
  }
}

// Trees of all rows of the documents of expect_same_however_cut.
Mask forest() {
  std::vector<Slice> slices;
  const auto add = [&](const check::TreeShape& tree, Index first) {
    for (const Slice& s : check::tree_slices(tree, first)) slices.push_back(s);
  };
  add(check::answers_tree(60, 9, 10), 0);
  add(check::answers_tree(1, 0, 0), 192);
  add(check::even_tree(3, 2, 11), 240);
  add(check::history_tree(10, 22, 20, false), 336);
  return {.slices = std::move(slices)};
}

TEST_P(KernelBits, DoNotDependOnHowQueriesAreCut) {
  const std::vector<Mask> masks = fewer_if_sanitized<Mask>(
      {{.left = 64, .right = 10}, {.causal = true}, {.causal = true, .chunk = 50}, forest()}, 1);
  for (const Mask& mask : masks) {
    expect_same_however_cut(kernel(), mask,
                            {.dtype = dtype(),
                             .layouts = {LayoutKind::contiguous, LayoutKind::zigzag, LayoutKind::dual_chunk},
                             .rank_counts = fewer_if_sanitized<Index>({3, 8, 1, 2, 4}, 2)});
    if (!on_gpu()) continue;
    for (const Index dim : {40, 128, 256, 400}) {
      if (refusal({.dim_qk = dim, .dim_v = dim})) continue;
      for (const Index keys_per_split : {0, 128})
        expect_same_however_cut(kernel(), mask,
                                {.dtype = dtype(), .dqk = dim, .dv = dim - 8, .keys_per_split = keys_per_split});
    }
  }
}

// The same documents further on in a longer buffer.
TEST_P(KernelBits, DoNotDependOnTheFirstOffset) {
  const KernelProblem near = packed(dtype(), {.causal = true}, 0);
  const Outputs want(near.p);
  run(want, near);
  for (const Index first : fewer_if_sanitized<Index>({7, 101, 1, 64}, 2)) {
    KernelProblem far = packed(dtype(), {.causal = true}, first);
    std::vector<Index> tokens, back;
    for (Index t = -first; t < near.p.tq; ++t) tokens.push_back(t < 0 ? kNoToken : t);
    for (Index t = 0; t < near.p.tq; ++t) back.push_back(t + first);
    for (const auto tensor :
         {&AttentionProblem::q, &AttentionProblem::k, &AttentionProblem::v, &AttentionProblem::dout})
      far.p.*tensor = rows_of(near.p.*tensor, tokens);
    far.p.sink_logits.set(near.p.sink_logits.values());
    const Outputs got(far.p);
    run(got, far);
    EXPECT_EQ(bits(rows_of(got.forward.out, back)), bits(want.forward.out)) << first;
    EXPECT_EQ(bits(rows_of(got.forward.lse, back)), bits(want.forward.lse)) << first;
  }
}

TEST_P(KernelBits, DoNotDependOnThreads) {
  const KernelProblem problem = packed(dtype());
  const Outputs one(problem.p);
  set_cpu_threads(1);
  run(one, problem);
  for (const int threads : fewer_if_sanitized<int>({2, 1, 2, 3, 0}, 2)) {
    SCOPED_TRACE(threads);
    set_cpu_threads(threads);
    const Outputs again(problem.p);
    run(again, problem);
    expect_same_bits(again, one, last_pass());
  }
}

// Ranks that are threads share the kernels.
TEST_P(KernelBits, DoNotDependOnOtherCalls) {
  const KernelProblem problem = packed(dtype());
  std::vector<Outputs> outputs;
  for (int i = 0; i < 4; ++i) outputs.emplace_back(problem.p);
  run(outputs[0], problem);
  std::vector<std::thread> threads;
  for (std::size_t i = 1; i < 4; ++i) {
    threads.emplace_back([&, i] { run(outputs[i], problem); });
  }
  for (std::thread& t : threads) t.join();
  for (std::size_t i = 1; i < 4; ++i) expect_same_bits(outputs[i], outputs[0], last_pass());
}

// One fused tensor of q, k and v, by heads or by dim, and one of their gradients; or strided views of each.
TEST_P(KernelBits, DoNotDependOnViews) {
  const Index dim = on_gpu() ? 24 : 20;
  const auto problem_of = [&](ViewKind view) {
    return make_problem({.tq = 75, .tk = 75, .hq = 3, .hk = 3, .dqk = dim, .dv = dim, .dtype = dtype(), .view = view},
                        {{0, 30, 0, 30, -20, 0}, {30, 70, 30, 75, -kUnlimited, 3}}, 33);
  };
  const KernelProblem plain = problem_of(ViewKind::thd);
  const AttentionProblem& p = plain.p;
  const Outputs want(p);
  run(want, plain);
  for (const ViewKind view : {ViewKind::sbhd, ViewKind::gaps, ViewKind::head_major}) {
    SCOPED_TRACE(static_cast<int>(view));
    const KernelProblem strided = problem_of(view);
    const Outputs got(strided.p);
    run(got, strided);
    expect_same_bits(got, want, last_pass());
  }
  const Buffer by_heads(dtype(), p.tq, 9, dim), by_heads_back(dtype(), p.tq, 9, dim);
  const Buffer by_dim(dtype(), p.tq, 3, 3 * dim), by_dim_back(dtype(), p.tq, 3, 3 * dim);
  const std::pair<QkvViews<void>, QkvViews<void>> fused[] = {
      {qkv_3hd(by_heads.view(), 3, 3), qkv_3hd(by_heads_back.view(), 3, 3)},
      {qkv_h3d(by_dim.view()), qkv_h3d(by_dim_back.view())}};
  for (const auto& [in, grad] : fused) {
    from_f64(p.q.values(), in.q);
    from_f64(p.k.values(), in.k);
    from_f64(p.v.values(), in.v);
    const Outputs got(p);
    KernelForwardArgs forward = got.forward_args(plain);
    read_from(forward, in.q, in.k, in.v);
    attend_on(kernel(), forward);
    expect_same_bits(got, want, Pass::forward);
    if (last_pass() == Pass::forward) continue;
    KernelBackwardArgs backward = got.backward_args(plain);
    read_from(backward, in.q, in.k, in.v);
    write_to(backward, grad.q, grad.k, grad.v);
    backward.deterministic = true;
    attend_backward_on(kernel(), backward);
    EXPECT_EQ(bits(to_f64(grad.q)), bits(want.backward.dq));
    EXPECT_EQ(bits(to_f64(grad.k)), bits(want.backward.dk));
    EXPECT_EQ(bits(to_f64(grad.v)), bits(want.backward.dv));
  }
}

}  // namespace
}  // namespace weft::test
