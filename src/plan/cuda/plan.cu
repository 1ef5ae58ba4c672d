// Plans in device memory: made there, or uploaded.
#include <algorithm>
#include <cstring>

#include "cuda/runtime.h"
#include "index.h"
#include "plan/cuda/device_plan_data.h"
#include "plan/cuda/plan_job.h"
#include "text.h"

namespace weft {
namespace {

// Enough threads per sequence that none has more than a few runs, ordered so that slices come out in the host's order;
// but no more than can run at once (3 blocks on each of 132 SMs), since many sequences fill the GPU by themselves.
void share_out(PlanArgs& job) {
  constexpr Index kMaxParts = 8, kTiles = 384;
  const Index q = job.q_runs.runs(), k = job.k_runs.runs();
  Index q_parts = min_of(q, 2), k_parts = 1;
  const bool keys_too = q <= 2;  // more query runs than that give enough threads
  while (keys_too && 2 * k_parts <= ceil_div(k, 2) && 2 * k_parts * q_parts <= kMaxParts) k_parts *= 2;
  const auto tiles = [&] { return ceil_div(job.q.sequences * q_parts * k_parts, kScanThreads); };
  while (k_parts > 1 && tiles() > kTiles) k_parts /= 2;
  if (k_parts == 1 && tiles() > kTiles) q_parts = 1;
  job.q_parts = static_cast<int>(q_parts);
  job.k_parts = static_cast<int>(k_parts);
  job.runs_per_q_part = ceil_div(q, q_parts);
  job.runs_per_k_part = ceil_div(k, k_parts);
}

// The combinations that schedules use have specialized code: both sides of one kind, or keys in sequence order.
void launch(const PlanArgs& args, const detail::ContextData& context) {
  using enum RegularRuns::Cut;
  const RegularRuns::Cut q = args.q_runs.cut, k = args.k_runs.cut;
  if (q == pieces && k == pieces) return launch_plan<PieceRuns, PieceRuns>(args, context);
  if (q == folded && k == folded) return launch_plan<FoldedRuns, FoldedRuns>(args, context);
  if (q == folded && k == pieces) return launch_plan<FoldedRuns, PieceRuns>(args, context);
  if (q == strided && k == strided) return launch_plan<StridedRuns, StridedRuns>(args, context);
  if (q == folded_per_sequence && k == folded_per_sequence) return launch_plan<DualRuns, DualRuns>(args, context);
  if (q == folded_per_sequence && k == pieces) return launch_plan<DualRuns, PieceRuns>(args, context);
  launch_plan<RegularRuns, RegularRuns>(args, context);
}

void check_arrays(std::string_view side, const DeviceStream& s) {
  if (s.cu_seqlens == nullptr)
    throw Error(text("the ", side, " stream has no cu_seqlens"), "give a device pointer to sequences + 1 offsets");
}

// Kernels trust what they read in device memory, so it is checked here.
void check_rows(const Plan& plan) {
  if (min_of(plan.q_rows, plan.k_rows) < 0 || max_of(plan.q_rows, plan.k_rows) > kMaxTokens)
    throw Error(text("a plan of ", plan.q_rows, " query rows and ", plan.k_rows, " key rows"),
                text("give numbers from 0 to ", kMaxTokens, " (rows are 32-bit on devices)"));
  for (std::size_t i = 0; i < plan.slices.size(); ++i) {
    const Slice& s = plan.slices[i];
    if (0 <= s.q_begin && s.q_begin <= s.q_end && s.q_end <= plan.q_rows && 0 <= s.k_begin && s.k_begin <= s.k_end &&
        s.k_end <= plan.k_rows)
      continue;
    throw Error(
        text("slice ", i, " (query rows ", s.q_begin, " .. ", s.q_end, ", key rows ", s.k_begin, " .. ", s.k_end,
             ") does not lie in the plan's ", plan.q_rows, " query rows and ", plan.k_rows, " key rows"),
        "give plans that make_plan made");
  }
}

// The most slices that contain one query row, or one key row.
Index most_over_a_row(const Plan& plan, bool keys) {
  std::vector<Index> change(at((keys ? plan.k_rows : plan.q_rows) + 1));
  for (const Slice& slice : plan.slices) {
    const Slice s = trimmed(slice, true);
    if (s.q_begin >= s.q_end) continue;
    ++change[at(keys ? s.k_begin : s.q_begin)];
    --change[at(keys ? s.k_end : s.q_end)];
  }
  Index over = 0, most = 0;
  for (const Index c : change) most = max_of(most, over += c);
  return most;
}

DeviceSlice* pinned_slices(Index count) {
  void* memory = nullptr;
  WEFT_CUDA(cudaHostAlloc(&memory, at(count) * sizeof(DeviceSlice), cudaHostAllocPortable));
  return static_cast<DeviceSlice*>(memory);
}

}  // namespace

DevicePlan::DevicePlan(DeviceContext& context, Index capacity) {
  context.data().enter();
  if (capacity < 0 || capacity > kMaxTokens)
    throw Error(text("a plan with room for ", capacity, " slices"), text("give a number from 0 to ", kMaxTokens));
  data_ = std::make_unique<detail::DevicePlanData>(context.data(), capacity);
}
DevicePlan::~DevicePlan() = default;
DevicePlan::DevicePlan(DevicePlan&&) noexcept = default;
DevicePlan& DevicePlan::operator=(DevicePlan&&) noexcept = default;

void DevicePlan::plan(const DevicePlanArgs& args) {
  data_->context->enter();
  device_plan_capacity(args);  // throws for what cannot be planned here
  const bool self = args.k == DeviceStream{};
  const DeviceStream& k = self ? args.q : args.k;
  check_arrays("query", args.q);
  check_arrays("key", k);
  const RunsSpec q_runs = runs_spec("query", args.q_runs, args.q.tokens),
                 k_runs = runs_spec("key", args.k_runs, k.tokens);
  PlanArgs job{.q = offsets_view(args.q),
               .k = offsets_view(k),
               .mask = view(args.mask),
               .q_runs = q_runs,
               .k_runs = k_runs,
               .stride = q_runs.stride(),
               .keep_k_begin = k_runs.sequence_order,
               .q_parts = 1,
               .k_parts = 1,
               .runs_per_q_part = 1,
               .runs_per_k_part = 1,
               .slices = data_->slices.get(),
               .written = data_->count.get(),
               .capacity = data_->capacity,
               .reporter = data_->context->reporter()};
  share_out(job);
  launch(job, *data_->context);
  data_->q_rows = q_runs.buffer_rows();
  data_->k_rows = k_runs.buffer_rows();
  data_->per_row = device_slices_per_row(args);
  data_->per_key = device_slices_per_key(args);
  data_->query_ranges = device_query_ranges(args);
}

void DevicePlan::upload(const Plan& plan) {
  detail::DevicePlanData& p = *data_;
  p.context->enter();
  const Index n = static_cast<Index>(plan.slices.size());
  if (n > p.capacity)
    throw Error(text("a plan of ", n, " slices does not fit the room for ", p.capacity), "make a larger DevicePlan");
  check_rows(plan);
  const cudaStream_t stream = p.context->stream();
  if (cuda::is_captured(stream))
    throw Error("a plan cannot be uploaded while a graph is captured: replays would copy whatever the host holds then",
                "upload before the capture, or plan on the device");
  if (p.staging == nullptr) p.staging.reset(pinned_slices(p.capacity + 1));
  if (p.uploaded)
    WEFT_CUDA(cudaEventSynchronize(p.uploaded->get()));  // the previous upload may still read the pinned memory
  else
    p.uploaded.emplace();
  p.q_rows = p.k_rows = 0;  // a plan that is half uploaded fits no tensors
  p.per_row = most_over_a_row(plan, false);
  p.per_key = most_over_a_row(plan, true);
  p.query_ranges = p.capacity;  // under a graph any plan that fits may follow
  DeviceSlice* const staging = p.staging.get();
  const auto count = static_cast<std::int32_t>(n);
  std::memcpy(staging, &count, sizeof(count));
  std::transform(plan.slices.begin(), plan.slices.end(), staging + 1, device_slice);
  cuda::synchronize_on_failure(stream, [&] {
    WEFT_CUDA(cudaMemcpyAsync(p.count.get(), staging, sizeof(count), cudaMemcpyHostToDevice, stream));
    if (n > 0)
      WEFT_CUDA(cudaMemcpyAsync(p.slices.get(), staging + 1, plan.slices.size() * sizeof(DeviceSlice),
                                cudaMemcpyHostToDevice, stream));
    WEFT_CUDA(cudaEventRecord(p.uploaded->get(), stream));
  });
  p.q_rows = plan.q_rows;
  p.k_rows = plan.k_rows;
}

const Place& DevicePlan::place() const { return data_->context->place; }

DeviceSlices DevicePlan::slices() const {
  const detail::DevicePlanData& p = *data_;
  return {p.slices.get(), p.count.get(), p.capacity, p.q_rows, p.k_rows};
}

std::vector<Slice> DevicePlan::download() const {
  const detail::DevicePlanData& p = *data_;
  const cudaStream_t stream = p.context->stream();
  std::int32_t count = 0;
  WEFT_CUDA(cudaMemcpyAsync(&count, p.count.get(), sizeof(count), cudaMemcpyDeviceToHost, stream));
  WEFT_CUDA(cudaStreamSynchronize(stream));
  std::vector<DeviceSlice> narrow(at(count));
  WEFT_CUDA(cudaMemcpyAsync(narrow.data(), p.slices.get(), narrow.size() * sizeof(DeviceSlice), cudaMemcpyDeviceToHost,
                            stream));
  WEFT_CUDA(cudaStreamSynchronize(stream));
  std::vector<Slice> wide;
  const auto bound = [](std::int32_t b) {
    return b == kDeviceUnlimited ? kUnlimited : b == -kDeviceUnlimited ? -kUnlimited : Index{b};
  };
  for (const DeviceSlice& s : narrow)
    wide.push_back({s.q_begin, s.q_end, s.k_begin, s.k_end, bound(s.lo), bound(s.hi)});
  return wide;
}

}  // namespace weft
