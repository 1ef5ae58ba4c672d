// The decode cache: sequences that grow a few tokens at a time, against one pass over the whole.
#include "weft/kv_cache.h"

#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include "check/tensors.h"
#include "prepare/kv_alone.h"
#include "prepare/kv_sequences.h"
#include "refusal.h"
#include "weft/kv_buffer.h"
#include "weft/reference.h"

namespace weft::test {
namespace {

// Tokens come a few at a time, sequences have gaps between them, and what was never filled is NaN.
TEST(KvCache, DecodesAsOnePassWould) {
  std::mt19937_64 engine(21);
  for (const Mask& mask : masks()) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const List rooms{40, 7, 64, 10}, offsets{3, 43, 50, 114, 124};
      Tensor k(dtype, 130, 2, 24), v(dtype, 130, 2, 16);
      KvCache cache(k.view, v.view, offsets);
      const auto always = [](Index) { return true; };
      std::vector<Tensor> qs, ks, vs;
      for (const Index room : rooms) {
        qs.push_back(check::random_tensor(engine, dtype, room, 4, 24, always));
        ks.push_back(check::random_tensor(engine, dtype, room, 2, 24, always));
        vs.push_back(check::random_tensor(engine, dtype, room, 2, 16, always));
      }
      for (int step = 0; step < 12; ++step) {
        List counts, before;
        Index total = 0;
        for (Index i = 0; i < 4; ++i) {
          before.push_back(cache.used(i));
          counts.push_back(min_of(cache.room(i), static_cast<Index>(engine() % (step == 0 ? 20 : 4))));
          total += counts.back();
        }
        const auto packed = [&](const std::vector<Tensor>& from) {
          Tensor to(dtype, total, from[0].view.heads, from[0].view.dim);
          std::byte* at_byte = to.bytes.data();
          for (std::size_t i = 0; i < counts.size(); ++i) {
            const std::size_t bytes = at(counts[i] * from[i].row_bytes());
            if (bytes > 0) std::memcpy(at_byte, from[i].bytes.data() + before[i] * from[i].row_bytes(), bytes);
            at_byte += bytes;
          }
          return to;
        };
        const Tensor q = packed(qs), new_k = packed(ks), new_v = packed(vs);
        if (total == 0) continue;
        Tensor out(dtype, total, 4, 16), lse(DType::f32, total, 4, 1);
        cache.append(counts, new_k.view, new_v.view);
        cache.attend(counts, {.q = q.view, .out = out.view, .lse = lse.view}, mask);
        Index row = 0;
        for (std::size_t i = 0; i < counts.size(); ++i) {
          if (counts[i] == 0) continue;
          const Index end = before[i] + counts[i];
          Tensor want(DType::f64, end, 4, 16);
          const Problem alone(Stream::from_lengths(List{end}), mask);
          const std::vector<Slice> slices = alone.global_slices();
          reference_forward({.q = rows_of(ConstTensorView(qs[i].view), {0, end}),
                             .k = rows_of(ConstTensorView(ks[i].view), {0, end}),
                             .v = rows_of(ConstTensorView(vs[i].view), {0, end}),
                             .slices = slices,
                             .out = want.view});
          const std::vector<double> a = to_f64(rows_of(out.view, {row, row + counts[i]}));
          const std::vector<double> b = to_f64(rows_of(want.view, {before[i], end}));
          for (std::size_t n = 0; n < a.size(); ++n) ASSERT_NEAR(a[n], b[n], dtype == DType::f32 ? 1e-5 : 0.04);
          row += counts[i];
        }
      }
    }
  }
}

// Keys and slices are the cache's and the buffer's own business: their arguments have no such fields.
template <class Args>
concept HasSlices = requires(Args args) { args.slices; } || requires(Args args) { args.device_plan; };
template <class Args>
concept HasKeys = requires(Args args) { args.k; } || requires(Args args) { args.v; };
static_assert(!HasSlices<KvCacheArgs> && !HasSlices<KvBufferForwardArgs> && !HasSlices<KvBufferBackwardArgs>);
static_assert(!HasKeys<KvCacheArgs> && !HasKeys<KvBufferBackwardArgs> && HasKeys<KvBufferForwardArgs>);

TEST(KvCache, KeepsRejectsAndRefuses) {
  Tensor k(DType::f32, 20, 1, 8), v(DType::f32, 20, 1, 8);
  TensorView shared = v.view;
  shared.row_stride = 0;
  expect_refusal([&] { KvCache(k.view, shared, List{0, 8, 20}); }, {"v is written to"});
  expect_refusal([&] { KvCache(shared, v.view, List{0, 8, 20}); }, {"k is written to"});
  KvCache cache(k.view, v.view, List{0, 8, 20}, List{6, 0});
  EXPECT_EQ(cache.room(0), 2);
  for (const Index none : {Index{-1}, Index{2}, Index{1000000}, Index{1} << 62}) {
    expect_refusal([&] { static_cast<void>(cache.room(none)); }, {"sequences"});
    expect_refusal([&] { static_cast<void>(cache.used(none)); }, {"sequences"});
    expect_refusal([&] { cache.keep(none, 0); }, {"sequences"});
  }
  cache.keep(0, 4);
  EXPECT_EQ(cache.used(0), 4);
  const Tensor rows(DType::f32, 5, 1, 8);
  expect_refusal([&] { cache.append(List{5, 0}, rows.view, rows.view); }, {"sequence 0", "5 new rows", "room for 4"});
  EXPECT_EQ(cache.used(0), 4);
  expect_refusal([&] { cache.append(List{1}, rows.view, rows.view); }, {"1 counts for 2"});
  expect_refusal([&] { cache.slices(List{0, 1}); }, {"sequence 1", "holds 0"});
  expect_refusal([&] { cache.keep(1, 1); }, {"holds 0"});
  EXPECT_EQ(cache.slices(List{2, 0}), (std::vector<Slice>{{0, 2, 0, 4, -kUnlimited, 2}}));
}

}  // namespace
}  // namespace weft::test
