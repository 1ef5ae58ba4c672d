// What kernels touch: rows that see nothing, and keys that nobody sees, are not even read, and offsets pass 2^31.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernel/kernel_problem.h"

namespace weft::test {
namespace {

using KernelMemory = BackwardKernelTest;
WEFT_FOR_EACH_CPU_KERNEL(KernelMemory);

// A tensor whose rows lie far apart, each on pages of its own. Pages that are never touched take no memory.
class FarRows {
 public:
  FarRows(const ConstTensorView& shape, Index row_bytes) : row_bytes_(row_bytes), bytes_(at(shape.rows * row_bytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) throw std::runtime_error("mmap failed");
    view_ = thd(data_, shape.dtype, shape.rows, shape.heads, shape.dim);
    view_.row_stride = row_bytes / size_of(shape.dtype);
  }
  FarRows(const Buffer& from, Index row_bytes) : FarRows(ConstTensorView(from.view()), row_bytes) {
    from_f64(from.values(), view_);
  }
  FarRows(const FarRows&) = delete;
  FarRows& operator=(const FarRows&) = delete;
  ~FarRows() { munmap(data_, bytes_); }

  // Rows outside can be neither read nor written.
  void close_all_but(Range open) const {
    for (Index row = 0; row < view_.rows; ++row) {
      if (row >= open.begin && row < open.end) continue;
      mprotect(static_cast<char*>(data_) + row * row_bytes_, at(row_bytes_), PROT_NONE);
    }
  }
  const TensorView& view() const { return view_; }

 private:
  Index row_bytes_;
  std::size_t bytes_;
  void* data_ = nullptr;
  TensorView view_;
};

template <class Args>
void read_from(const FarRows& q, const FarRows& k, const FarRows& v, Args& args) {
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
}

// Of the first rectangle, the band shows keys 40 .. 42 to rows 20 .. 22, one each, and nothing else.
TEST_P(KernelMemory, RowsThatSeeNothingAreNotRead) {
  KernelProblem problem{"",
                        {.tq = 80,
                         .tk = 90,
                         .hq = 2,
                         .dqk = 33,
                         .dv = 20,
                         .dtype = dtype(),
                         .sink = Sink::Kind::learnable,
                         .slices = {{20, 80, 3, 43, 20, 20}, {0, 8, 5, 5}}}};
  const AttentionProblem& p = problem.p;
  Random random(41);
  problem.p.fill(random);
  const Range rows{20, 23}, keys{40, 43};
  for (Index i = 0; i < p.tq; ++i) ASSERT_EQ(p.q_used[at(i)], i >= rows.begin && i < rows.end);
  for (Index j = 0; j < p.tk; ++j) ASSERT_EQ(p.k_used[at(j)], j >= keys.begin && j < keys.end);

  const Outputs plain(p), closed(p);
  plain.run(problem, kernel(), Pass::backward);
  const Index page = sysconf(_SC_PAGESIZE);
  const FarRows q(p.q, page), k(p.k, page), v(p.v, page), dout(p.dout, page);
  const FarRows out(plain.forward.out, page), lse(plain.forward.lse, page);
  for (const FarRows* t : {&q, &dout, &out, &lse}) t->close_all_but(rows);
  for (const FarRows* t : {&k, &v}) t->close_all_but(keys);
  KernelForwardArgs forward = closed.forward_args(problem);
  read_from(q, k, v, forward);
  attend(forward, kernel());
  KernelBackwardArgs backward = closed.backward_args(problem);
  read_from(q, k, v, backward);
  backward.dout = dout.view();
  backward.out = out.view();
  backward.lse = lse.view();
  attend_backward(backward, kernel());
  expect_same_bits(closed, plain, Pass::backward);

  // And what is written there is exact.
  const std::vector<double> lses = closed.forward.lse.values(), sinks = p.sink_logits.values();
  for (Index row = 0; row < p.tq; ++row) {
    for (Index head = 0; head < p.hq && !p.q_used[at(row)]; ++head) {
      EXPECT_EQ(lses[at(row * p.hq + head)], static_cast<float>(sinks[at(head)])) << "row " << row;
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
  KernelProblem problem{"",
                        {.tq = 300,
                         .tk = 301,
                         .hq = 2,
                         .dqk = 8,
                         .dv = 8,
                         .dtype = dtype(),
                         .slices = {{0, 299, 0, 300, -kUnlimited, 1}}}};
  const AttentionProblem& p = problem.p;
  Random random(42);
  problem.p.fill(random);
  const Outputs near(p), far(p);
  near.run(problem, kernel(), Pass::backward);
  const Index apart = size_of(dtype()) << 24;
  const FarRows q(p.q, apart), k(p.k, apart), v(p.v, apart), dout(p.dout, apart);
  const FarRows out(far.forward.out, apart), lse(far.forward.lse, size_of(DType::f32) << 24);
  const FarRows dq(far.backward.dq, apart), dk(far.backward.dk, apart), dv(far.backward.dv, apart);
  KernelForwardArgs forward = far.forward_args(problem);
  read_from(q, k, v, forward);
  forward.out = out.view();
  forward.lse = lse.view();
  attend(forward, kernel());
  KernelBackwardArgs backward = far.backward_args(problem);
  read_from(q, k, v, backward);
  backward.dout = dout.view();
  backward.out = out.view();
  backward.lse = lse.view();
  backward.dq = dq.view();
  backward.dk = dk.view();
  backward.dv = dv.view();
  attend_backward(backward, kernel());
  EXPECT_EQ(bits(to_f64(out.view())), bits(near.forward.out));
  EXPECT_EQ(bits(to_f64(lse.view())), bits(near.forward.lse));
  EXPECT_EQ(bits(to_f64(dq.view())), bits(near.backward.dq));
  EXPECT_EQ(bits(to_f64(dk.view())), bits(near.backward.dk));
  EXPECT_EQ(bits(to_f64(dv.view())), bits(near.backward.dv));
}

}  // namespace
}  // namespace weft::test
