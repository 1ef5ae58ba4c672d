#include "weft/tensor.h"

#include <array>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "index.h"
#include "refusal.h"

namespace weft {
namespace {

constexpr Index kBatch = 2, kLength = 5, kTokens = kBatch * kLength, kHeads = 3, kDim = 4;

std::vector<float> counted(Index size) {
  std::vector<float> values(at(size));
  std::iota(values.begin(), values.end(), 0.0f);
  return values;
}

// Every element of the view is the one at index(sequence, position, head, i) of the buffer.
template <class Formula>
void expect_elements(const ConstTensorView& view, Formula index) {
  ASSERT_EQ(view.rows, kTokens);
  ASSERT_EQ(view.heads, kHeads);
  ASSERT_EQ(view.dim, kDim);
  for (Index row = 0; row < kTokens; ++row) {
    for (Index head = 0; head < kHeads; ++head) {
      for (Index i = 0; i < kDim; ++i) {
        ASSERT_EQ(view.at<float>(row, head)[i], static_cast<float>(index(row / kLength, row % kLength, head, i)))
            << row << " " << head << " " << i;
      }
    }
  }
}

TEST(TensorView, PlainLayouts) {
  const std::vector<float> data = counted(kTokens * kHeads * kDim);
  expect_elements(thd(data.data(), DType::f32, kTokens, kHeads, kDim),
                  [](Index b, Index s, Index h, Index i) { return ((b * kLength + s) * kHeads + h) * kDim + i; });
  expect_elements(bshd(data.data(), DType::f32, kBatch, kLength, kHeads, kDim),
                  [](Index b, Index s, Index h, Index i) { return ((b * kLength + s) * kHeads + h) * kDim + i; });
  expect_elements(sbhd(data.data(), DType::f32, kBatch, kLength, kHeads, kDim),
                  [](Index b, Index s, Index h, Index i) { return ((s * kBatch + b) * kHeads + h) * kDim + i; });
}

// q, k and v of one tensor: number `which` of three, by heads or by elements of a head.
template <class Formula>
void expect_three(const QkvViews<const void>& qkv, Formula index) {
  Index which = 0;
  for (const ConstTensorView& view : {qkv.q, qkv.k, qkv.v}) {
    expect_elements(view, [&](Index b, Index s, Index h, Index i) { return index(b, s, h, i, which); });
    ++which;
  }
}

TEST(TensorView, Interleaved) {
  const std::vector<float> data = counted(kTokens * 3 * kHeads * kDim);
  const float* all = data.data();
  expect_three(qkv_3hd(thd(all, DType::f32, kTokens, 3 * kHeads, kDim), kHeads, kHeads),
               [](Index b, Index s, Index h, Index i, Index which) {
                 return (((b * kLength + s) * 3 + which) * kHeads + h) * kDim + i;
               });
  expect_three(qkv_3hd(sbhd(all, DType::f32, kBatch, kLength, 3 * kHeads, kDim), kHeads, kHeads),
               [](Index b, Index s, Index h, Index i, Index which) {
                 return (((s * kBatch + b) * 3 + which) * kHeads + h) * kDim + i;
               });
  expect_three(qkv_h3d(bshd(all, DType::f32, kBatch, kLength, kHeads, 3 * kDim)),
               [](Index b, Index s, Index h, Index i, Index which) {
                 return (((b * kLength + s) * kHeads + h) * 3 + which) * kDim + i;
               });
  expect_three(qkv_h3d(sbhd(all, DType::f32, kBatch, kLength, kHeads, 3 * kDim)),
               [](Index b, Index s, Index h, Index i, Index which) {
                 return (((s * kBatch + b) * kHeads + h) * 3 + which) * kDim + i;
               });
}

TEST(TensorView, FusedGroupedQuery) {
  const std::vector<float> data = counted(2 * 8 * kDim);
  const auto [q, k, v] = qkv_3hd(thd(data.data(), DType::f32, 2, 8, kDim), 4, 2);
  EXPECT_EQ(q.heads, 4);
  EXPECT_EQ(k.heads, 2);
  EXPECT_EQ(q.at<float>(1, 3)[0], (8 + 3) * kDim);
  EXPECT_EQ(k.at<float>(1, 1)[0], (8 + 5) * kDim);
  EXPECT_EQ(v.at<float>(1, 1)[0], (8 + 7) * kDim);
}

TEST(TensorView, OffsetsPass32Bits) {
  const float* none = nullptr;
  const Index last = (1 << 20) - 1, row = Index{64} * 128;
  EXPECT_EQ(thd(none, DType::f32, 1 << 20, 64, 128).offset(last, 63), last * row + 63 * 128);
  // The last of two sequences half as long, far apart by sequence and by head.
  ConstTensorView apart = sbhd(none, DType::f32, 2, 1 << 19, 64, 128);
  apart.outer_stride = apart.head_stride = Index{1} << 33;
  EXPECT_EQ(apart.offset(last, 63), Index{(1 << 19) - 1} * 2 * row + (Index{64} << 33));
}

TEST(TensorView, WritableViewsBecomeConstOnes) {
  std::vector<float> data(8);
  const TensorView view = thd(data.data(), DType::f32, 2, 2, 2);
  *view.at<float>(1, 1) = 5;
  const ConstTensorView same = view;
  EXPECT_EQ(*same.at<float>(1, 1), 5);
  EXPECT_EQ(same.row_stride, 4);
  EXPECT_FALSE(TensorView{}.given());
  EXPECT_TRUE(same.given());
}

// The whole text of the refusal, or nothing if there is none.
std::string refusal(const ConstTensorView& view, const TensorSpec& spec) {
  return error_of([&] { check_tensor(view, spec); });
}

TEST(CheckTensor, TakesWhatIsRight) {
  std::vector<float> data(400);
  EXPECT_EQ(refusal(thd(data.data(), DType::f32, 10, 3, 4), {"out", 10, 3, 4, kDTypes, true}), "");
  EXPECT_EQ(refusal(sbhd(data.data(), DType::f32, 2, 5, 3, 4), {"out", 10, 3, 4, kDTypes, true}), "");
  const auto [q, k, v] = qkv_h3d(thd(data.data(), DType::f32, 10, 3, 12));
  for (const TensorView& part : {q, k, v}) EXPECT_EQ(refusal(part, {.name = "dq", .output = true}), "");
  EXPECT_EQ(refusal(thd(static_cast<float*>(nullptr), DType::f32, 0, 3, 4), {.name = "q"}), "");
  TensorView broadcast = thd(data.data(), DType::f32, 10, 3, 4);
  broadcast.head_stride = 0;  // one head read by all: fine to read
  EXPECT_EQ(refusal(broadcast, {.name = "k"}), "");
  broadcast.heads = 1;  // a stride that is never taken cannot overlap
  EXPECT_EQ(refusal(broadcast, {.name = "k", .output = true}), "");
}

TEST(CheckTensor, RefusesWithTheValuesAndTheWayOut) {
  std::vector<float> data(400);
  const TensorView good = thd(data.data(), DType::f32, 10, 3, 4);
  const std::array statistics = {DType::f32, DType::f64};

  EXPECT_EQ(refusal(good, {.name = "dq", .rows = 9, .dim = 4}),
            "dq has shape [10, 3, 4]; give it shape [9, any, 4] (rows, heads, dim)");
  TensorView view = good;
  view.dtype = DType::bf16;
  EXPECT_EQ(refusal(view, {.name = "lse", .dtypes = statistics}), "lse is bf16; give it as f32 or f64");
  view = good;
  view.data = nullptr;
  EXPECT_EQ(refusal(view, {.name = "q"}), "q has 10 rows and a null pointer; point it at its elements");
  view.data = reinterpret_cast<char*>(data.data()) + 2;
  EXPECT_EQ(refusal(view, {.name = "q"}), "q is f32 and lies 2 bytes past a multiple of 4; align it to 4 bytes");
  view.dtype = DType::bf16;
  EXPECT_EQ(refusal(view, {.name = "q"}), "");
  EXPECT_EQ(refusal(thd(data.data(), DType::f32, 10, 3, 0), {.name = "v"}),
            "v has shape [10, 3, 0]; give at least 0 rows, 1 head and a dim of 1");
  EXPECT_NE(refusal(thd(data.data(), DType::f32, 10, 0, 4), {.name = "v"}), "");
  EXPECT_NE(refusal(thd(data.data(), DType::f32, -1, 3, 4), {.name = "v"}), "");
  EXPECT_EQ(refusal(thd(data.data(), DType::f32, kMaxTokens + 1, 3, 4), {.name = "k"}),
            "k has shape [2147483648, 3, 4]: a size is past 2147483647; split the batch");
}

TEST(CheckTensor, RefusesStrides) {
  std::vector<float> data(400);
  const TensorView good = thd(data.data(), DType::f32, 10, 3, 4);
  TensorView view = good;
  view.row_stride = -12;
  EXPECT_EQ(refusal(view, {.name = "q"}),
            "q has a negative stride (row -12, head 4); give strides of at least 0, in elements");
  view = good;
  view.row_stride = 11;
  EXPECT_EQ(refusal(view, {.name = "q"}), "");
  EXPECT_EQ(refusal(view, {.name = "dq", .output = true}),
            "dq is written to, and its elements share memory: strides row 11, head 4 for shape [10, 3, 4]; let a head "
            "span at least 4 elements and a row at least 12 (contiguous: TensorView thd, bshd, sbhd)");
  view = good;
  view.head_stride = 3;
  EXPECT_NE(refusal(view, {.name = "dq", .output = true}), "");
  view = sbhd(data.data(), DType::f32, 2, 5, 3, 4);
  view.outer_stride = 11;
  EXPECT_NE(refusal(view, {.name = "dq", .output = true}).find("outer 11 every 5 rows"), std::string::npos);
  view = good;
  view.row_stride = Index{1} << 60;
  EXPECT_NE(refusal(view, {.name = "q"}).find("past 64-bit offsets"), std::string::npos);
  // Strides of 0: a view of little memory whose copy would wrap 64 bits.
  view = {data.data(), DType::f32, Index{1} << 30, Index{1} << 30, 4, 0, 0, 0, 0};
  EXPECT_EQ(refusal(view, {.name = "k"}),
            "k: 1073741824 x 1073741824 x 4 x 4 bytes are past what memory can be; give smaller sizes");
}

TEST(TensorView, PartsThatDoNotFitAreRefused) {
  std::vector<float> data(400);
  const TensorView view = thd(data.data(), DType::f32, 2, 8, 10);
  EXPECT_THROW(head_range(view, 6, 3), Error);
  EXPECT_THROW(head_range(view, -1, 3), Error);
  EXPECT_THROW(dim_range(view, 0, 0), Error);
  EXPECT_THROW(qkv_3hd(view, 4, 3), Error);
  EXPECT_THROW(qkv_h3d(view), Error);
}

}  // namespace
}  // namespace weft
