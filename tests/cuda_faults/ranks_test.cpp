// Executors and K/V buffers with tensors on a GPU: one rank, whose objects are used again after each failure, and two
// ranks as threads, which make new ones.
#include "ranks.h"

#include "comm/plain_ranks.h"
#include "cuda_faults/each_in_turn.h"
#include "cuda_faults/gpu_tensors.h"
#include "index.h"
#include "prepare/kv_sequences.h"
#include "weft/kernel.h"

namespace weft::test {
namespace {

struct Ranks {
  const char* kernel;
  bool lasting;
};
class RankFaults : public testing::TestWithParam<Ranks> {
 protected:
  void SetUp() override {
    if (const auto reason = absence(kernel(), DType::bf16)) GTEST_SKIP() << *reason;
  }
  static std::string kernel() { return GetParam().kernel; }
  static std::string label(const std::string& what) {
    return kernel() + (GetParam().lasting ? ", lasting, " : ", ") + what;
  }
  static long run(const Case& c) { return each_in_turn(c, GetParam().lasting); }
};
INSTANTIATE_TEST_SUITE_P(Each, RankFaults,
                         testing::Values(Ranks{"cuda.portable", false}, Ranks{"cuda.portable", true},
                                         Ranks{"cuda.sm90", false}, Ranks{"cuda.sm90", true}),
                         [](const auto& of) {
                           return std::string(of.param.kernel).substr(5) + (of.param.lasting ? "_lasting" : "_once");
                         });

RanksProblem small_problem() {
  const Problem problem(Stream::from_lengths(std::vector<Index>{36, 20, 72}), {.causal = true});
  return {
      .problem = problem, .heads_q = 4, .heads_k = 2, .dim_qk = 64, .dim_v = 64, .dtype = DType::bf16, .sink = true};
}

std::vector<ScheduleOptions> schedules(Index ranks) {
  return {{.kind = ScheduleKind::ring},
          {.kind = ScheduleKind::all_gather, .key_order = KeyOrder::sequence},
          {.kind = ScheduleKind::all_gather, .key_order = KeyOrder::rank, .head_groups = 2},
          {.kind = ScheduleKind::all_to_all},
          {.kind = ScheduleKind::hybrid, .ulysses = ranks, .outer = ScheduleKind::ring},
          {.kind = ScheduleKind::exact, .stages = 2},
          {.kind = ScheduleKind::mesh}};
}
std::string name_of(const ScheduleOptions& options) {
  std::string words(name(options.kind));
  if (options.head_groups > 1) words += ", rank order, groups of heads";
  return words;
}

// One rank's tensors and schedule, in a stream of its own.
struct RankSide {
  RankSide(const RanksProblem& p, RanksInput& in, const Layouts& layouts, Index rank, const ScheduleOptions& options)
      : schedule(make_schedule(p.problem, layouts, rank, {p.heads_q, p.heads_k}, options)) {
    RankTensors<> t(sizes_of(p, layouts));
    shard(layouts, rank, in, t);
    RankArgs host = t.args();
    host.forward.attention = attention_of(p, in);
    host.forward.max_logit = t.max_logit.view;
    host.backward.dsink = t.dsink.view;
    forward = gpu.bind(host.forward);
    backward = gpu.bind(host.backward, forward);
  }
  void attend(Executor& executor) const {
    executor.forward(forward);
    executor.backward(backward);
    device::synchronize(gpu.place());
  }
  ExecutorOptions options(const std::string& kernel) const {
    return {.kernel = kernel, .deterministic = true, .place = gpu.place()};
  }

  Schedule schedule;
  GpuTensors gpu;
  ExecutorForwardArgs forward;
  ExecutorBackwardArgs backward;
  Results first;
};

struct Sides {
  Sides(Index ranks, const ScheduleOptions& options) {
    const RanksProblem p = small_problem();
    RanksInput in(p);
    const Layouts layouts = make_layouts(LayoutKind::zigzag, p.problem, ranks);
    for (Index rank = 0; rank < ranks; ++rank) all.push_back(std::make_unique<RankSide>(p, in, layouts, rank, options));
  }
  RankSide& operator[](Index rank) const { return *all[at(rank)]; }
  // A call after which all ranks have the bits of the first time.
  Case after(std::string name, std::function<void()> call) const {
    const auto poison = [this](long) {
      for (const auto& side : all) side->gpu.poison();
    };
    return {std::move(name), poison, std::move(call), [this] { return is_right(); }};
  }
  bool is_right() const {
    bool right = true;
    for (const auto& side : all) {
      const Results now = side->gpu.read();
      if (side->first.empty()) side->first = now;
      right = right && same_bytes(now, side->first);
    }
    return right;
  }
  std::vector<std::unique_ptr<RankSide>> all;
};

// Each schedule of one rank and of several, and of both transports: the same gradients, but for roundings.
bool is_like(const Sides& a, const Sides& b) {
  bool like = a.all.size() == b.all.size();
  for (std::size_t i = 0; like && i < a.all.size(); ++i) like = is_close(a.all[i]->first, b.all[i]->first);
  return like;
}

TEST_P(RankFaults, AnExecutorIsUsedAgain) {
  for (const ScheduleOptions& options : schedules(1)) {
    const Sides sides(1, options);
    run_ranks(1, [&](Communicator& comm) {
      Executor executor(comm, sides[0].schedule, sides[0].options(kernel()));
      const auto call = [&] { sides[0].attend(executor); };
      EXPECT_GT(run(sides.after(label("one rank, " + name_of(options)), call)), 20);
    });
    if (HasFailure()) return;
  }
}

TEST_P(RankFaults, TwoRanks) {
  std::unique_ptr<Sides> ring;
  for (const ScheduleOptions& options : schedules(2)) {
    auto sides = std::make_unique<Sides>(2, options);
    const auto body = [&](Communicator& comm) {
      const RankSide& side = (*sides)[comm.rank()];
      Executor executor(comm, side.schedule, side.options(kernel()));
      side.attend(executor);
    };
    const auto call = [&] { run_ranks(2, body, {.time_limit = 10}); };
    EXPECT_GT(run(sides->after(label("two ranks, " + name_of(options)), call)), 40);
    if (HasFailure()) return;
    if (ring == nullptr)
      ring = std::move(sides);
    else
      EXPECT_TRUE(is_like(*sides, *ring)) << name_of(options);
  }
}

// Messages by way of the host.
TEST_P(RankFaults, TwoRanksOverATransportOfTheHost) {
  for (const ScheduleOptions& options : {schedules(2)[0], schedules(2)[2]}) {
    const Sides sides(2, options);
    const auto body = [&](Communicator& threads) {
      PlainRanks comm(threads);
      const RankSide& side = sides[comm.rank()];
      Executor executor(comm, side.schedule, side.options(kernel()));
      side.attend(executor);
    };
    const auto call = [&] { run_ranks(2, body, {.time_limit = 10}); };
    EXPECT_GT(run(sides.after(label("two ranks by way of the host, " + name_of(options)), call)), 40);
    if (HasFailure()) return;
  }
}

Setting small_sequence(Index ranks) {
  Setting r{.lengths = {24, 40}, .ranks = ranks, .micros = 2};
  r.dtype = DType::bf16;
  r.dim_qk = r.dim_v = 64;
  r.sink = r.ahead = true;
  return r;
}
bool is_close_to(const Tensors& a, const Tensors& b) {
  const auto close = [](const Tensor& x, const Tensor& y) { return is_close(to_f64(x.view), to_f64(y.view)); };
  return close(a.out, b.out) && close(a.dq, b.dq) && close(a.dk, b.dk) && close(a.dv, b.dv) &&
         is_close(a.dsink, b.dsink);
}

// Tensors there and back, and the buffer.
struct KvRun {
  KvRun(Index ranks, std::string with) : setting(small_sequence(ranks)), kernel(std::move(with)) {
    run_ranks(1, [&](Communicator& comm) {
      Setting alone = small_sequence(1);
      KvBufferOptions options = options_on({});
      KvBuffer buffer(comm, options);
      run_sequence(alone, micros_of(alone), buffer, comm, want);
    });
  }
  KvBufferOptions options_on(const Place& place) const {
    const MicroSequences micros = micros_of(setting);
    return {.rows = key_rows(micros, setting.mask, {.ahead = true}),
            .heads = setting.heads_k,
            .dim_qk = setting.dim_qk,
            .dim_v = setting.dim_v,
            .dtype = setting.dtype,
            .kernel = place.kind == DeviceKind::cpu ? "cpu" : kernel,
            .place = place};
  }
  Place place(Index rank) const { return {DeviceKind::cuda, 0, streams[at(rank)].stream}; }
  void one(Communicator& comm, KvBuffer& buffer) {
    run_sequence(setting, micros_of(setting), buffer, comm, *got, place(comm.rank()));
  }

  Setting setting;
  std::string kernel;
  std::array<TestStream, 2> streams;
  Tensors want{small_sequence(1)};
  std::optional<Tensors> got;
};

TEST_P(RankFaults, AKvBufferIsUsedAgain) {
  KvRun r(1, kernel());
  run_ranks(1, [&](Communicator& comm) {
    KvBuffer buffer(comm, r.options_on(r.place(0)));
    EXPECT_GT(run({.name = label("one rank, K/V buffer"),
                   .reset = [&](long) { r.got.emplace(r.setting); },
                   .call = [&] { r.one(comm, buffer); },
                   .right = [&] { return is_close_to(*r.got, r.want); }}),
              40);
  });
}

TEST_P(RankFaults, AKvBufferOfTwoRanks) {
  KvRun r(2, kernel());
  const auto body = [&](Communicator& comm) {
    KvBuffer buffer(comm, r.options_on(r.place(comm.rank())));
    r.one(comm, buffer);
  };
  EXPECT_GT(run({.name = label("two ranks, K/V buffer"),
                 .reset = [&](long) { r.got.emplace(r.setting); },
                 .call = [&] { run_ranks(2, body, {.time_limit = 10}); },
                 .right = [&] { return is_close_to(*r.got, r.want); }}),
            60);
}

}  // namespace
}  // namespace weft::test
