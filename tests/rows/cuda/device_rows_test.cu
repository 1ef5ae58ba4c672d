// Row kernels against the host's functions, byte by byte, rows that must be left included.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "cuda/device_array.h"
#include "refusal.h"
#include "weft/device_rows.h"

namespace weft {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Indices = std::vector<Index>;

Bytes random_bytes(check::Choices& c, Index n) {
  Bytes out(at(n));
  for (auto& b : out) b = static_cast<std::uint8_t>(c.pick(0, 255));
  return out;
}

// A tensor of any stride and alignment, on the host and on the device.
class Tensor {
 public:
  Tensor(check::Choices& c, Index rows, Index row_bytes, Index align)
      : shape_{nullptr, rows, row_bytes},
        shift_(align * c.pick(0, 2)),
        bytes_(bytes_for(c, align)),
        host_(bytes_),
        device_(bytes_) {}

  RowTensor host() { return placed(host_.data()); }
  RowTensor device() { return placed(device_.get()); }
  void expect_equal(const std::string& what) const { ASSERT_TRUE(device_.host() == host_) << what; }

 private:
  Bytes bytes_for(check::Choices& c, Index align) {
    const Index rows = max_of(1, shape_.rows);
    if (c.one_in(2)) shape_.row_stride = shape_.row_bytes + align * c.pick(0, 3);
    const Index stride = shape_.row_stride == 0 ? shape_.row_bytes : shape_.row_stride;
    Index size = rows * stride;
    if (c.one_in(3)) {
      shape_.inner = c.pick(1, rows);
      shape_.outer_stride = shape_.inner * stride + align * c.pick(0, 3);
      size = ceil_div(rows, shape_.inner) * shape_.outer_stride;
    }
    return random_bytes(c, size + shift_);
  }
  RowTensor placed(std::uint8_t* data) const {
    RowTensor t = shape_;
    t.data = data + shift_;
    return t;
  }

  RowTensor shape_;
  Index shift_;
  Bytes bytes_, host_;
  DeviceArray<std::uint8_t> device_;
};

std::uint8_t* row(const RowTensor& t, Index r) {
  const Index stride = t.row_stride == 0 ? t.row_bytes : t.row_stride;
  return static_cast<std::uint8_t*>(t.data) +
         (t.inner == 0 ? r * stride : r / t.inner * t.outer_stride + r % t.inner * stride);
}

struct Rows {
  Index bytes, align;
};

Rows random_rows(check::Choices& c) {
  const Index align = Index{1} << c.pick(0, 4);
  const Index units = c.one_in(8) ? c.pick(500, 1300) : c.one_in(3) ? c.pick(1, 3) : c.pick(1, 160);
  return {align * units, align};
}

struct Drawn {
  check::RandomChoices choices;
  check::Case c;
  Problem p;
  Layouts l;
  DeviceOffsets offsets;
  DeviceLayout layout;

  explicit Drawn(unsigned long long seed)
      : choices(seed),
        c(random_case(choices, static_cast<LayoutKind>(seed % 4))),
        p(problem_of(without_slices(c))),
        l(layouts_of(c, p)),
        offsets(c.q, p.packing().q(), seed / 4 % 2 == 0, seed / 8 % 3 == 0 ? 40 : 0),
        layout{c.layout, c.ranks, 0} {}
  static check::Case without_slices(check::Case c) {
    c.mask.slices.reset();
    return c;
  }
  const Stream& stream() const { return p.packing().q(); }
};

TEST(DeviceRows, OrdersEqualTheHosts) {
  DeviceContext context(gpu());
  for (unsigned long long seed = 0; seed < random_problems(2000); ++seed) {
    Drawn d(seed);
    const Rows rows = random_rows(d.choices);
    const Index ranks = d.c.ranks;
    Tensor sequence(d.choices, d.stream().tokens(), rows.bytes, rows.align);
    Tensor all(d.choices, ranks * d.l.q.rows(), rows.bytes, rows.align);
    sequence_to_rank_order(d.l.q, sequence.host(), all.host());
    sequence_to_rank_order(context, d.offsets.stream(), d.layout, sequence.device(), all.device());
    all.expect_equal(flags(d.c));
    Tensor back(d.choices, d.stream().tokens(), rows.bytes, rows.align);
    rank_to_sequence_order(d.l.q, all.host(), back.host());
    rank_to_sequence_order(context, d.offsets.stream(), d.layout, all.device(), back.device());
    back.expect_equal(flags(d.c));
    const Index rank = d.choices.pick(0, ranks - 1);
    Tensor local(d.choices, d.l.q.rows(), rows.bytes, rows.align);
    d.l.q.shard(rank, sequence.host(), local.host());
    shard(context, d.offsets.stream(), d.layout, rank, sequence.device(), local.device());
    local.expect_equal(flags(d.c));
    d.l.q.unshard(rank, local.host(), back.host());
    unshard(context, d.offsets.stream(), d.layout, rank, local.device(), back.device());
    back.expect_equal(flags(d.c));
    ASSERT_NO_THROW(context.check()) << flags(d.c);
  }
}

// Rows of the destination that nothing is copied to.
TEST(DeviceRows, OtherRowsBecomeZero) {
  DeviceContext context(gpu());
  for (unsigned long long seed = 0; seed < random_problems(500); ++seed) {
    Drawn d(seed);
    const Rows rows = random_rows(d.choices);
    const Index rank = d.choices.pick(0, d.c.ranks - 1);
    const auto clear = [](const RowTensor& t) {
      for (Index r = 0; r < t.rows; ++r) std::fill_n(row(t, r), t.row_bytes, 0);
    };
    Tensor sequence(d.choices, d.stream().tokens(), rows.bytes, rows.align);
    Tensor all(d.choices, d.c.ranks * d.l.q.rows(), rows.bytes, rows.align);
    clear(all.host());
    sequence_to_rank_order(d.l.q, sequence.host(), all.host());
    sequence_to_rank_order(context, d.offsets.stream(), d.layout, sequence.device(), all.device(), OtherRows::zero);
    all.expect_equal(flags(d.c));
    Tensor back(d.choices, d.stream().tokens(), rows.bytes, rows.align);
    clear(back.host());
    rank_to_sequence_order(d.l.q, all.host(), back.host());
    rank_to_sequence_order(context, d.offsets.stream(), d.layout, all.device(), back.device(), OtherRows::zero);
    back.expect_equal(flags(d.c));
    Tensor local(d.choices, d.l.q.rows(), rows.bytes, rows.align);
    clear(back.host());
    d.l.q.unshard(rank, local.host(), back.host());
    unshard(context, d.offsets.stream(), d.layout, rank, local.device(), back.device(), OtherRows::zero);
    back.expect_equal(flags(d.c));
    ASSERT_NO_THROW(context.check()) << flags(d.c);
  }
}

TEST(DeviceRows, OffsetsOfARankEqualTheHosts) {
  DeviceContext context(gpu());
  for (unsigned long long seed = 0; seed < random_problems(1000); ++seed) {
    Drawn d(seed);
    const Index rank = d.choices.pick(0, d.c.ranks - 1);
    const std::size_t n = at(d.offsets.stream().sequences + 1);
    DeviceArray<std::int32_t> tokens(at(d.l.q.rows())), cu(n), padded(n);
    partition_indices(context, d.offsets.stream(), d.layout, rank, d.l.q.rows(), tokens.get());
    cu_seqlens_on_rank(context, d.offsets.stream(), d.layout, rank, {cu.get(), padded.get()});
    const auto wide = [](const std::vector<std::int32_t>& v) { return Indices(v.begin(), v.end()); };
    ASSERT_EQ(wide(tokens.host()), d.l.q.tokens(rank)) << flags(d.c);
    const RankOffsets there = cu_seqlens_on_rank(d.l.q, rank);
    // A capacity of more sequences than there are repeats the last offset.
    const auto head = [&](Indices v) { return v.resize(there.cu_seqlens.size()), v; };
    ASSERT_EQ(head(wide(cu.host())), there.cu_seqlens) << flags(d.c);
    ASSERT_EQ(head(wide(padded.host())), there.cu_seqlens_padded) << flags(d.c);
    ASSERT_NO_THROW(context.check()) << flags(d.c);
  }
}

TEST(DeviceRows, ValidRowsEqualTheHosts) {
  DeviceContext context(gpu());
  for (unsigned long long seed = 0; seed < random_problems(1000); ++seed) {
    Drawn d(seed);
    const Rows rows = random_rows(d.choices);
    const Index rank = d.choices.pick(0, d.c.ranks - 1);
    const DeviceStream s = d.offsets.stream();
    const bool zero = d.choices.one_in(2);
    const auto copy = [&](Tensor& from, Tensor& to, const Bytes& valid) {
      const RowTensor a = from.host(), b = to.host();
      for (Index r = 0; r < b.rows; ++r) {
        if (valid[at(r)] != 0)
          std::copy_n(row(a, r), b.row_bytes, row(b, r));
        else if (zero)
          std::fill_n(row(b, r), b.row_bytes, 0);
      }
    };
    const OtherRows others = zero ? OtherRows::zero : OtherRows::leave;
    const Bytes valid = valid_rows(d.stream());
    DeviceArray<std::uint8_t> mask(valid.size());
    valid_rows(context, s, mask.get());
    ASSERT_EQ(mask.host(), valid) << flags(d.c);
    Tensor from(d.choices, s.tokens, rows.bytes, rows.align), to(d.choices, s.tokens, rows.bytes, rows.align);
    copy(from, to, valid);
    copy_valid_rows(context, s, from.device(), to.device(), others);
    to.expect_equal(flags(d.c));
    const Bytes local = valid_rows(d.l.q, rank);
    DeviceArray<std::uint8_t> local_mask(local.size());
    valid_rows(context, s, d.layout, rank, d.l.q.rows(), local_mask.get());
    ASSERT_EQ(local_mask.host(), local) << flags(d.c);
    Tensor a(d.choices, d.l.q.rows(), rows.bytes, rows.align), b(d.choices, d.l.q.rows(), rows.bytes, rows.align);
    copy(a, b, local);
    copy_valid_rows(context, s, d.layout, rank, a.device(), b.device(), others);
    b.expect_equal(flags(d.c));
    ASSERT_NO_THROW(context.check()) << flags(d.c);
  }
}

// Long and short, mostly empty, more than a warp looks at: right at 100,000 sequences.
TEST(DeviceRows, ManySequences) {
  DeviceContext context(gpu());
  for (const Index count : {Index{31}, Index{32}, Index{33}, Index{1000}, Index{4096}, Index{100000}}) {
    for (const Index every : {Index{1}, Index{40}}) {
      check::RandomChoices c(static_cast<unsigned long long>(count + every));
      Indices lengths;
      for (Index i = 0; i < count; ++i) lengths.push_back(i % every == 0 ? c.pick(0, 5) * 8 : 0);
      const Stream padded = Stream::from_lengths(lengths);
      const Indices offsets(padded.offsets().begin(), padded.offsets().end());
      Indices cu{0};
      for (const Index n : lengths) cu.push_back(cu.back() + (n == 0 ? 0 : c.pick(0, n)));
      const Stream stream = Stream::from_cu_seqlens({.cu_seqlens = cu, .cu_seqlens_padded = offsets});
      const DeviceOffsets device(cu, offsets, stream.tokens(), count % 2 == 0);
      const Layout l = Layout::dual_chunk(stream, 4);
      const DeviceLayout d{LayoutKind::dual_chunk, 4};
      const Rows rows = every == 1 ? Rows{12, 4} : Rows{272, 16};  // through registers, or by the copy engine
      Tensor sequence(c, stream.tokens(), rows.bytes, rows.align), ranks(c, 4 * l.rows(), rows.bytes, rows.align),
          back(c, stream.tokens(), rows.bytes, rows.align);
      sequence_to_rank_order(l, sequence.host(), ranks.host());
      sequence_to_rank_order(context, device.stream(), d, sequence.device(), ranks.device());
      ranks.expect_equal("many");
      rank_to_sequence_order(l, ranks.host(), back.host());
      rank_to_sequence_order(context, device.stream(), d, ranks.device(), back.device());
      back.expect_equal("many, back");
      DeviceArray<std::uint8_t> mask(at(stream.tokens()));
      valid_rows(context, device.stream(), mask.get());
      ASSERT_TRUE(mask.host() == valid_rows(stream)) << count;
      ASSERT_NO_THROW(context.check());
    }
  }
}

// Offsets in bytes past 2^32, from both kernels.
TEST(DeviceRows, RowsFarApart) {
  DeviceContext context(gpu());
  constexpr Index kTokens = 8, kStride = (Index{1} << 29) + 48;
  std::uint8_t* far = nullptr;
  if (cudaMalloc(&far, kTokens * kStride) != cudaSuccess) {
    cudaGetLastError();
    GTEST_SKIP() << "needs " << kTokens * kStride << " bytes";
  }
  const Layout l = Layout::dual_chunk(Stream::from_lengths(Indices{kTokens}), 2);
  const DeviceOffsets offsets({0, kTokens}, {}, kTokens, false);
  for (const Index bytes : {Index{12}, Index{512}}) {
    check::RandomChoices c(static_cast<unsigned long long>(bytes));
    const Bytes values = random_bytes(c, kTokens * bytes);
    for (Index t = 0; t < kTokens; ++t)
      expect_ok(cudaMemcpy(far + t * kStride, values.data() + t * bytes, at(bytes), cudaMemcpyHostToDevice));
    Bytes wanted(values.size());
    RowTensor source{const_cast<std::uint8_t*>(values.data()), kTokens, bytes}, spread{far, kTokens, bytes, kStride};
    sequence_to_rank_order(l, source, {wanted.data(), kTokens, bytes});
    const DeviceArray<std::uint8_t> ranks(values.size());
    const DeviceLayout d{LayoutKind::dual_chunk, 2};
    sequence_to_rank_order(context, offsets.stream(), d, spread, {ranks.get(), kTokens, bytes});
    ASSERT_EQ(ranks.host(), wanted) << bytes;
    expect_ok(cudaMemset2D(far, at(kStride), 0, at(bytes), at(kTokens)));
    rank_to_sequence_order(context, offsets.stream(), d, {ranks.get(), kTokens, bytes}, spread);
    Bytes back(values.size());
    for (Index t = 0; t < kTokens; ++t)
      expect_ok(cudaMemcpy(back.data() + t * bytes, far + t * kStride, at(bytes), cudaMemcpyDeviceToHost));
    ASSERT_EQ(back, values) << bytes;
  }
  expect_ok(cudaFree(far));
}

TEST(DeviceRows, WrongOffsetsAreNamedAndTouchNothing) {
  DeviceContext context(gpu());
  for (unsigned long long seed = 0; seed < random_problems(200); ++seed) {
    check::RandomChoices c(seed);
    Indices cu(40);
    for (Index& v : cu) v = c.one_in(4) ? c.pick(-(Index{1} << 62), Index{1} << 62) : c.pick(-4, 70);
    const DeviceOffsets offsets(cu, {}, 64, c.one_in(2));
    const DeviceLayout layout{static_cast<LayoutKind>(seed % 4), 4};
    Tensor sequence(c, 64, 16, 1), ranks(c, 64, 16, 1);
    sequence_to_rank_order(context, offsets.stream(), layout, sequence.device(), ranks.device());
    expect_ok(cudaDeviceSynchronize());
    EXPECT_THROW(rank_to_sequence_order(context, offsets.stream(), layout, ranks.device(), sequence.device()), Error);
    DeviceArray<std::uint8_t> mask(64);
    expect_ok(cudaDeviceSynchronize());
    EXPECT_NO_THROW(valid_rows(context, offsets.stream(), mask.get()));
    expect_ok(cudaDeviceSynchronize());
    EXPECT_THROW(context.check(), Error);
  }
  const DeviceOffsets wrong({0, 8, 18, 32}, {}, 32, false);
  check::RandomChoices c(1);
  Tensor sequence(c, 32, 16, 1), ranks(c, 32, 16, 1);
  sequence_to_rank_order(context, wrong.stream(), {LayoutKind::dual_chunk, 2}, sequence.device(), ranks.device());
  expect_ok(cudaDeviceSynchronize());
  expect_refusal([&] { context.check(); }, {"padded length 1", "is not a multiple of 2*ranks = 4"});
  const DeviceOffsets right({0, 8, 16, 32}, {}, 32, false);
  Tensor few(c, 24, 16, 1);
  sequence_to_rank_order(context, right.stream(), {LayoutKind::dual_chunk, 2}, sequence.device(), few.device());
  expect_ok(cudaDeviceSynchronize());
  expect_refusal([&] { context.check(); }, {"needs 16 rows and has 12"});
}

TEST(DeviceRows, RangesGatherScatterAndAdd) {
  DeviceContext context(gpu());
  for (unsigned long long seed = 0; seed < random_problems(500); ++seed) {
    check::RandomChoices c(seed);
    const Rows rows = random_rows(c);
    std::vector<std::int32_t> cu{0}, from, to;
    Index next_from = 0, next_to = 0;
    for (Index r = c.pick(0, 70); r > 0; --r) {
      const Index n = c.one_in(4) ? 0 : c.pick(1, 9);
      from.push_back(static_cast<std::int32_t>(next_from += c.pick(0, 3)));
      to.push_back(static_cast<std::int32_t>(next_to += c.pick(0, 3)));
      cu.push_back(cu.back() + static_cast<std::int32_t>(n));
      next_from += n;
      next_to += n;
    }
    const DeviceArray<std::int32_t> dcu(cu), dfrom(from), dto(to);
    const Index total = cu.back(), ranges = static_cast<Index>(from.size());
    Tensor source(c, next_from + 1, rows.bytes, rows.align), packed(c, total, rows.bytes, rows.align),
        target(c, next_to + 1, rows.bytes, rows.align);
    for (std::size_t r = 0; r < from.size(); ++r) {
      for (Index i = 0; i < cu[r + 1] - cu[r]; ++i) {
        std::copy_n(row(source.host(), from[r] + i), rows.bytes, row(packed.host(), cu[r] + i));
        std::copy_n(row(packed.host(), cu[r] + i), rows.bytes, row(target.host(), to[r] + i));
      }
    }
    const Index spare = c.pick(0, 40);
    copy_row_ranges(context, {dcu.get(), dfrom.get(), nullptr, ranges, total + spare}, source.device(),
                    packed.device());
    packed.expect_equal("gather");
    if (seed % 2 == 0)
      copy_row_ranges(context, {dcu.get(), nullptr, dto.get(), ranges, total + spare}, packed.device(),
                      target.device());
    else
      copy_row_ranges(context, {dcu.get(), dfrom.get(), dto.get(), ranges, total}, source.device(), target.device());
    target.expect_equal("scatter");
    ASSERT_NO_THROW(context.check());
  }
  const std::vector<float> a{1, 2, 3, 4, 5, 6}, b{10, 20, 30, 40, 50, 60, 70, 80};
  const DeviceArray<float> da(a), db(b);
  const DeviceArray<std::int32_t> cu(std::vector<std::int32_t>{0, 1, 3}), to(std::vector<std::int32_t>{3, 0});
  add_row_ranges(context, {cu.get(), nullptr, to.get(), 2, 3}, {da.get(), 3, 8}, {db.get(), 4, 8});
  EXPECT_EQ(db.host(), (std::vector<float>{13, 24, 35, 46, 50, 60, 71, 82}));
  expect_refusal([&] { add_row_ranges(context, {}, {da.get(), 3, 6}, {db.get(), 4, 6}); }, {"f32"});
}

template <class T>
void expect_rounded(DeviceContext& context, DType dtype, check::Choices& c) {
  const Index rows = c.pick(1, 40), heads = c.pick(1, 5), dim = c.one_in(2) ? 8 * c.pick(1, 9) : c.pick(1, 30);
  const Index gap = c.one_in(2) ? c.pick(0, 9) : 0, shift = c.pick(0, 3);
  const bool accumulate = c.one_in(2);
  std::vector<float> from(at(rows * heads * (dim + gap) + shift));
  for (float& x : from)
    x = c.one_in(30) ? std::numeric_limits<float>::infinity()
                     : std::ldexp(static_cast<float>(c.pick(-999999, 999999)), static_cast<int>(c.pick(-40, 0)));
  std::vector<T> to(from.size());
  for (T& x : to) x = T(static_cast<float>(c.pick(-99, 99)));
  const DeviceArray<float> dfrom(from);
  const DeviceArray<T> dto(to);
  auto a = thd(dfrom.get() + shift, DType::f32, rows, heads, dim);
  auto b = thd(dto.get() + shift, dtype, rows, heads, dim);
  a.head_stride = b.head_stride = dim + gap;
  a.row_stride = b.row_stride = heads * (dim + gap);
  round_rows(context, a, b, accumulate);
  for (Index row = 0; row < rows; ++row) {
    for (Index h = 0; h < heads; ++h) {
      for (Index i = 0; i < dim; ++i) {
        const std::size_t x = at(shift + b.offset(row, h) + i);
        to[x] = T(accumulate ? static_cast<float>(to[x]) + from[x] : from[x]);
      }
    }
  }
  const std::vector<T> out = dto.host();
  for (std::size_t i = 0; i < out.size(); ++i)
    ASSERT_EQ(static_cast<float>(out[i]), static_cast<float>(to[i])) << i << " " << dim << " " << gap;
}

TEST(DeviceRows, Rounding) {
  DeviceContext context(gpu());
  for (unsigned long long seed = 0; seed < random_problems(300); ++seed) {
    check::RandomChoices c(seed);
    expect_rounded<bf16>(context, DType::bf16, c);
    expect_rounded<f16>(context, DType::f16, c);
    expect_rounded<float>(context, DType::f32, c);
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const DeviceArray<float> from(std::vector<float>{nan, nan});
  const DeviceArray<bf16> to(2);
  round_rows(context, thd(from.get(), DType::f32, 1, 1, 2), thd(to.get(), DType::bf16, 1, 1, 2));
  EXPECT_TRUE(std::isnan(static_cast<float>(to.host()[1])));
}

}  // namespace
}  // namespace weft
