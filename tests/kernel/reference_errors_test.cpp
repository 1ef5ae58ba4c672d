// Everything a caller of the reference can get wrong: refused before a byte is written, with the values and a way out.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "kernel/attention_problem.h"
#include "refusal.h"

namespace weft::test {
namespace {

AttentionProblem good() {
  return filled({.tq = 6, .tk = 5, .hq = 4, .hk = 2, .dqk = 3, .dv = 2, .sink = Sink::Kind::learnable}, {{0, 6, 0, 5}},
                31);
}

bool all_nan(const Buffer& buffer) {
  const std::vector<double> values = buffer.values();
  return std::all_of(values.begin(), values.end(), [](double x) { return std::isnan(x); });
}

// What is said of spoiled arguments; nothing was written then.
std::string forward_refusal(const std::function<void(KernelForwardArgs&)>& spoil) {
  const AttentionProblem p = good();
  const Forward result(p);
  KernelForwardArgs args = result.args(p);
  spoil(args);
  const std::string said = error_of([&] { reference_forward(args); });
  EXPECT_TRUE(said.empty() || (all_nan(result.out) && all_nan(result.lse) && all_nan(result.max_logit))) << said;
  return said;
}

std::string backward_refusal(const std::function<void(KernelBackwardArgs&)>& spoil) {
  const AttentionProblem p = good();
  const Backward result(p);
  KernelBackwardArgs args = result.args(p);
  spoil(args);
  const std::string said = error_of([&] { reference_backward(args); });
  EXPECT_TRUE(said.empty() || (all_nan(result.dq) && all_nan(result.dk) && all_nan(result.dv))) << said;
  return said;
}

TEST(ReferenceErrors, WhatIsRightIsTaken) {
  EXPECT_EQ(forward_refusal([](KernelForwardArgs&) {}), "");
  EXPECT_EQ(backward_refusal([](KernelBackwardArgs&) {}), "");
}

TEST(ReferenceErrors, Inputs) {
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.q.heads = 3; }),
            "q has 3 heads and k has 2: query heads must be a multiple of key heads; use 2 or 4 query heads, or give "
            "Attention::head_map");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.q.heads = 1; }),
            "q has 1 heads and k has 2: query heads must be a multiple of key heads; use 2 query heads, or give "
            "Attention::head_map");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.k.dim = 2; }),
            "q has dim 3 and k has dim 2; give both the same; only v's may differ");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.v.rows = 4; }),
            "k has 5 rows of 2 heads and v has 4 rows of 2 heads; give k and v the same rows and heads");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.k.dtype = DType::f32; }),
            "q is f64, k is f32 and v is f64; give all three the same dtype");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.v.data = nullptr; }),
            "v has 5 rows and a null pointer; point it at its elements");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.q.dim = 0; }),
            "q has shape [6, 4, 0]; give at least 0 rows, 1 head and a dim of 1");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.k.row_stride = -6; }),
            "k has a negative stride (row -6, head 3); give strides of at least 0, in elements");
}

TEST(ReferenceErrors, Attention) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  EXPECT_EQ(forward_refusal([&](KernelForwardArgs& a) { a.attention.scale = nan; }),
            "scale is nan; give a finite scale of at most 1e38, or none for 1 / sqrt(dim of q)");
  EXPECT_EQ(forward_refusal([&](KernelForwardArgs& a) { a.attention.scale = -inf; }),
            "scale is -inf; give a finite scale of at most 1e38, or none for 1 / sqrt(dim of q)");
  EXPECT_EQ(forward_refusal([&](KernelForwardArgs& a) { a.attention.softcap = -30; }),
            "softcap is -30; give a finite softcap above 0, from 1e-30 to 1e30, or 0 for none");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.keys_per_split = -5; }),
            "keys_per_split is -5; give the keys of a split, kUnlimited for none, or 0 for the default");
  EXPECT_NE(forward_refusal([&](KernelForwardArgs& a) { a.attention.softcap = nan; }), "");
  EXPECT_NE(forward_refusal([&](KernelForwardArgs& a) { a.attention.softcap = inf; }), "");
  // In f32 these would be infinite or 0, and every logit NaN.
  EXPECT_NE(forward_refusal([&](KernelForwardArgs& a) { a.attention.softcap = 1e-300; }), "");
  EXPECT_NE(forward_refusal([&](KernelForwardArgs& a) { a.attention.softcap = 1e300; }), "");
  EXPECT_NE(forward_refusal([&](KernelForwardArgs& a) { a.attention.scale = -1e300; }), "");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.attention.sink.logits.data = nullptr; }),
            "sink.logits has 1 rows and a null pointer; point it at its elements");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.attention.sink.logits.heads = 2; }),
            "sink.logits has shape [1, 2, 1]; give it shape [1, 4, 1] (rows, heads, dim)");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.attention.sink.logits.dtype = DType::bf16; }),
            "sink.logits is bf16; give it as f32 or f64");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.attention.sink.kind = Sink::Kind::none; }),
            "sink.logits is given and the sink is not learnable; use Sink::learnable(logits), or leave it out");
  const std::vector<Index> three(3), far = {0, 1, 2, 0};
  EXPECT_EQ(forward_refusal([&](KernelForwardArgs& a) { a.attention.head_map = three; }),
            "head_map has 3 entries and q has 4 heads; give one entry a query head");
  EXPECT_EQ(forward_refusal([&](KernelForwardArgs& a) { a.attention.head_map = far; }),
            "head_map sends query head 2 to K/V head 2 of 2; name one of 0 .. 1");
}

TEST(ReferenceErrors, Slices) {
  const auto refusal = [](const Slice& slice) {
    const std::vector<Slice> slices = {{0, 6, 0, 2}, slice};
    return forward_refusal([&](KernelForwardArgs& a) { a.slices = slices; });
  };
  EXPECT_EQ(refusal({0, 7, 2, 5, -1, 1}),
            "slice 1 (query rows 0 .. 7, key rows 2 .. 5, band -1 .. 1) does not lie in the 6 rows of q; let 0 <= "
            "q_begin <= q_end <= 6");
  EXPECT_EQ(refusal({0, 6, 2, 6, -1, 1}),
            "slice 1 (query rows 0 .. 6, key rows 2 .. 6, band -1 .. 1) does not lie in the 5 rows of k and v; let 0 "
            "<= k_begin <= k_end <= 5");
  EXPECT_NE(refusal({-1, 6, 2, 5}), "");
  EXPECT_NE(refusal({4, 3, 2, 5}), "");
  EXPECT_NE(refusal({0, 6, -2, 5}), "");
  EXPECT_NE(refusal({0, 6, 4, 3}), "");
  EXPECT_NE(refusal({0, 6, 2, 5, 2, 1}).find("band 2 .. 1) has a band with lo > hi"), std::string::npos);
  EXPECT_NE(refusal({0, 6, 2, 5, std::numeric_limits<Index>::min(), 0}).find("past kUnlimited"), std::string::npos);
  EXPECT_EQ(refusal({0, 6, 2, 5, -kUnlimited, kUnlimited}), "");
  EXPECT_EQ(refusal({3, 3, 2, 5}), "");
}

TEST(ReferenceErrors, Outputs) {
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.out = {}; }),
            "out has shape [0, 0, 0]; give at least 0 rows, 1 head and a dim of 1");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.out.dim = 1; }),
            "out has shape [6, 4, 1]; give it shape [6, 4, 2] (rows, heads, dim)");
  EXPECT_NE(forward_refusal([](KernelForwardArgs& a) { a.out.head_stride = 0; }).find("share memory"),
            std::string::npos);
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.lse.rows = 5; }),
            "lse has shape [5, 4, 1]; give it shape [6, 4, 1] (rows, heads, dim)");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.lse.dtype = DType::f16; }),
            "lse is f16; give it as f32 or f64");
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.max_logit.heads = 2; }),
            "max_logit has shape [1, 2, 1]; give it shape [1, 4, 1] (rows, heads, dim)");
  EXPECT_NE(forward_refusal([](KernelForwardArgs& a) { a.max_logit.head_stride = 0; }).find("max_logit is written to"),
            std::string::npos);
  EXPECT_EQ(forward_refusal([](KernelForwardArgs& a) { a.max_logit.data = nullptr; }),
            "max_logit has 1 rows and a null pointer; point it at its elements");
}

TEST(ReferenceErrors, Backward) {
  const AttentionProblem p = good();
  const Forward forward(p);
  EXPECT_EQ(backward_refusal([](KernelBackwardArgs& a) { a.dout.dim = 3; }),
            "dout has shape [6, 4, 3]; give it shape [6, 4, 2] (rows, heads, dim)");
  EXPECT_EQ(backward_refusal([](KernelBackwardArgs& a) { a.dq.dim = 2; }),
            "dq has shape [6, 4, 2]; give it shape [6, 4, 3] (rows, heads, dim)");
  EXPECT_EQ(backward_refusal([](KernelBackwardArgs& a) { a.dk.heads = 1; }),
            "dk has shape [5, 1, 3]; give it shape [5, 2, 3] (rows, heads, dim)");
  EXPECT_NE(backward_refusal([](KernelBackwardArgs& a) { a.dv.row_stride = 1; }).find("dv is written to"),
            std::string::npos);
  EXPECT_EQ(backward_refusal([&](KernelBackwardArgs& a) { a.out = forward.out.view(); }),
            "out is given without lse; give both, as the forward wrote them, or neither");
  EXPECT_EQ(backward_refusal([&](KernelBackwardArgs& a) { a.lse = forward.lse.view(); }),
            "lse is given without out; give both, as the forward wrote them, or neither");
  EXPECT_EQ(backward_refusal([&](KernelBackwardArgs& a) {
              a.out = forward.out.view();
              a.lse = token_heads(forward.lse.view().data, DType::f64, 6, 3);
            }),
            "lse has shape [6, 3, 1]; give it shape [6, 4, 1] (rows, heads, dim)");
  EXPECT_EQ(backward_refusal([&](KernelBackwardArgs& a) {
              a.out = forward.out.view();
              a.out.dim = 1;
              a.lse = forward.lse.view();
            }),
            "out has shape [6, 4, 1]; give it shape [6, 4, 2] (rows, heads, dim)");
  EXPECT_EQ(backward_refusal([](KernelBackwardArgs& a) { a.attention.sink = Sink::off_by_one(); }),
            "dsink is asked for and the sink is not learnable; leave dsink out, or use Sink::learnable(logits)");
  EXPECT_EQ(backward_refusal([](KernelBackwardArgs& a) { a.dsink.dtype = DType::f16; }),
            "dsink is f16; give it as f32 or f64");
  EXPECT_EQ(backward_refusal([](KernelBackwardArgs& a) { a.attention.softcap = -1; }),
            "softcap is -1; give a finite softcap above 0, from 1e-30 to 1e30, or 0 for none");
}

TEST(ReferenceErrors, State) {
  const AttentionProblem p = good();
  const Forward result(p);
  ReferenceState other(5, p.hq, p.dv);
  EXPECT_EQ(error_of([&] { reference_partial(result.args(p), other); }),
            "the state is of 5 rows, 4 heads, dim 2; make it ReferenceState(6, 4, 2) as q and v are");
  EXPECT_THROW(reference_finish(other, result.args(p)), Error);
  ReferenceState broken(p.tq, p.hq, p.dv);
  broken.accumulators.clear();
  EXPECT_THROW(reference_partial(result.args(p), broken), Error);
  EXPECT_THROW(reference_finish(broken, result.args(p)), Error);
}

}  // namespace
}  // namespace weft::test
