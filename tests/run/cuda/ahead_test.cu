// No call of a step waits for the GPU: all streams are held by a kernel that ends only after every call has returned. A
// call that waited would never return; then the kernel gives up, and the test says so.
#include <atomic>

#include <gtest/gtest.h>

#include "cuda/device_array.h"
#include "prepare/kv_sequences.h"
#include "run/cuda/rank_step.h"

namespace weft::test {
namespace {

constexpr const char* kKernel = "cuda.portable";

struct Gate {
  int open = 0, gave_up = 0;
};

__global__ void hold(volatile Gate* gate, long long clocks) {
  const long long begin = clock64();
  while (gate->open == 0) {
    if (clock64() - begin < clocks) continue;
    gate->gave_up = 1;
    return;
  }
}

// Holds streams until it opens; memory of the host that the GPU sees.
class Held {
 public:
  Held() {
    expect_ok(cudaHostAlloc(reinterpret_cast<void**>(&gate_), sizeof(Gate), cudaHostAllocMapped));
    *gate_ = {};
  }
  ~Held() {
    open();
    cudaDeviceSynchronize();
    cudaFreeHost(gate_);
  }
  void stop(void* stream) {
    constexpr long long kSeconds = 20, kClock = 1'500'000'000;
    hold<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(gate_, kSeconds * kClock);
    expect_ok(cudaGetLastError());
  }
  void open() { std::atomic_ref<int>(gate_->open).store(1); }
  bool gave_up() const { return std::atomic_ref<int>(gate_->gave_up).load() != 0; }

 private:
  Gate* gate_ = nullptr;
};

// Every rank twice the same: once to see that it works (and to load kernels, which waits), once held. `work` must leave
// results in memory that only it writes.
template <class Work>
void run_held(Communicator& comm, Held& held, const Place& place, const Work& work) {
  for (int i = 0; i < 2; ++i) work();
  device::synchronize(place);
  meet(comm);
  held.stop(place.stream);
  work();
  EXPECT_EQ(cudaStreamQuery(static_cast<cudaStream_t>(place.stream)), cudaErrorNotReady) << "rank " << comm.rank();
  EXPECT_FALSE(held.gave_up()) << "a call waited for the GPU";
  meet(comm);
  if (comm.rank() == 0) held.open();
  device::synchronize(place);
  meet(comm);
}

class Ahead : public testing::Test {
 protected:
  void SetUp() override {
    if (device::count() == 0) GTEST_SKIP() << "no GPU";
  }
};

TEST_F(Ahead, NoCallOfAScheduleWaitsForTheGpu) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{700, 300, 1048}), {.causal = true});
  constexpr Index kRanks = 4, kQ = 8, kK = 4, kDim = 64;
  for (const ScheduleOptions& options :
       {ScheduleOptions{.kind = ScheduleKind::ring}, ScheduleOptions{.kind = ScheduleKind::all_gather},
        ScheduleOptions{.kind = ScheduleKind::all_gather, .head_groups = 2},
        ScheduleOptions{.kind = ScheduleKind::all_to_all}, ScheduleOptions{.kind = ScheduleKind::hybrid},
        ScheduleOptions{.kind = ScheduleKind::exact}}) {
    SCOPED_TRACE(name(options.kind));
    Held held;
    const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, kRanks);
    run_ranks(kRanks,
              [&](Communicator& comm) {
                const Place place = check::place_of(kKernel);
                Executor executor(comm, make_schedule(problem, layouts, comm.rank(), {kQ, kK}, options),
                                  {.kernel = kKernel, .deterministic = true, .place = place});
                const Index rows = layouts.q.rows();
                RankStep of({rows, rows, kQ, kK, kDim, kDim, DType::bf16}, place, comm.rank());
                const auto step = [&] { of.run_both(executor); };
                step();
                of.mirror.fetch();
                const std::vector<std::byte> out = of.out.bytes, dq = of.dq.bytes, dk = of.dk.bytes;
                run_held(comm, held, place, step);
                of.mirror.fetch();
                EXPECT_EQ(of.out.bytes, out);
                EXPECT_EQ(of.dq.bytes, dq);
                EXPECT_EQ(of.dk.bytes, dk);
              },
              {.time_limit = 60});
  }
}

TEST_F(Ahead, NoCallOfAKvBufferWaitsForTheGpu) {
  Setting r{.lengths = {300, 200, 524}, .ranks = 2, .micros = 2, .dtype = DType::bf16};
  r.ahead = true;
  const MicroSequences micros = micros_of(r);
  Held held;
  run_ranks(r.ranks,
            [&](Communicator& comm) {
              KvBufferOptions options = options_of(r, micros);
              options.kernel = kKernel;
              options.place = check::place_of(kKernel);
              KvBuffer buffer(comm, options);
              Tensors t(r);
              check::DeviceMirror mirror(options.place);
              const Views views = views_of(r, t, mirror);
              mirror.send();
              const auto window = [&](Index m) { return micros.rows(comm.rank(), m); };
              const auto gather = [&](Index m) {
                buffer.start_gather(m, rows_of(views.k, window(m)), rows_of(views.v, window(m)));
              };
              run_held(comm, held, options.place, [&] {
                buffer.begin(micros, r.mask);
                gather(0);
                for (Index m = 0; m < r.micros; ++m) {
                  if (m + 1 < r.micros) gather(m + 1);
                  buffer.forward(m, forward_args(views, window(m)));
                }
                for (Index m = r.micros; m-- > 0;) buffer.backward(m, backward_args(views, window(m)));
              });
            },
            {.time_limit = 60});
}

}  // namespace
}  // namespace weft::test
