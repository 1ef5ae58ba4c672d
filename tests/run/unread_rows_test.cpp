// Rows that see nothing, and keys that nobody sees, are not even read: their memory is closed.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernel/attention_problem.h"

namespace weft::test {
namespace {

// A tensor of f64 with each row on its own page; pages of rows outside `open` cannot be read or written.
class PagedRows {
 public:
  PagedRows(const Buffer& from, Range open) : page_(sysconf(_SC_PAGESIZE)) {
    const ConstTensorView source = from.view();
    bytes_ = at(source.rows * page_);
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) throw std::runtime_error("mmap failed");
    view_ = thd(data_, DType::f64, source.rows, source.heads, source.dim);
    view_.row_stride = page_ / size_of(DType::f64);
    from_f64(from.values(), view_);
    for (Index row = 0; row < source.rows; ++row) {
      if (row < open.begin || row >= open.end) mprotect(static_cast<char*>(data_) + row * page_, at(page_), PROT_NONE);
    }
  }
  PagedRows(const PagedRows&) = delete;
  PagedRows& operator=(const PagedRows&) = delete;
  ~PagedRows() { munmap(data_, bytes_); }
  ConstTensorView view() const { return view_; }

 private:
  Index page_;
  std::size_t bytes_ = 0;
  void* data_ = nullptr;
  TensorView view_;
};

// Of the rectangle, the band shows keys 4 .. 6 to rows 2 .. 4, one each, and nothing else.
TEST(UnreadRows, ForwardAndBackward) {
  AttentionProblem p{.tq = 8, .tk = 9, .sink = Sink::Kind::learnable, .slices = {{2, 8, 3, 7, 2, 2}, {0, 8, 5, 5}}};
  Random random(41);
  p.fill(random);
  Range rows{8, 0}, keys{9, 0};
  for (Index i = 0; i < p.tq; ++i) {
    if (p.q_used[at(i)]) rows = {min_of(rows.begin, i), i + 1};
  }
  for (Index j = 0; j < p.tk; ++j) {
    if (p.k_used[at(j)]) keys = {min_of(keys.begin, j), j + 1};
  }
  ASSERT_EQ(rows, (Range{2, 5}));
  ASSERT_EQ(keys, (Range{4, 7}));

  const Forward plain(p), closed(p);
  reference_forward(plain.args(p));
  const PagedRows q(p.q, rows), k(p.k, keys), v(p.v, keys), dout(p.dout, rows);
  ForwardArgs args = closed.args(p);
  args.q = q.view();
  args.k = k.view();
  args.v = v.view();
  reference_forward(args);
  EXPECT_EQ(closed.out.values(), plain.out.values());

  const Backward plain_grad(p), closed_grad(p);
  reference_backward(plain_grad.args(p));
  const PagedRows out(plain.out, rows), lse(plain.lse, rows);
  for (const bool given : {false, true}) {
    BackwardArgs back = closed_grad.args(p);
    back.q = q.view();
    back.k = k.view();
    back.v = v.view();
    back.dout = dout.view();
    if (given) {
      back.out = out.view();
      back.lse = lse.view();
    }
    reference_backward(back);
    EXPECT_EQ(closed_grad.dq.values(), plain_grad.dq.values());
    EXPECT_EQ(closed_grad.dk.values(), plain_grad.dk.values());
    EXPECT_EQ(closed_grad.dv.values(), plain_grad.dv.values());
    EXPECT_EQ(closed_grad.dsink.values(), plain_grad.dsink.values());
  }
}

}  // namespace
}  // namespace weft::test
