// How the K/V buffer is used: its memory and traffic, what it refuses, threads, and gathers that fail.
#include <atomic>
#include <cstring>
#include <memory_resource>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "check/tensors.h"
#include "kernel/kernel_problem.h"
#include "prepare/kv_alone.h"
#include "prepare/kv_sequences.h"
#include "refusal.h"
#include "weft/kernel.h"
#include "weft/kv_buffer.h"

namespace weft::test {
namespace {

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
    expect_alone(r, 3e-6);
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
      buffer.forward(m, forward_args_with_keys(r, t, sequence.rows(0, m)));
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
    args = forward_args_with_keys(r, t, {0, 8});
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
    KvBufferForwardArgs args = forward_args_with_keys(r, t, sequence.rows(0, 0));
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
          const std::string said = error_of([&] { buffer.forward(0, mine); });
          if (!said.empty()) expect_parts(said, {"K/V buffer of its own"});
          (!said.empty() ? refused : out.bytes == want ? right : wrong) += 1;
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
  const KernelProblem problem =
      make_problem({.tq = 40, .tk = 60, .hq = 2, .hk = 1, .dqk = 16, .dv = 16, .dtype = DType::f32},
                   {{0, 20, 5, 30, -kUnlimited, 5}, {20, 40, 40, 60}}, 8);
  for (const Kernel& kernel : kernels()) {
    if (kernel.refusal({Pass::backward, DType::f32, 16, 16, false})) continue;
    const std::string name(kernel.name);
    const Outputs outputs(problem.p);
    outputs.run(problem, name, Pass::backward);
    const std::vector<double> plain = outputs.backward.dk.values();
    KernelBackwardArgs args = outputs.backward_args(problem);
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

}  // namespace
}  // namespace weft::test
