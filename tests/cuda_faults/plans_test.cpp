// Plans, rows and copies on a device, and what the rest of Weft asks of one.
#include "comm/cuda/transports.h"
#include "cuda_faults/each_in_turn.h"
#include "cuda_faults/gpu_tensors.h"
#include "kernel/kernel_problem.h"
#include "refusal.h"
#include "weft/device_rows.h"
#include "weft/kv_cache.h"

namespace weft::test {
namespace {

constexpr Index kTokens = 96, kRowBytes = 64;

class DeviceFaults : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (device::count() == 0) GTEST_SKIP() << "no GPU";
  }
  static long run(const Case& c) { return each_in_turn(c, GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Each, DeviceFaults, testing::Bool(),
                         [](const auto& of) { return of.param ? "lasting" : "once"; });

// Numbers in device memory, as a tensor of f32: what is in them does not matter.
TensorView numbers(GpuTensors& gpu, Index count) {
  std::vector<float> host(at(count), 1);
  return gpu.out(thd(host.data(), DType::f32, count, 1, 1));
}
std::int32_t* integers(GpuTensors& gpu, Index count) { return static_cast<std::int32_t*>(numbers(gpu, count).data); }
RowTensor rows(GpuTensors& gpu, Index count) { return {numbers(gpu, count * kRowBytes / 4).data, count, kRowBytes}; }
template <class T>
const T* constants(GpuTensors& gpu, const std::vector<T>& values) {
  static_assert(sizeof(T) == 4);
  return static_cast<const T*>(gpu.in(thd(values.data(), DType::f32, static_cast<Index>(values.size()), 1, 1)).data);
}
DeviceStream three_sequences(GpuTensors& gpu) {
  return {.cu_seqlens = constants<std::int32_t>(gpu, {0, 32, 48, 96}), .sequences = 3, .tokens = kTokens};
}

// The same bytes as the first time.
std::function<bool()> same_as_first(const GpuTensors& gpu, Results& first) {
  return [&] {
    const Results now = gpu.read();
    if (first.empty()) first = now;
    return same_bytes(now, first);
  };
}

TEST_P(DeviceFaults, Plans) {
  GpuTensors gpu;
  const DeviceStream stream = three_sequences(gpu);
  const DeviceLayout layout{LayoutKind::zigzag, 2};
  const DevicePlanArgs args{
      .q = stream, .mask = {.causal = true}, .q_runs = layout.runs(1), .k_runs = layout.rank_order()};
  const Problem problem(Stream::from_lengths(std::vector<Index>{32, 16, 48}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, 2);
  const std::vector<Slice> want = make_plan(problem, layouts.q.runs(1), layouts.k.rank_order()).slices;
  std::vector<Slice> got;
  const auto reset = [&](long) { got.clear(); };
  const auto right = [&] { return got == want; };
  const auto plan_by = [&](DevicePlan& plan) {
    plan.plan(args);
    got = plan.download();
  };
  const auto made_anew = [&] {
    DeviceContext context(gpu.place());
    DevicePlan plan(context, device_plan_capacity(args));
    plan_by(plan);
  };
  EXPECT_GT(run({"device planning, made anew", reset, made_anew, right}), 10);
  DeviceContext context(gpu.place());
  DevicePlan plan(context, device_plan_capacity(args));
  EXPECT_GT(run({"device planning, the same plan", reset, [&] { plan_by(plan); }, right}), 3);
}

TEST_P(DeviceFaults, Rows) {
  GpuTensors gpu;
  const DeviceStream stream = three_sequences(gpu);
  const DeviceLayout layout{LayoutKind::dual_chunk, 2};
  const RowTensor whole = rows(gpu, kTokens), ranks = rows(gpu, kTokens), local = rows(gpu, kTokens / 2),
                  other = rows(gpu, kTokens);
  const std::vector<float> values(at(kTokens), 0.3F);
  const RowTensor source{const_cast<float*>(constants<float>(gpu, std::vector<float>(at(kTokens * kRowBytes / 4), 2))),
                         kTokens, kRowBytes};
  std::uint8_t* const valid = reinterpret_cast<std::uint8_t*>(integers(gpu, kTokens / 4));
  const DeviceRanges ranges{.cu = constants<std::int32_t>(gpu, {0, 5, 9}),
                            .from = constants<std::int32_t>(gpu, {20, 3}),
                            .to = nullptr,
                            .ranges = 2,
                            .rows = 9};
  const ConstTensorView wide = gpu.in(thd(values.data(), DType::f32, kTokens, 1, 1));
  const TensorView narrow = gpu.out(thd(const_cast<float*>(values.data()), DType::bf16, kTokens, 1, 1));
  DeviceContext context(gpu.place());
  Results first;
  const auto call = [&] {
    sequence_to_rank_order(context, stream, layout, source, ranks);
    rank_to_sequence_order(context, stream, layout, ranks, whole);
    shard(context, stream, layout, 1, source, local);
    unshard(context, stream, layout, 1, local, whole);
    copy_valid_rows(context, stream, whole, other, OtherRows::zero);
    copy_valid_rows(context, stream, layout, 1, local, local);
    valid_rows(context, stream, valid);
    copy_row_ranges(context, ranges, source, other);
    add_row_ranges(context, ranges, source, other);
    round_rows(context, wide, narrow);
    context.check();
    device::synchronize(gpu.place());
  };
  EXPECT_GT(run(poisoned("row copies", gpu, call, same_as_first(gpu, first))), 20);
}

TEST_P(DeviceFaults, StepsAndChunks) {
  GpuTensors gpu;
  const DeviceStream stream = three_sequences(gpu);
  const DeviceStepArgs args{.q = stream, .mask = {.causal = true}, .layout = {LayoutKind::dual_chunk, 2}, .step = 1};
  const Index n = device_step_capacity(args), chunks = device_chunks_capacity(stream, 20);
  const auto array = [&](Index count) { return integers(gpu, count); };
  const DeviceStep step{.capacity = n,
                        .cu_seqlens_q = array(n + 1),
                        .cu_seqlens_k = array(n + 1),
                        .cu_seqlens_q_padded = array(n + 1),
                        .cu_seqlens_k_padded = array(n + 1),
                        .seqused_q = array(n),
                        .seqused_k = array(n),
                        .lo = array(n),
                        .hi = array(n),
                        .sequence = array(n),
                        .count = array(3)};
  const DeviceChunks parts{.capacity = chunks,
                           .cu_seqlens = array(chunks + 1),
                           .cu_seqlens_padded = array(chunks + 1),
                           .sequence = array(chunks),
                           .count = array(1)};
  DeviceContext context(gpu.place());
  Results first;
  const auto call = [&] {
    all_gather_step(context, args, step);
    ring_step(context, args, step);
    sequences_to_chunks(context, stream, 20, parts);
    device::synchronize(gpu.place());
  };
  EXPECT_GT(run(poisoned("steps and chunks", gpu, call, same_as_first(gpu, first))), 5);
}

// What a device found wrong with its offsets is told, whatever fails on the way: this time or the next.
TEST_P(DeviceFaults, AFaultIsNotForgotten) {
  GpuTensors gpu;
  const DeviceStream wrong{
      .cu_seqlens = constants<std::int32_t>(gpu, {0, 32, 16, 96}), .sequences = 3, .tokens = kTokens};
  std::uint8_t* const valid = reinterpret_cast<std::uint8_t*>(integers(gpu, kTokens / 4));
  DeviceContext context(gpu.place());
  const auto what = [&] { return error_of([&] { context.check(); }); };
  for (long n = 0;; ++n) {
    valid_rows(context, wrong, valid);
    device::synchronize(gpu.place());
    faults::arm(n, GetParam());
    std::string said = what();
    const faults::Failed failed = faults::disarm();
    if (!failed.call.empty()) {
      EXPECT_TRUE(names(said, failed.call)) << said;
      said = what();
    }
    EXPECT_NE(said.find("sequence 1"), std::string::npos) << n << ": " << said;
    EXPECT_EQ(what(), "");
    EXPECT_EQ(faults::left_behind(), 0);
    if (failed.call.empty() || HasFailure()) break;
  }
}

// Memory of a GPU for as long as this lives.
struct Held {
  Held(device::Memory& of, std::size_t size) : memory(of), bytes(size), data(of.allocate(size)) {}
  ~Held() { memory.deallocate(data, bytes); }
  Held(const Held&) = delete;
  device::Memory& memory;
  std::size_t bytes;
  void* data;
};

// Memory, copies to the host by way of pinned memory, and streams that wait for each other.
TEST_P(DeviceFaults, MemoryAndCopies) {
  const GpuTensors gpu;
  const Place place = gpu.place();
  const TestStream other;
  constexpr Index kBytes = 4000;
  std::vector<float> from(1000), a(1000), b(1000);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<float>(i);
  const auto call = [&] {
    const std::unique_ptr<device::Memory> memory = device::make_memory(place);
    const Held x(*memory, kBytes), y(*memory, kBytes);
    device::to_device(place, x.data, from.data(), kBytes);
    const Block of_x{.data = x.data, .rows = 1, .bytes = kBytes}, of_y{.data = y.data, .rows = 1, .bytes = kBytes};
    device::copy(place, {&of_x, 1}, {&of_y, 1});
    device::follow(place, other.stream);
    device::give_back(device::take(place, kBytes));
    const device::HostCopy copies[] = {{a.data(), x.data, kBytes}, {b.data(), y.data, kBytes}};
    device::to_host(place, copies);
  };
  const auto reset = [&](long) {
    std::fill(a.begin(), a.end(), -1.0F);
    std::fill(b.begin(), b.end(), -1.0F);
  };
  EXPECT_GT(run({"memory and copies", reset, call, [&] { return a == from && b == from; }}), 15);
}

TEST_P(DeviceFaults, Cache) {
  constexpr Index kRows = 40, kHeads = 2, kDim = 64;
  GpuTensors gpu;
  const std::vector<float> some(at(kRows * kHeads * kDim), 0.5F);
  float* const data = const_cast<float*>(some.data());
  const auto view = [&](Index rows) { return thd(data, DType::f32, rows, kHeads, kDim); };
  const TensorView k = gpu.out(view(kRows)), v = gpu.out(view(kRows)), out = gpu.out(view(6));
  const ConstTensorView q = gpu.in(view(6)), new_k = gpu.in(view(6)), new_v = gpu.in(view(6));
  KvCache cache(k, v, std::vector<Index>{0, 20, 40});
  const Index counts[] = {2, 4};
  Results first;
  const auto reset = [&](long) {
    for (Index i = 0; i < 2; ++i) cache.keep(i, 0);
    gpu.poison();
  };
  const auto call = [&] {
    cache.append(counts, new_k, new_v, gpu.place());
    cache.attend(counts, {.q = q, .out = out, .place = gpu.place()}, {.causal = true}, "cuda.portable");
    device::synchronize(gpu.place());
  };
  EXPECT_GT(run({"K/V cache", reset, call, same_as_first(gpu, first)}), 10);
}

// Messages in one piece each, as a process group moves them; here a rank's own.
TEST_P(DeviceFaults, PackedMessages) {
  struct Nothing final : Request::Pending {
    void wait() override {}
  };
  GpuTensors gpu;
  const std::vector<float> some(60, 1);
  float* const data = const_cast<float*>(some.data());
  const void* from = gpu.in(thd(data, DType::f32, 60, 1, 1)).data;
  void* to = gpu.out(thd(data, DType::f32, 60, 1, 1)).data;
  const auto strided = [](const void* at) {
    return Block{.data = const_cast<void*>(at), .rows = 10, .bytes = 8, .row_stride = 24};
  };
  const auto whole = [](const void* at) { return Block{.data = const_cast<void*>(at), .rows = 1, .bytes = 80}; };
  Results first;
  run_ranks(1, [&](Communicator& comm) {
    const auto call = [&] {
      const auto on = cuda::make_packed(comm, gpu.place(), std::make_shared<detail::SignsInFlight>(),
                                        [](const Place&, auto, auto) { return std::make_unique<Nothing>(); });
      on->exchange({{0, {strided(from)}}}, {{0, {whole(to)}}}).wait();
      on->exchange({{0, {whole(from)}}}, {{0, {whole(to)}, Message::Combine::add}}).wait();
      device::synchronize(gpu.place());
    };
    EXPECT_GT(run(poisoned("packed messages", gpu, call, same_as_first(gpu, first))), 6);
  });
}

}  // namespace
}  // namespace weft::test
