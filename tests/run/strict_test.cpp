// Executors and buffers over a communicator that moves everything as late as it may, and tells of every buffer that is
// touched too early or too late; and memory that tells of what is used after it was given back.
#include <array>
#include <cstring>
#include <memory_resource>
#include <mutex>

#include <gtest/gtest.h>

#include "exact_ranks.h"
#include "index.h"
#include "prepare/kv_alone.h"
#include "ranks.h"
#include "strict_communicator.h"

namespace weft::test {
namespace {

std::vector<ScheduleOptions> every_way() {
  return {{.kind = ScheduleKind::ring},
          {.kind = ScheduleKind::ring, .ranks_per_step = 1},
          {.kind = ScheduleKind::all_gather, .key_order = KeyOrder::rank},
          {.kind = ScheduleKind::all_gather, .key_order = KeyOrder::sequence},
          {.kind = ScheduleKind::all_gather, .head_groups = 2},
          {.kind = ScheduleKind::all_gather, .head_groups = 2, .node = 2},
          {.kind = ScheduleKind::all_to_all},
          {.kind = ScheduleKind::hybrid, .ulysses = 2},
          {.kind = ScheduleKind::hybrid, .ulysses = 2, .outer = ScheduleKind::all_gather},
          {.kind = ScheduleKind::exact, .stages = 1},
          {.kind = ScheduleKind::exact, .stages = 4},
          {.kind = ScheduleKind::exact, .stages = 2, .node = 2},
          {.kind = ScheduleKind::exact, .head_groups = 2},
          {.kind = ScheduleKind::exact, .head_groups = 2, .node = 2},
          {.kind = ScheduleKind::exact, .stages = 4, .node = 2},
          {.kind = ScheduleKind::mesh, .ranks_per_step = 1, .query_ranks = 2},
          {.kind = ScheduleKind::mesh, .query_ranks = 2},
          {.kind = ScheduleKind::mesh}};
}

RanksProblem strict_problem(const std::vector<Index>& lengths = {61, 5, 38, 24}, Index left = -1) {
  return {.problem = Problem(Stream::from_lengths(lengths), {.causal = true, .left = left}),
          .heads_q = 4,
          .heads_k = 2,
          .dim_qk = 8,
          .dim_v = 8,
          .sink = true};
}

// Memory that is never used again: what is written to it after it was given back is found at the end, and what is read
// from it is NaN.
class Quarantine final : public std::pmr::memory_resource {
 public:
  ~Quarantine() override {
    for (const Piece& p : given_back_) {
      bool touched = false;
      for (std::size_t i = 0; i < p.bytes; ++i) touched |= p.data[i] != kPoison;
      EXPECT_FALSE(touched) << p.bytes << " bytes of a workspace were written after it was given back";
      std::pmr::new_delete_resource()->deallocate(p.data, p.bytes, p.alignment);
    }
  }

 private:
  static constexpr unsigned char kPoison = 0xff;
  struct Piece {
    unsigned char* data;
    std::size_t bytes, alignment;
  };

  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    void* data = std::pmr::new_delete_resource()->allocate(bytes, alignment);
    std::memset(data, kPoison, bytes);
    return data;
  }
  void do_deallocate(void* data, std::size_t bytes, std::size_t alignment) override {
    std::memset(data, kPoison, bytes);
    given_back_.push_back({static_cast<unsigned char*>(data), bytes, alignment});
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  std::vector<Piece> given_back_;
};

TEST(Strict, EveryScheduleKeepsTheContract) {
  struct Setup {
    Index ranks;
    LayoutKind layout;
    RanksProblem problem;
  };
  // One document whose rows all later ranks see, and a window of which the ranks of a node see different rows.
  const std::vector<Setup> setups = {{2, LayoutKind::zigzag, strict_problem()},
                                     {4, LayoutKind::zigzag, strict_problem()},
                                     {8, LayoutKind::contiguous, strict_problem({128})},
                                     {8, LayoutKind::contiguous, strict_problem({128}, 40)},
                                     {8, LayoutKind::zigzag, strict_problem({128}, 9)}};
  for (const Setup& setup : setups) {
    const RanksProblem& p = setup.problem;
    const Index ranks = setup.ranks;
    RanksInput in(p);
    const Exact want(p, in);
    const LayoutKind layout = setup.layout;
    const Layouts layouts = make_layouts(layout, p.problem, ranks);
    for (const ScheduleOptions& options : every_way()) {
      SCOPED_TRACE(testing::Message() << name(options.kind) << " on " << ranks << " stages " << options.stages
                                      << " node " << options.node << " groups " << options.head_groups);
      const RanksResult plain = run_on_ranks(p, in, layouts, options, {.deterministic = true});
      RanksResult got = empty_result(p, ranks);
      std::mutex mutex;
      run_ranks(ranks, [&](Communicator& comm) {
        Strict strict(comm);
        Quarantine memory;
        run_one_rank(strict, p, in, layouts, options, {.deterministic = true, .memory = &memory}, got, mutex);
      });
      for (const double error : errors_of(got, want)) EXPECT_LT(error, 2e-6);
      EXPECT_LT(relative_error(got.dsink, want.dsink), 2e-6);
      EXPECT_TRUE(same_bytes(got, plain));  // when messages come must not matter
    }
  }
}

TEST(Strict, KvBuffersKeepTheContract) {
  for (const bool drop : {false, true}) {
    for (const bool ahead : {false, true}) {
      for (const Mask& mask : masks()) {
        const Setting r{.lengths = {40, 3, 33, 20},
                        .mask = mask,
                        .ranks = 3,
                        .micros = 4,
                        .sink = true,
                        .drop = drop,
                        .ahead = ahead};
        SCOPED_TRACE(text_of(r));
        const MicroSequences micros = micros_of(r);
        Tensors t(r);
        run_ranks(r.ranks, [&](Communicator& comm) {
          Strict strict(comm);
          KvBuffer buffer(strict, options_of(r, micros));
          run_sequence(r, micros, buffer, strict, t);
        });
        EXPECT_LE(Alone(r, t).worst_norm(), 3e-6);
      }
    }
  }
}

// A map that says what equal groups of heads would be: the same bits, heads gathered group by group too.
TEST(Strict, AHeadMapOfGroupsOfHeads) {
  const RanksProblem p = strict_problem();
  RanksInput in(p);
  const std::vector<Index> map{0, 0, 1, 1};
  const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, 2);
  run_ranks(2, [&](Communicator& comm) {
    const auto run = [&](std::span<const Index> heads) {
      RankTensors<> t(sizes_of(p, layouts));
      shard(layouts, comm.rank(), in, t);
      RankArgs args = t.args();
      args.forward.attention.head_map = args.backward.attention.head_map = heads;
      const ScheduleOptions options{.kind = ScheduleKind::all_gather, .head_groups = 2};
      Executor executor(comm, make_schedule(p.problem, layouts, comm.rank(), {p.heads_q, p.heads_k, heads}, options));
      executor.forward(args.forward);
      executor.backward(args.backward);
      return std::array{t.out.bytes, t.dq.bytes, t.dk.bytes, t.dv.bytes};
    };
    EXPECT_EQ(run(map), run({}));
  });
}

// The results of a forward may come from elsewhere: another executor, a checkpoint. Slots grow for the first time then.
TEST(Strict, ABackwardWithoutAForward) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    RanksProblem p = strict_problem();
    p.sink = false;
    p.dtype = dtype;
    RanksInput in(p);
    const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, 4);
    for (const ScheduleOptions& options : every_way()) {
      SCOPED_TRACE(testing::Message() << name(options.kind) << " " << name(dtype));
      run_ranks(4, [&](Communicator& comm) {
        RankTensors<> t(sizes_of(p, layouts));
        shard(layouts, comm.rank(), in, t);
        const Schedule schedule = make_schedule(p.problem, layouts, comm.rank(), {p.heads_q, p.heads_k}, options);
        Executor both(comm, schedule, {});
        t.run(both);
        const std::vector<std::byte> dq = t.dq.bytes, dk = t.dk.bytes, dv = t.dv.bytes;
        for (check::Tensor* x : {&t.dq, &t.dk, &t.dv}) std::fill(x->bytes.begin(), x->bytes.end(), std::byte{0xff});
        Quarantine memory;
        Executor alone(comm, schedule, {.memory = &memory});
        alone.backward(t.args().backward);
        EXPECT_EQ(t.dq.bytes, dq);
        EXPECT_EQ(t.dk.bytes, dk);
        EXPECT_EQ(t.dv.bytes, dv);
      });
    }
  }
}

}  // namespace
}  // namespace weft::test
