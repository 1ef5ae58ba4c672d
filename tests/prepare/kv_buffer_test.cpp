// The K/V buffer and the decode cache: every document as if it were alone, whatever micro-sequences, ranks and past.
#include "weft/kv_buffer.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory_resource>
#include <numeric>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "check/tensors.h"
#include "prepare/kv_alone.h"
#include "prepare/kv_sequences.h"
#include "refusal.h"
#include "weft/kv_cache.h"
#include "weft/reference.h"

namespace weft::test {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSlow = true;  // they need the paths, not the numbers
#else
constexpr bool kSlow = false;
#endif

TEST(KvBuffer, EqualsEachDocumentAlone) {
  std::mt19937_64 engine(5);
  for (const Index micros : kSlow ? List{2} : List{1, 2, 4}) {
    for (const Index ranks : kSlow ? List{2} : List{1, 2, 4}) {
      for (const Mask& mask : masks()) {
        for (int round = 0; round < (kSlow ? 2 : 8); ++round) {
          const bool drop = round % 2 == 1;
          Setting r{.lengths = random_lengths(engine), .mask = mask, .ranks = ranks, .micros = micros, .drop = drop};
          r.seed = static_cast<unsigned>(engine());
          r.ahead = engine() % 2 == 0;
          r.sink = engine() % 2 == 0;
          r.softcap = engine() % 2 == 0 ? 5 : 0;
          SCOPED_TRACE(testing::Message() << micros << " micros " << ranks << " ranks left " << mask.left << " chunk "
                                          << mask.chunk.value_or(0) << " drop " << drop << " ahead " << r.ahead);
          Tensors t(r);
          run_all(r, t);
          EXPECT_LE(Alone(r, t).worst_norm(), 3e-6);
        }
      }
    }
  }
}

TEST(KvBuffer, Bf16StaysInItsBound) {
  std::mt19937_64 engine(6);
  for (const Index micros : kSlow ? List{2} : List{1, 2, 4}) {
    for (const Index ranks : {1, 2, 4}) {
      for (const Mask& mask : masks()) {
        Setting r{
            .lengths = random_lengths(engine), .mask = mask, .ranks = ranks, .micros = micros, .dtype = DType::bf16};
        r.drop = engine() % 2 == 0;
        Tensors t(r);
        run_all(r, t);
        EXPECT_LE(Alone(r, t).worst_norm(), 8e-3);
      }
    }
  }
}

// A row's arithmetic does not depend on who computes it, nor on when.
// Ranks and micro-sequences sum in f64 what is f64.
TEST(KvBuffer, F64ToItsLastDigits) {
  std::mt19937_64 engine(7);
  for (const Index ranks : {1, 2, 3}) {
    for (const Mask& mask : masks()) {
      Setting r{.lengths = random_lengths(engine), .mask = mask, .ranks = ranks, .micros = 2, .dtype = DType::f64};
      r.drop = engine() % 2 == 0;
      r.sink = engine() % 2 == 0;
      Tensors t(r);
      run_all(r, t);
      EXPECT_LE(Alone(r, t).worst_norm(), 1e-13) << ranks << " ranks";
    }
  }
}

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

// Masks that look ahead, where the keys are there in time.
TEST(KvBuffer, NonCausalMasksWhereTheKeysAreThere) {
  for (const Mask& mask : {Mask{}, Mask{.left = 5, .right = 3}, Mask{.chunk = 7}}) {
    for (const Index micros : {1, 3}) {
      const Setting r{.lengths = {7, 17, 24, 1, 23}, .mask = mask, .ranks = 4, .micros = micros};
      Tensors t(r);
      run_all(r, t);
      EXPECT_LE(Alone(r, t).worst_norm(), 3e-6);
    }
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

// Counts what is asked of it.
class Counting : public std::pmr::memory_resource {
 public:
  Index allocations = 0;

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    ++allocations;
    return std::pmr::new_delete_resource()->allocate(bytes, alignment);
  }
  void do_deallocate(void* p, std::size_t bytes, std::size_t alignment) override {
    std::pmr::new_delete_resource()->deallocate(p, bytes, alignment);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

TEST(KvBuffer, MemoryIsTakenOnceAndNothingIsCopiedTwice) {
  constexpr Index kTokens = 256, kRanks = 2;
  const Index row = 2 * (24 + 16) * 2;  // bytes of K and V, bf16
  List held, queries;
  for (const Index micros : {1, 8}) {
    const Setting r{.lengths = {100, 30, 126}, .ranks = kRanks, .micros = micros, .dtype = DType::bf16};
    const MicroSequences sequence = micros_of(r);
    EXPECT_EQ(sequence.local(), kTokens / kRanks / micros);
    Tensors t(r);
    Index bytes_held = 0;
    // What a caller holds for one micro-sequence.
    const KvBufferBackwardArgs window = backward_args(r, t, sequence.rows(0, 0));
    queries.push_back(0);
    for (const ConstTensorView& x : {window.q, window.dout, window.out, window.lse, ConstTensorView(window.dq),
                                     ConstTensorView(window.dk), ConstTensorView(window.dv)})
      queries.back() += x.rows * x.heads * x.dim * size_of(x.dtype);
    run_ranks(kRanks, [&](Communicator& comm) {
      Counting memory;
      KvBufferOptions options = options_of(r, sequence);
      options.memory = &memory;
      KvBuffer buffer(comm, options);
      const void* data = buffer.k().data;
      for (int again = 0; again < 3; ++again) {
        comm.reset_traffic();
        run_sequence(r, sequence, buffer, comm, t);
        EXPECT_EQ(buffer.use().bytes_gathered, kTokens * row);  // each row once, straight to its place
        // K and V of the other rank's windows, their gradients in f32, and a number a head for max_logit.
        const Index numbers = micros * r.heads_q * Index{sizeof(double)};
        EXPECT_EQ(comm.traffic().bytes_received, kTokens / 2 * row + kTokens / 2 * row * 2 + numbers);
        EXPECT_EQ(memory.allocations, 4);  // K and V; their gradients; f32 sums of the own window; max_logit
        EXPECT_EQ(buffer.k().data, data);
      }
      if (comm.rank() == 0) bytes_held = buffer.use().bytes_held;
    });
    held.push_back(bytes_held);
  }
  EXPECT_EQ(queries[0], 8 * queries[1]);
  // K, V and their gradients are the same; the sums of a window shrink by 8 too.
  const Index own_1 = kTokens / kRanks * row * 2, own_8 = own_1 / 8;
  EXPECT_EQ(held[0] - held[1], own_1 - own_8);
}

TEST(KvBuffer, DroppedRowsKeepMemoryBounded) {
  const Mask window{.causal = true, .left = 15};
  for (const Index micros : {4, 16, 64}) {
    const Setting r{
        .lengths = {16 * micros}, .mask = window, .ranks = 2, .micros = micros, .drop = true, .ahead = true};
    const MicroSequences sequence = micros_of(r);
    EXPECT_EQ(key_rows(sequence, window, {.drop = true}), 15 + 16);
    EXPECT_EQ(key_rows(sequence, window, {.drop = true, .ahead = true}), 15 + 2 * 16);
    EXPECT_EQ(key_rows(sequence, window), 16 * micros);
    Tensors t(r);
    run_all(r, t);
    EXPECT_LE(Alone(r, t).worst_norm(), 3e-6);
  }
  // Chunks are dropped whole; documents that ended are, with any mask.
  const MicroSequences one(Stream::from_lengths(List{64}), {.ranks = 1, .micros = 8});
  EXPECT_EQ(key_rows(one, {.causal = true, .chunk = 8}, {.drop = true}), 8);
  const MicroSequences many(Stream::from_lengths(List(16, 4)), {.ranks = 1, .micros = 8});
  EXPECT_EQ(key_rows(many, {.causal = true}, {.drop = true}), 8);
  // buffer_begin moves on; first_document_begin does not.
  const Setting r{.lengths = {64}, .mask = window, .micros = 4, .drop = true};
  const MicroSequences sequence = micros_of(r);
  Tensors t(r);
  run_ranks(1, [&](Communicator& comm) {
    KvBuffer buffer(comm, options_of(r, sequence));
    buffer.begin(sequence, window);
    for (Index m = 0; m < 4; ++m) {
      KvBufferForwardArgs args = forward_args(r, t, sequence.rows(0, m));
      args.k = rows_of(ConstTensorView(t.k.view), sequence.rows(0, m));
      args.v = rows_of(ConstTensorView(t.v.view), sequence.rows(0, m));
      buffer.forward(m, args);
      EXPECT_EQ(buffer.buffer_begin(), m < 3 ? 16 * (m + 1) - 15 : 33);
      EXPECT_EQ(sequence.window(0, m).first_document_begin, 0);
    }
    EXPECT_FALSE(buffer.missing(3));
    buffer.backward(3, backward_args(r, t, sequence.rows(0, 3)));
    EXPECT_EQ(buffer.missing(2), 2);
    expect_refusal([&] { buffer.backward(2, backward_args(r, t, sequence.rows(0, 2))); }, {"gather_again"});
  });
}

// What was gathered ahead and never attended is waited for by the backward.
TEST(KvBuffer, BackwardOfWhatIsStillOnItsWay) {
  const Setting r{.lengths = {64}, .ranks = 2, .micros = 4};
  const MicroSequences sequence = micros_of(r);
  Tensors t(r);
  run_all(r, t);
  const std::vector<std::byte> dq = t.dq.bytes, dk = t.dk.bytes;
  std::fill(t.dq.bytes.begin(), t.dq.bytes.end(), std::byte{0xff});
  std::fill(t.dk.bytes.begin(), t.dk.bytes.end(), std::byte{0xff});
  run_ranks(2, [&](Communicator& comm) {
    KvBuffer buffer(comm, options_of(r, sequence));
    buffer.begin(sequence, r.mask);
    for (Index m = 0; m < 4; ++m) {
      const Range rows = sequence.rows(comm.rank(), m);
      buffer.start_gather(m, rows_of(ConstTensorView(t.k.view), rows), rows_of(ConstTensorView(t.v.view), rows));
    }
    EXPECT_FALSE(buffer.dk().given() || buffer.dv().given());
    for (Index m = 4; m-- > 0;) buffer.backward(m, backward_args(r, t, sequence.rows(comm.rank(), m)));
    EXPECT_TRUE(buffer.dk().given() && buffer.dv().given());
    EXPECT_EQ(buffer.dk().dim, r.dim_qk);
    EXPECT_EQ(buffer.dv().dim, r.dim_v);
  });
  EXPECT_EQ(t.dq.bytes, dq);
  EXPECT_EQ(t.dk.bytes, dk);
}

TEST(KvBuffer, Refuses) {
  const Setting r{.lengths = {16, 16}, .micros = 4};
  const MicroSequences sequence = micros_of(r);
  Tensors t(r);
  run_ranks(1, [&](Communicator& comm) {
    KvBufferOptions options = options_of(r, sequence);
    expect_refusal([&] { KvBuffer(comm, {}); }, {"0 rows"});
    for (const DType dtype : {DType::f32, DType::bf16})  // sizes whose product would wrap around
      expect_refusal(
          [&] { KvBuffer(comm, {.rows = 1 << 30, .heads = 1 << 30, .dim_qk = 4, .dim_v = 4, .dtype = dtype}); },
          {"1073741824 x 1073741824 x 4", "smaller"});
    expect_refusal([&] { KvBuffer(comm, {.rows = 1, .heads = 1, .dim_qk = 1, .dim_v = Index{1} << 62}); }, {"past"});
    expect_refusal([&] { KvBuffer(comm, {.rows = 1, .heads = 1, .dim_qk = 4, .dim_v = 4, .dtype = DType::f8_e4m3}); },
                   {"f8_e4m3"});
    options.rows = 31;
    KvBuffer small(comm, options);
    expect_refusal([&] { small.begin(sequence, r.mask); }, {"needs 32 rows", "has 31"});
    options.rows = 40;
    KvBuffer buffer(comm, options);
    KvBufferForwardArgs args = forward_args(r, t, sequence.rows(0, 0));
    expect_refusal([&] { buffer.forward(0, args); }, {"begin"});
    buffer.begin(sequence, r.mask);
    expect_refusal([&] { buffer.begin(MicroSequences(Stream::from_lengths(List{4}), {.ranks = 2}), r.mask); },
                   {"2 ranks on 1"});
    expect_refusal([&] { buffer.forward(0, args); }, {"k"});
    args.k = rows_of(ConstTensorView(t.k.view), {0, 8});
    args.v = rows_of(ConstTensorView(t.v.view), {0, 8});
    expect_refusal([&] { buffer.forward(1, args); }, {"micro-sequence 1", "0 is next"});
    buffer.forward(0, args);
    expect_refusal([&] { buffer.forward(0, args); }, {"gathered before"});
    args.k = args.v = {};
    buffer.forward(0, args);  // once more, as recomputation does
    expect_refusal([&] { buffer.backward(1, backward_args(r, t, {8, 16})); }, {"0 is next"});
    KvBufferBackwardArgs shared = backward_args(r, t, {0, 8});
    shared.dk.row_stride = 0;
    expect_refusal([&] { buffer.backward(0, shared); }, {"dk is written to"});
    shared = backward_args(r, t, {0, 8});
    shared.dv.row_stride = 0;
    expect_refusal([&] { buffer.backward(0, shared); }, {"dv is written to"});
    buffer.backward(0, backward_args(r, t, {0, 8}));
    expect_refusal([&] { buffer.backward(0, backward_args(r, t, {0, 8})); }, {"none is next"});
    expect_refusal([&] { buffer.start_gather(1, t.k.view, t.v.view); }, {"in its backward"});
  });
}

// Four threads on one buffer: each call is the only one in it, and right, or refused.
TEST(KvBuffer, BelongsToOneThreadAtATime) {
  const Setting r{.lengths = {300, 340}, .dtype = DType::bf16, .heads_q = 2, .heads_k = 2};
  const MicroSequences sequence = micros_of(r);
  Tensors t(r);
  run_ranks(1, [&](Communicator& comm) {
    KvBuffer buffer(comm, options_of(r, sequence));
    buffer.begin(sequence, r.mask);
    KvBufferForwardArgs args = forward_args(r, t, sequence.rows(0, 0));
    args.k = t.k.view;
    args.v = t.v.view;
    buffer.forward(0, args);
    const std::vector<std::byte> want = t.out.bytes;
    args.k = args.v = {};
    std::atomic<int> right = 0, refused = 0, wrong = 0;
    std::vector<std::thread> threads;
    for (int n = 0; n < 4; ++n)
      threads.emplace_back([&] {
        Tensor out(r.dtype, t.out.view.rows, t.out.view.heads, t.out.view.dim), lse(DType::f32, t.lse.view.rows, 2, 1);
        KvBufferForwardArgs mine = args;
        mine.out = out.view;
        mine.lse = lse.view;
        for (int i = 0; i < 20; ++i) {
          try {
            buffer.forward(0, mine);
            (out.bytes == want ? right : wrong) += 1;
          } catch (const Error& e) {
            EXPECT_NE(std::string(e.what()).find("K/V buffer of its own"), std::string::npos) << e.what();
            refused += 1;
          }
        }
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_GT(right, 0);
    EXPECT_EQ(right + refused, 80);
  });
}

TEST(AddKeys, AddsWhereKeysAreSeenAndLeavesTheRest) {
  std::mt19937_64 engine(8);
  const auto always = [](Index) { return true; };
  const Tensor q = check::random_tensor(engine, DType::f32, 40, 2, 16, always),
               k = check::random_tensor(engine, DType::f32, 60, 1, 16, always),
               v = check::random_tensor(engine, DType::f32, 60, 1, 16, always),
               dout = check::random_tensor(engine, DType::f32, 40, 2, 16, always);
  const std::vector<Slice> slices{{0, 20, 5, 30, -kUnlimited, 5}, {20, 40, 40, 60}};
  for (const Kernel& kernel : kernels()) {
    if (kernel.refusal({Pass::backward, DType::f32, 16, 16, false})) continue;
    const std::string name(kernel.name);
    Tensor out(DType::f32, 40, 2, 16), lse(DType::f32, 40, 2, 1), dq(DType::f32, 40, 2, 16), dk(DType::f32, 60, 1, 16),
        dv(DType::f32, 60, 1, 16);
    attend({.q = q.view, .k = k.view, .v = v.view, .slices = slices, .out = out.view, .lse = lse.view}, name);
    KernelBackwardArgs args{{.q = q.view,
                             .k = k.view,
                             .v = v.view,
                             .slices = slices,
                             .dout = dout.view,
                             .out = out.view,
                             .lse = lse.view,
                             .dq = dq.view,
                             .dk = dk.view,
                             .dv = dv.view}};
    attend_backward(args, name);
    const std::vector<double> plain = to_f64(dk.view);
    Tensor sum_k = check::random_tensor(engine, DType::f32, 60, 1, 16, [](Index row) { return row >= 5 && row != 35; });
    Tensor sum_v = check::random_tensor(engine, DType::f32, 60, 1, 16, always);
    const std::vector<std::byte> old_bytes = sum_k.bytes;
    const std::vector<double> old = to_f64(sum_k.view);
    args.dk = sum_k.view;
    args.dv = sum_v.view;
    args.add_keys = true;
    attend_backward(args, name);
    const std::vector<double> got = to_f64(sum_k.view);
    for (Index row = 0; row < 60; ++row) {
      const bool seen = (row >= 5 && row < 25) || row >= 40;
      if (!seen) {
        EXPECT_EQ(std::memcmp(sum_k.bytes.data() + row * 64, old_bytes.data() + row * 64, 64), 0) << name << " " << row;
        continue;
      }
      for (std::size_t i = at(row * 16); i < at(row * 16 + 16); ++i)
        EXPECT_NEAR(got[i], old[i] + plain[i], 1e-5) << name;
    }
    Tensor narrow(DType::bf16, 60, 1, 16);
    args.dk = narrow.view;
    expect_refusal([&] { attend_backward(args, name); }, {"add_keys", "bf16", "f32"});
  }
}

// One rank, whose wait() fails when it is told to.
class FailingRank final : public Communicator {
 public:
  explicit FailingRank(Communicator& one) : Communicator(0, 1), one_(one) {}
  std::string_view name() const override { return "failing"; }
  bool fails = false;

 private:
  struct Under final : Request::Pending {
    Under(Request r, const bool& f) : request(std::move(r)), fails(f) {}
    void wait() override {
      if (fails) throw Error("the link is down", "mend it");
      request.wait();
    }
    Request request;
    const bool& fails;
  };
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    return std::make_unique<Under>(one_.exchange(std::move(sends), std::move(receives)), fails);
  }
  std::unique_ptr<Communicator> make_split(Index, Index) override { throw Error("no split here", "use another"); }

  Communicator& one_;
};

// Keys that never came are not attended, also not by a second try; a new sequence is right.
TEST(KvBuffer, AGatherThatFailedEndsTheSequence) {
  run_ranks(1, [](Communicator& one) {
    FailingRank comm(one);
    const Setting r{.lengths = {8}};
    Tensors t(r), want(r);
    KvBuffer buffer(comm, options_of(r, micros_of(r)));
    buffer.begin(micros_of(r), r.mask);
    KvBufferForwardArgs args = forward_args(r, t, {0, 8});
    buffer.start_gather(0, t.k.view, t.v.view);
    comm.fails = true;
    expect_refusal([&] { buffer.forward(0, args); }, {"the link is down"});
    comm.fails = false;
    expect_refusal([&] { buffer.forward(0, args); }, {"no sequence has begun"});
    run_sequence(r, micros_of(r), buffer, comm, t);
    run_all(r, want);
    EXPECT_EQ(t.out.bytes, want.out.bytes);
    EXPECT_EQ(t.dk.bytes, want.dk.bytes);
  });
}

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

// A caller cannot say what is the buffer's or the cache's own to say.
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
