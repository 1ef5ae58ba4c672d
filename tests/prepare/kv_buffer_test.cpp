// The K/V buffer: every document as if it were alone, whatever micro-sequences, ranks and past.
#include "weft/kv_buffer.h"

#include <array>
#include <cmath>
#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include "check/tensors.h"
#include "prepare/kv_alone.h"
#include "prepare/kv_sequences.h"
#include "refusal.h"
#include "sanitized.h"

namespace weft::test {
namespace {

TEST(KvBuffer, EqualsEachDocumentAlone) {
  std::mt19937_64 engine(5);
  for (const Index micros : kSanitized ? List{2} : List{1, 2, 4}) {
    for (const Index ranks : kSanitized ? List{2} : List{1, 2, 4}) {
      for (const Mask& mask : masks()) {
        for (int round = 0; round < (kSanitized ? 2 : 8); ++round) {
          const bool drop = round % 2 == 1;
          expect_alone(random_setting(engine, micros, ranks, mask, drop), 3e-6);
        }
      }
    }
  }
}

TEST(KvBuffer, Bf16StaysInItsBound) {
  std::mt19937_64 engine(6);
  for (const Index micros : kSanitized ? List{2} : List{1, 2, 4}) {
    for (const Index ranks : {1, 2, 4}) {
      for (const Mask& mask : masks()) {
        Setting r{
            .lengths = random_lengths(engine), .mask = mask, .ranks = ranks, .micros = micros, .dtype = DType::bf16};
        r.drop = engine() % 2 == 0;
        expect_alone(r, 8e-3);
      }
    }
  }
}

// Ranks and micro-sequences sum in f64 what is f64.
TEST(KvBuffer, F64ToItsLastDigits) {
  std::mt19937_64 engine(7);
  for (const Index ranks : {1, 2, 3}) {
    for (const Mask& mask : masks()) {
      Setting r{.lengths = random_lengths(engine), .mask = mask, .ranks = ranks, .micros = 2, .dtype = DType::f64};
      r.drop = engine() % 2 == 0;
      r.sink = engine() % 2 == 0;
      expect_alone(r, 1e-13);
    }
  }
}

// A row's arithmetic does not depend on the rank that computes it, nor on when.
TEST(KvBuffer, ForwardHasTheSameBitsForAnyMicrosAndRanks) {
  const auto forward = [](Index ranks, Index micros, DType dtype, const Mask& mask = {.causal = true}) {
    const Setting r{.lengths = {70, 1, 103, 66}, .mask = mask, .ranks = ranks, .micros = micros, .dtype = dtype};
    Tensors t(r);
    run_all(r, t);
    return std::pair{std::move(t.out.bytes), std::move(t.lse.bytes)};
  };
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const auto one = forward(1, 1, dtype);
    for (const Index ranks : {1, 2, 4})
      for (const Index micros : {1, 2, 4, 6, 12})
        EXPECT_EQ(forward(ranks, micros, dtype), one) << ranks << " " << micros;
    const Mask window{.causal = true, .left = 30};
    EXPECT_EQ(forward(2, 6, dtype, window), forward(1, 1, dtype, window));
  }
}

// Gradients that come under the next backward are those that come at once.
TEST(KvBuffer, DeferredGradientsHaveTheSameBits) {
  const auto gradients = [](Setting r, bool deferred) {
    r.deferred = deferred;
    Tensors t(r);
    run_all(r, t);
    return std::array{std::move(t.dq.bytes), std::move(t.dk.bytes), std::move(t.dv.bytes)};
  };
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64})
    for (const Index ranks : {1, 3})
      for (const bool drop : {false, true}) {
        const Setting r{.lengths = {70, 1, 103, 66},
                        .mask = {.causal = true, .left = 30},
                        .ranks = ranks,
                        .micros = 5,
                        .dtype = dtype,
                        .drop = drop};
        EXPECT_EQ(gradients(r, true), gradients(r, false)) << name(dtype) << " " << ranks << " " << drop;
      }
}

// Masks that look ahead, where the keys are there in time.
TEST(KvBuffer, NonCausalMasksWhereTheKeysAreThere) {
  for (const Mask& mask : {Mask{}, Mask{.left = 5, .right = 3}, Mask{.chunk = 7}}) {
    for (const Index micros : {1, 3})
      expect_alone({.lengths = {7, 17, 24, 1, 23}, .mask = mask, .ranks = 4, .micros = micros}, 3e-6);
  }
  const Setting late{.lengths = {7, 17, 24, 1, 23}, .mask = {}, .ranks = 2, .micros = 4};
  run_ranks(2, [&](Communicator& comm) {
    KvBuffer buffer(comm, options_of(late, micros_of(late)));
    expect_refusal([&] { buffer.begin(micros_of(late), late.mask); },
                   {"micro-sequence 0 (tokens 0 .. 18)", "up to 24", "causal"});
  });
}

// Seven rows of the past that belong to nobody here; documents 4, 1, 10 behind them.
TEST(KvBuffer, PastRowsPlayNoPart) {
  for (const bool random : {false, true}) {
    for (const auto& [ranks, micros] : {std::pair<Index, Index>{1, 1}, {1, 3}, {1, 5}, {3, 5}, {2, 4}, {4, 2}}) {
      const Setting r{.lengths = {4, 1, 10}, .ranks = ranks, .micros = micros, .begin = 7, .past_is_random = random};
      const MicroSequences sequence = micros_of(r);
      EXPECT_EQ(sequence.window(0, 0).begin, 7);
      EXPECT_EQ(sequence.window(0, 0).first_document_begin, 7);
      Tensors t(r);
      run_ranks(ranks, [&, count = micros](Communicator& comm) {
        KvBuffer buffer(comm, options_of(r, sequence));
        const auto own = [&](const Tensor& x, Index m) {
          return rows_of(ConstTensorView(x.view), sequence.rows(comm.rank(), m));
        };
        buffer.begin(sequence, r.mask);
        fill_past(r, buffer);
        for (Index m = 0; m < count; ++m) {
          KvBufferForwardArgs args = forward_args(r, t, sequence.rows(comm.rank(), m));
          args.k = own(t.k, m);
          args.v = own(t.v, m);
          std::vector<double> largest(at(r.heads_q));
          args.max_logit = per_head(largest.data(), DType::f64, r.heads_q);
          buffer.forward(m, args);
          for (std::size_t h = 0; comm.rank() == 0 && h < largest.size(); ++h)
            t.max_logit[h] = std::max(t.max_logit[h], largest[h]);
        }
        const auto bytes = [&](const TensorView& view, Index rows) {
          std::vector<std::byte> copy(at(rows * view.row_stride * 4));
          if (!copy.empty()) std::memcpy(copy.data(), view.data, copy.size());
          return copy;
        };
        for (Index m = count; m-- > 0;) {
          const Index first = sequence.window(comm.rank(), m).first_document_begin;
          const bool given = buffer.dk().given();
          const auto dk = bytes(buffer.dk(), given ? first : 0), dv = bytes(buffer.dv(), given ? first : 0);
          buffer.backward(m, backward_args(r, t, sequence.rows(comm.rank(), m)));
          if (given) {
            EXPECT_EQ(bytes(buffer.dk(), first), dk);
            EXPECT_EQ(bytes(buffer.dv(), first), dv);
          }
          for (const TensorView& view : {buffer.dk(), buffer.dv()})
            for (const double x : to_f64(rows_of(view, {0, given ? 7 : first})))
              ASSERT_EQ(std::bit_cast<std::uint64_t>(x), 0u);
        }
      });
      EXPECT_LE(Alone(r, t).worst_norm(), 3e-6);
    }
  }
}

// The first document began in the past: its earlier keys lie in the buffer already, on every rank.
TEST(KvBuffer, AFirstDocumentThatBeganInThePast) {
  const Index past = 9, rest = 15;
  const Setting alone{.lengths = {past + rest, 8}};
  Tensors want(alone);
  run_all(alone, want);
  for (const auto& [ranks, micros] : {std::pair<Index, Index>{1, 1}, {2, 2}, {1, 4}}) {
    Setting r = alone;
    r.ranks = ranks;
    r.micros = micros;
    const MicroSequences sequence(
        Stream::from_used(List{past, past + rest, past + rest + 8}, List{rest, 8}),
        {.ranks = ranks, .micros = micros, .remainder = MicroSplit::Remainder::pad, .first_document_begin = 0});
    EXPECT_EQ(sequence.window(0, 0).position_index().front(), past);
    Tensors t(r);
    run_ranks(ranks, [&, count = micros](Communicator& comm) {
      KvBuffer buffer(comm, options_of(r, sequence));
      // Windows may end in padding, for which these tensors have no rows: copies of the window.
      const auto own = [&](const Tensor& x, Index m) {
        Tensor copy(r.dtype, sequence.local(), x.view.heads, x.view.dim);
        const Range rows = sequence.rows(comm.rank(), m);
        const Index end = min_of(rows.end, x.view.rows);
        if (end > rows.begin)
          std::memcpy(copy.bytes.data(), x.bytes.data() + rows.begin * x.row_bytes(),
                      at((end - rows.begin) * x.row_bytes()));
        return copy;
      };
      buffer.begin(sequence, r.mask);
      std::memcpy(buffer.k().data, t.k.bytes.data(), at(past * t.k.row_bytes()));
      std::memcpy(buffer.v().data, t.v.bytes.data(), at(past * t.v.row_bytes()));
      std::vector<Tensor> outs, lses;
      for (Index m = 0; m < count; ++m) {
        const Tensor q = own(t.q, m), k = own(t.k, m), v = own(t.v, m);
        outs.emplace_back(r.dtype, sequence.local(), r.heads_q, r.dim_v);
        lses.emplace_back(DType::f32, sequence.local(), r.heads_q, 1);
        buffer.forward(m, {.q = q.view, .k = k.view, .v = v.view, .out = outs.back().view, .lse = lses.back().view});
        for (Index row = 0; row < sequence.local(); ++row) {
          const Index token = sequence.rows(comm.rank(), m).begin + row;
          if (token >= want.out.view.rows) continue;
          EXPECT_EQ(to_f64(rows_of(outs.back().view, {row, row + 1})),
                    to_f64(rows_of(want.out.view, {token, token + 1})));
        }
      }
      for (Index m = count; m-- > 0;) {
        const Tensor q = own(t.q, m), dout = own(t.dout, m);
        Tensor dq(r.dtype, sequence.local(), r.heads_q, r.dim_qk), dk(r.dtype, sequence.local(), r.heads_k, r.dim_qk),
            dv(r.dtype, sequence.local(), r.heads_k, r.dim_v);
        buffer.backward(m, {.q = q.view,
                            .dout = dout.view,
                            .out = outs[at(m)].view,
                            .lse = lses[at(m)].view,
                            .dq = dq.view,
                            .dk = dk.view,
                            .dv = dv.view});
        for (Index row = 0; row < sequence.local(); ++row) {
          const Index token = sequence.rows(comm.rank(), m).begin + row;
          if (token >= want.out.view.rows) continue;
          const std::vector<double> got = to_f64(rows_of(dk.view, {row, row + 1}));
          const std::vector<double> expected = to_f64(rows_of(want.dk.view, {token, token + 1}));
          for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-4);
        }
      }
    });
  }
}

}  // namespace
}  // namespace weft::test
