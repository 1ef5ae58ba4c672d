// What kernels touch: rows that see nothing, and keys that nobody sees, are not even read, and offsets pass 2^31.
#include <gtest/gtest.h>

#include "kernel/kernel_problem.h"
#include "kernel/mapped_tensor.h"

namespace weft::test {
namespace {

using KernelMemory = BackwardKernelTest;
WEFT_FOR_EACH_CPU_KERNEL(KernelMemory);
INSTANTIATE_TEST_SUITE_P(F64, KernelMemory, testing::Values(KernelParam{"reference", DType::f64}), param_name);

// Of the first rectangle, the band shows keys 40 .. 42 to rows 20 .. 22, one each, and nothing else.
TEST_P(KernelMemory, RowsThatSeeNothingAreNotRead) {
  const KernelProblem problem =
      make_problem({.tq = 80, .tk = 90, .hq = 2, .dqk = 33, .dv = 20, .dtype = dtype(), .sink = Sink::Kind::learnable},
                   {{20, 80, 3, 43, 20, 20}, {0, 8, 5, 5}}, 41);
  const AttentionProblem& p = problem.p;
  const Range rows{20, 23}, keys{40, 43};
  for (Index i = 0; i < p.tq; ++i) ASSERT_EQ(p.q_used[at(i)], i >= rows.begin && i < rows.end);
  for (Index j = 0; j < p.tk; ++j) ASSERT_EQ(p.k_used[at(j)], j >= keys.begin && j < keys.end);

  const bool f64 = dtype() == DType::f64;
  const Outputs plain(p, f64 ? DType::f64 : DType::f32), closed(p, f64 ? DType::f64 : DType::f32);
  plain.run(problem, kernel(), Pass::backward);
  const Index page = sysconf(_SC_PAGESIZE);
  const MappedTensor q(p.q, page), k(p.k, page), v(p.v, page), dout(p.dout, page);
  const MappedTensor out(plain.forward.out, page), lse(plain.forward.lse, page);
  for (const MappedTensor* t : {&q, &dout, &out, &lse}) t->close_all_but(rows);
  for (const MappedTensor* t : {&k, &v}) t->close_all_but(keys);
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
  backward.out = backward.lse = {};  // computed anew
  attend_backward(backward, kernel());
  if (f64) expect_same_bits(closed, plain, Pass::backward);

  // And what is written there is exact.
  const std::vector<double> lses = closed.forward.lse.values(), sinks = p.sink_logits.values();
  for (Index row = 0; row < p.tq; ++row) {
    for (Index head = 0; head < p.hq && !p.q_used[at(row)]; ++head) {
      const double sink = sinks[at(head)];
      EXPECT_EQ(lses[at(row * p.hq + head)], f64 ? sink : static_cast<float>(sink)) << "row " << row;
    }
  }
  const auto expect_zeros = [](const Buffer& buffer, Range but) {
    const std::vector<double> values = buffer.values();
    const Index width = buffer.view().heads * buffer.view().dim;
    for (Index row = 0; row < buffer.view().rows; ++row) {
      if (row >= but.begin && row < but.end) continue;
      for (Index i = 0; i < width; ++i) ASSERT_EQ(values[at(row * width + i)], 0) << "row " << row;
    }
  };
  expect_zeros(closed.forward.out, rows);
  expect_zeros(closed.backward.dq, rows);
  expect_zeros(closed.backward.dk, keys);
  expect_zeros(closed.backward.dv, keys);
}

// Rows 2^24 elements apart: offsets pass 2^31 at row 128 and 2^32 at row 256, of every tensor. There are rows and keys
// enough for several tiles and parts; the last row and the last key are in no slice, and have to be cleared.
TEST_P(KernelMemory, OffsetsPass32Bits) {
  const KernelProblem problem = make_problem({.tq = 300, .tk = 301, .hq = 2, .dqk = 8, .dv = 8, .dtype = dtype()},
                                             {{0, 299, 0, 300, -kUnlimited, 1}}, 42);
  const AttentionProblem& p = problem.p;
  const Outputs near(p), far(p);
  near.run(problem, kernel(), Pass::backward);
  const Index apart = size_of(dtype()) << 24;
  const MappedTensor q(p.q, apart), k(p.k, apart), v(p.v, apart), dout(p.dout, apart);
  const MappedTensor out(far.forward.out, apart), lse(far.forward.lse, size_of(DType::f32) << 24);
  const MappedTensor dq(far.backward.dq, apart), dk(far.backward.dk, apart), dv(far.backward.dv, apart);
  KernelForwardArgs forward = far.forward_args(problem);
  read_from(forward, q.view, k.view, v.view);
  forward.out = out.view;
  forward.lse = lse.view;
  attend(forward, kernel());
  KernelBackwardArgs backward = far.backward_args(problem);
  read_from(backward, q.view, k.view, v.view);
  write_to(backward, dq.view, dk.view, dv.view);
  backward.dout = dout.view;
  backward.out = out.view;
  backward.lse = lse.view;
  attend_backward(backward, kernel());
  EXPECT_EQ(bits(to_f64(out.view)), bits(near.forward.out));
  EXPECT_EQ(bits(to_f64(lse.view)), bits(near.forward.lse));
  EXPECT_EQ(bits(to_f64(dq.view)), bits(near.backward.dq));
  EXPECT_EQ(bits(to_f64(dk.view)), bits(near.backward.dk));
  EXPECT_EQ(bits(to_f64(dv.view)), bits(near.backward.dv));
}

}  // namespace
}  // namespace weft::test
