// Times the GPU kernel on packed documents, whole and as one rank of eight sees them. Useful TFLOP/s count visible
// pairs: 4·d forward and 10·d backward, per query head (2·(dk + dv) and 2·(3·dk + 2·dv) where widths differ).
//   attention                 all cases
//   attention CASE...         some, by name
//   attention --graph CASE... planned on the device too, each pass a graph that is replayed
//   attention --host CASE...  what a call costs its thread, while the GPU is busy
//   attention --kernel NAME .. by that kernel; the best one if none is named
//   attention --part-keys N .. long rows in parts of so many keys; -1: in one
//   attention --list          the names
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "check/step_calls.h"
#include "cuda/check.h"
#include "index.h"
#include "tensor.h"
#include "weft/device_plan.h"
#include "weft/kernel.h"
#include "weft/plan.h"
#include "weft/schedule.h"

namespace {

using namespace weft;
using bench::Tensor;

struct BenchCase {
  std::string name;
  std::vector<Index> lengths;
  Index heads_q, heads_k, dim;
  Mask mask = {.causal = true};
  Index ranks = 1, rank = 0;
  DType dtype = DType::bf16;
  bool steps = false;                                       // several calls, merged and added up; nothing moves
  ScheduleOptions schedule = {.kind = ScheduleKind::ring};  // whose steps these are
  Index dim_v = 0;                                          // 0: dim
  double softcap = 0;

  Index width_v() const { return dim_v > 0 ? dim_v : dim; }
};

std::vector<Index> repeated(std::initializer_list<std::pair<Index, Index>> counts) {
  std::vector<Index> result;
  for (const auto& [count, length] : counts) result.insert(result.end(), at(count), length);
  return result;
}

std::vector<BenchCase> all_cases() {
  const std::vector<Index> packed = {1456, 1952, 704,  4320, 2624,  1280, 4560, 1008, 16384,
                                     4176, 2432, 2288, 2704, 12384, 2464, 3248, 1040, 512};
  const std::vector<Index> short_ones = repeated({{64, 512}, {16, 1024}, {8, 2048}});
  const ScheduleOptions two_stages{.kind = ScheduleKind::exact, .stages = 2};
  const ScheduleOptions one_abreast{.kind = ScheduleKind::ring, .ranks_per_step = 1};
  return {{"packed", packed, 32, 8, 128},
          {"rank-of-8", packed, 32, 8, 128, {.causal = true}, 8, 3},
          {"short-rank-of-8", short_ones, 32, 8, 128, {.causal = true}, 8, 3},
          {"ring-rank-of-8", packed, 32, 8, 128, {.causal = true}, 8, 3, DType::bf16, true},
          {"ring-1-rank-of-8", packed, 32, 8, 128, {.causal = true}, 8, 3, DType::bf16, true, one_abreast},
          {"exact-rank-of-8", packed, 32, 8, 128, {.causal = true}, 8, 3, DType::bf16, true, two_stages},
          {"dense", {16384}, 32, 8, 128},
          {"width-64", repeated({{16, 4096}}), 16, 16, 64},
          {"window", {32768}, 32, 8, 128, {.causal = true, .left = 4096}},
          {"mha-causal", {16384}, 16, 16, 128},
          {"mha-full", {16384}, 16, 16, 128, {}},
          {"width-192", {8192}, 16, 16, 192, {.causal = true}, 1, 0, DType::bf16, false, {}, 128},
          {"width-256", {8192}, 16, 4, 256},
          {"few-heads-of-64", {131072}, 4, 1, 128, {.causal = true}, 64, 3},  // fewer tiles than multiprocessors
          {"few-heads-of-8", {16384}, 8, 1, 128, {.causal = true}, 8, 3},
          {"few-heads-window", {131072}, 4, 1, 128, {.causal = true, .left = 4096}, 64, 3},
          {"few-heads", {65536}, 4, 1, 128},
          {"few-heads-256", {32768}, 8, 4, 256, {.causal = true}, 16, 3, DType::bf16, false, {}, 0, 50},
          {"f32", {8192}, 16, 4, 128, {.causal = true}, 1, 0, DType::f32}};
}

// Milliseconds: the median of 20 runs that are each waited for, and the mean of 20 that are not.
struct Times {
  float single, many;
};
template <class Run>
Times times_of(const Run& run) {
  constexpr int kRuns = 20;
  cudaEvent_t begin, end;
  WEFT_CUDA(cudaEventCreate(&begin));
  WEFT_CUDA(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kRuns + 2; ++i) {
    WEFT_CUDA(cudaEventRecord(begin));
    run();
    WEFT_CUDA(cudaEventRecord(end));
    WEFT_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    WEFT_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  WEFT_CUDA(cudaEventRecord(begin));
  for (int i = 0; i < kRuns; ++i) run();
  WEFT_CUDA(cudaEventRecord(end));
  WEFT_CUDA(cudaEventSynchronize(end));
  float all = 0;
  WEFT_CUDA(cudaEventElapsedTime(&all, begin, end));
  WEFT_CUDA(cudaEventDestroy(begin));
  WEFT_CUDA(cudaEventDestroy(end));
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], all / kRuns};
}

// Microseconds of the thread: the median of 40 runs that nobody waits for.
template <class Run>
double host_time_of(const Run& run) {
  using Clock = std::chrono::steady_clock;
  constexpr int kRuns = 40;
  std::vector<double> times;
  for (int i = 0; i < kRuns + 2; ++i) {
    const Clock::time_point begin = Clock::now();
    run();
    if (i >= 2) times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
  }
  WEFT_CUDA(cudaDeviceSynchronize());
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// The plan of a case from cu_seqlens in device memory, and passes that are replayed with it. The stream is one that the
// default stream waits for, as its events do.
class OnDevice {
 public:
  explicit OnDevice(const BenchCase& c, LayoutKind kind) {
    std::vector<std::int32_t> cu{0};
    for (const Index length : c.lengths) cu.push_back(cu.back() + static_cast<std::int32_t>(length));
    const std::size_t bytes = cu.size() * sizeof(cu[0]);
    WEFT_CUDA(cudaMalloc(reinterpret_cast<void**>(&cu_), bytes));
    WEFT_CUDA(cudaMemcpy(cu_, cu.data(), bytes, cudaMemcpyHostToDevice));
    WEFT_CUDA(cudaStreamCreate(&stream_));
    context_.emplace(Place{DeviceKind::cuda, 0, stream_});
    args_ = {{cu_, nullptr, OffsetType::i32, static_cast<Index>(c.lengths.size()), cu.back()},
             {},
             c.mask,
             DeviceLayout{kind, c.ranks}.runs(c.rank),
             DeviceLayout::sequence_order()};
    plan_.emplace(*context_, device_plan_capacity(args_));
  }
  ~OnDevice() {
    plan_.reset();
    context_.reset();
    cudaStreamDestroy(stream_);
    cudaFree(cu_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  template <class Args>
  Times times(Args args, void (*pass)(const Args&, std::string_view), std::string_view kernel) {
    args.slices = {};
    args.device_plan = &*plan_;
    args.place = context_->place();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    WEFT_CUDA(cudaStreamSynchronize(stream_));
    WEFT_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    plan_->plan(args_);
    pass(args, kernel);
    WEFT_CUDA(cudaStreamEndCapture(stream_, &graph));
    WEFT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
    const Times result = times_of([&] { WEFT_CUDA(cudaGraphLaunch(exec, stream_)); });
    WEFT_CUDA(cudaGraphExecDestroy(exec));
    WEFT_CUDA(cudaGraphDestroy(graph));
    context_->check();
    return result;
  }

 private:
  std::int32_t* cu_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::optional<DeviceContext> context_;
  DevicePlanArgs args_;
  std::optional<DevicePlan> plan_;
};

enum class How { calls, graph, host };

void time_case(const BenchCase& c, const std::string& kernel, How how, Index part_keys) {
  const Problem problem(Stream::from_lengths(c.lengths), c.mask);
  const LayoutKind kind = c.ranks > 1 ? LayoutKind::dual_chunk : LayoutKind::contiguous;
  const Layouts layouts = make_layouts(kind, problem, c.ranks);
  const Layout& layout = layouts.q;
  const Plan plan = make_plan(problem, layout.runs(c.rank), c.steps ? layout.rank_order() : layout.sequence_order());
  Index pairs = 0;
  for (const Slice& s : plan.slices) pairs += visible_pairs(s);
  const DType type = c.dtype;
  const Tensor q(type, plan.q_rows, c.heads_q, c.dim, 1), k(type, plan.k_rows, c.heads_k, c.dim, 2),
      v(type, plan.k_rows, c.heads_k, c.width_v(), 3), dout(type, plan.q_rows, c.heads_q, c.width_v(), 4);
  const Tensor out(type, plan.q_rows, c.heads_q, c.width_v()), lse(DType::f32, plan.q_rows, c.heads_q, 1);
  const DType gradients = c.steps ? DType::f32 : type;  // that travel
  const Tensor dq(type, plan.q_rows, c.heads_q, c.dim), dk(gradients, plan.k_rows, c.heads_k, c.dim),
      dv(gradients, plan.k_rows, c.heads_k, c.width_v());
  const Place place{.kind = DeviceKind::cuda};
  const ForwardArgs forward{.q = q.view(),
                            .k = k.view(),
                            .v = v.view(),
                            .slices = plan.slices,
                            .attention = {.softcap = c.softcap},
                            .out = out.view(),
                            .lse = lse.view(),
                            .keys_per_split = part_keys,
                            .place = place};
  BackwardArgs backward{.q = q.view(),
                        .k = k.view(),
                        .v = v.view(),
                        .slices = plan.slices,
                        .attention = {.softcap = c.softcap},
                        .dout = dout.view(),
                        .out = out.view(),
                        .lse = lse.view(),
                        .dq = dq.view(),
                        .dk = dk.view(),
                        .dv = dv.view(),
                        .place = place};
  std::optional<OnDevice> on_device;
  if (how == How::graph && !c.steps) on_device.emplace(c, kind);
  std::optional<check::StepCalls> steps;
  if (c.steps) steps.emplace(make_schedule(problem, layouts, c.rank, {c.heads_q, c.heads_k}, c.schedule));
  const auto run_forward = [&] { steps ? steps->forward(forward, kernel) : attend(forward, kernel); };
  const auto run_backward = [&] { steps ? steps->backward(backward, kernel) : attend_backward(backward, kernel); };
  if (how == How::host) {
    const double ahead = host_time_of(run_forward), back = host_time_of(run_backward);
    std::printf("%-16s   host: forward %.1f us, backward %.1f us\n", c.name.c_str(), ahead, back);
    return;
  }
  const auto time_forward = [&] {
    return on_device ? on_device->times(forward, &attend, kernel) : times_of(run_forward);
  };
  const auto time_backward = [&] {
    return on_device ? on_device->times(backward, &attend_backward, kernel) : times_of(run_backward);
  };
  const Times ahead = time_forward(), back = time_backward();
  backward.deterministic = true;
  const Times same = time_backward();
  const double heads_of_pairs = static_cast<double>(pairs * c.heads_q);
  const auto rate = [&](Index per_pair, float ms) {
    return static_cast<double>(per_pair) * heads_of_pairs / (static_cast<double>(ms) * 1e9);
  };
  const Index forward_flop = 2 * (c.dim + c.width_v()), backward_flop = 2 * (3 * c.dim + 2 * c.width_v());
  std::printf("%-16s", c.name.c_str());
  for (const auto& [per_pair, t] : {std::pair{forward_flop, ahead}, {backward_flop, back}, {backward_flop, same}})
    std::printf("   %8.3f %5.0f %5.0f", static_cast<double>(t.single), rate(per_pair, t.single),
                rate(per_pair, t.many));
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int count, char** arguments) {
  const std::vector<BenchCase> cases = all_cases();
  std::vector<std::string> asked(arguments + 1, arguments + count);
  How how = How::calls;
  if (!asked.empty() && asked.front() == "--graph") how = How::graph;
  if (!asked.empty() && asked.front() == "--host") how = How::host;
  if (how != How::calls) asked.erase(asked.begin());
  std::string kernel;
  if (asked.size() >= 2 && asked.front() == "--kernel") {
    kernel = asked[1];
    asked.erase(asked.begin(), asked.begin() + 2);
  }
  Index part_keys = 0;
  if (asked.size() >= 2 && asked.front() == "--part-keys") {
    part_keys = std::atoll(asked[1].c_str());
    if (part_keys < 0) part_keys = kUnlimited;
    asked.erase(asked.begin(), asked.begin() + 2);
  }
  if (asked == std::vector<std::string>{"--list"}) {
    for (const BenchCase& c : cases) std::printf("%s\n", c.name.c_str());
    return 0;
  }
  for (const std::string& name : asked) {
    if (std::any_of(cases.begin(), cases.end(), [&](const BenchCase& c) { return c.name == name; })) continue;
    std::fprintf(stderr, "there is no case '%s'; --list names them\n", name.c_str());
    return 2;
  }
  if (asked.size() != 1 && how != How::host)
    std::printf("milliseconds, TFLOP/s single and one after another\n%-16s   %-20s   %-20s   %s\n", "case", "forward",
                "backward", "with the same bits");
  try {
    for (const BenchCase& c : cases)
      if (asked.empty() || std::find(asked.begin(), asked.end(), c.name) != asked.end())
        time_case(c, kernel, how, part_keys);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
