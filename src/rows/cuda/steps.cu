// Steps and chunks from offsets in device memory: the host's arithmetic, with one thread per sequence.
#include "plan/cuda/scan.h"
#include "rows/steps.h"
#include "text.h"

namespace weft {
namespace {

// The fault of the first faulty sequence, or of entries that do not fit.
__device__ OffsetFault final_fault(const ScanState& state, const OffsetsView& q, Index q_multiple, const OffsetsView& k,
                                   Index k_multiple, Index capacity) {
  const Index total = static_cast<Index>(state.total[0]);
  if (state.worst == 0)
    return total > capacity ? OffsetFault{OffsetFault::few_slices, 0, 0, total, capacity} : OffsetFault{};
  const unsigned long long key = ~state.worst;
  const int keys = static_cast<int>(key & 1);
  OffsetFault fault =
      find_offset_fault(keys != 0 ? k : q, static_cast<Index>(key >> 8), keys != 0 ? k_multiple : q_multiple);
  fault.keys = keys;
  return fault;
}

// --- Steps ---

enum class StepKind { gather, ring };

template <StepKind kKind>
struct StepJob {
  static constexpr int kSums = 3;  // entries, queries, keys
  struct Cache {};
  struct Shared {
    SharedSide<kScanThreads> q, k;
    bool ok[kScanThreads];
  };

  OffsetsView q, k;
  MaskView mask;
  Index ranks, rank, step;
  RingTile tile;
  Index rows;  // of the rank; 0: as the offsets say
  DeviceStep out;
  Reporter reporter;

  WEFT_HD int sequences() const { return static_cast<int>(q.sequences); }
  WEFT_HD int per_tile() const { return kScanThreads; }

  __device__ void load(Shared& shared, int first, int count) const {
    if (static_cast<int>(threadIdx.x) < count) shared.ok[threadIdx.x] = true;
    load_side(shared.q, shared.ok, q, 2 * ranks, 0, reporter.state, first, count);
    load_side(shared.k, shared.ok, k, 1, 1, reporter.state, first, count);
  }

  template <class F>
  __device__ void for_each(const Shared& shared, int count, F&& f) const {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= count || !shared.ok[i]) return;
    const FoldedStream folded{{shared.q.offsets, shared.q.used}, shared.q.begin, ranks};
    if constexpr (kKind == StepKind::gather)
      GatherSteps{folded, {shared.k.offsets, shared.k.used}, mask, rank, step}.for_each(i, f);
    else
      RingSteps{folded, mask.chunk, rank, tile}.for_each(i, f);
  }

  __device__ Sums<3> visit(const Shared& shared, Cache&, int first, int n, bool emitting, Sums<3> before) const {
    Sums<3> own;
    int longest_q = 0, longest_k = 0;
    for_each(shared, n, [&](const StepEntry& e) {
      const int queries = static_cast<int>(e.q.size()), keys = static_cast<int>(e.keys());
      longest_q = max(longest_q, queries);
      longest_k = max(longest_k, keys);
      // Unsigned, because wrong offsets can make the sums anything.
      const unsigned at = static_cast<unsigned>(before.v[0]) + static_cast<unsigned>(own.v[0]);
      if (emitting && at < out.capacity) {
        out.cu_seqlens_q[at] = before.v[1] + own.v[1];
        out.cu_seqlens_k[at] = before.v[2] + own.v[2];
        out.cu_seqlens_q_padded[at] = static_cast<std::int32_t>(e.q.begin);
        out.cu_seqlens_k_padded[at] = static_cast<std::int32_t>(e.k.begin);
        out.seqused_q[at] = queries;
        out.seqused_k[at] = keys;
        out.lo[at] = device_bound(e.lo);
        out.hi[at] = device_bound(e.hi);
        out.sequence[at] = first + static_cast<int>(threadIdx.x);
      }
      ++own.v[0];
      own.v[1] += queries;
      own.v[2] += keys;
    });
    if (emitting && longest_q > 0) atomicMax(&reporter.state->longest[0], longest_q);
    if (emitting && longest_k > 0) atomicMax(&reporter.state->longest[1], longest_k);
    return own;
  }

  // Entries past the last one are empty, at the end.
  __device__ void finish(ScanState& state) const {
    OffsetFault fault = final_fault(state, q, 2 * ranks, k, 1, out.capacity);
    const Index held = valid_extent(q.extent(), q.tokens).size() / ranks;
    if (fault.code == OffsetFault::none && rows != 0 && held > rows) fault = {OffsetFault::few_rows, 0, 0, held, rows};
    const bool sound = fault.code == OffsetFault::none;
    const int entries = sound ? static_cast<int>(state.total[0]) : 0;
    const int q_sum = sound ? static_cast<int>(state.total[1]) : 0,
              k_sum = sound ? static_cast<int>(state.total[2]) : 0;
    const Index q_end = rows != 0 ? rows : held;
    const Index k_end = kKind == StepKind::ring ? q_end : valid_extent(k.extent(), k.tokens).end;
    for (Index e = entries + threadIdx.x; e <= out.capacity; e += kScanThreads) {
      out.cu_seqlens_q[e] = q_sum;
      out.cu_seqlens_k[e] = k_sum;
      out.cu_seqlens_q_padded[e] = static_cast<std::int32_t>(q_end);
      out.cu_seqlens_k_padded[e] = static_cast<std::int32_t>(k_end);
      if (e == out.capacity) continue;
      out.seqused_q[e] = out.seqused_k[e] = 0;
      out.lo[e] = -kDeviceUnlimited;
      out.hi[e] = kDeviceUnlimited;
      out.sequence[e] = -1;
    }
    if (threadIdx.x != 0) return;
    out.count[0] = entries;
    out.count[1] = sound ? state.longest[0] : 0;
    out.count[2] = sound ? state.longest[1] : 0;
    if (!sound) reporter.report(fault);
  }
};

void check_out(const DeviceStep& out) {
  for (const void* array : {out.cu_seqlens_q, out.cu_seqlens_k, out.cu_seqlens_q_padded, out.cu_seqlens_k_padded,
                            out.seqused_q, out.seqused_k, out.lo, out.hi, out.sequence, out.count})
    if (array == nullptr) throw Error("a step has an array without data", "give all ten, in device memory");
  if (out.capacity < 0 || out.capacity >= kMaxTokens)
    throw Error(text("a step with room for ", out.capacity, " entries"), "give what device_step_capacity says");
}

void check_offsets(const DeviceStream& stream) {
  if (stream.cu_seqlens == nullptr)
    throw Error("the stream has no cu_seqlens", "give a device pointer to sequences + 1 offsets");
}

template <StepKind kKind>
void launch_step(DeviceContext& context, const DeviceStepArgs& args, const DeviceStep& out, RingTile tile) {
  check_out(out);
  const DeviceStream& k = args.k == DeviceStream{} ? args.q : args.k;
  check_offsets(args.q);
  check_offsets(k);
  const StepJob<kKind> job{.q = offsets_view(args.q),
                           .k = offsets_view(k),
                           .mask = view(args.mask),
                           .ranks = args.layout.ranks,
                           .rank = args.rank,
                           .step = args.step,
                           .tile = tile,
                           .rows = args.layout.rows,
                           .out = out,
                           .reporter = context.data().reporter()};
  launch_scan(job, context.data());
}

// --- Chunks ---

struct ChunkJob {
  static constexpr int kSums = 1;
  struct Cache {};
  struct Shared {
    SharedSide<kScanThreads> side;
    bool ok[kScanThreads];
  };

  OffsetsView stream;
  Index chunk;
  DeviceChunks out;
  Reporter reporter;

  WEFT_HD int sequences() const { return static_cast<int>(stream.sequences); }
  WEFT_HD int per_tile() const { return kScanThreads; }

  __device__ void load(Shared& shared, int first, int count) const {
    if (static_cast<int>(threadIdx.x) < count) shared.ok[threadIdx.x] = true;
    load_side(shared.side, shared.ok, stream, 1, 0, reporter.state, first, count);
  }
  __device__ Sums<1> visit(const Shared& shared, Cache&, int first, int n, bool emitting, Sums<1> before) const {
    Sums<1> own;
    const int own_sequence = static_cast<int>(threadIdx.x);
    const bool sound = own_sequence < n && shared.ok[own_sequence];
    if (sound) own.v[0] = static_cast<int>(max_of(1, ceil_div(shared.side.used[own_sequence], chunk)));
    if (emitting) emit(shared, first, n, before);
    return own;
  }
  // The block's threads share the chunks of each sequence, so that a long one does not keep one thread busy.
  __device__ void emit(const Shared& shared, int first, int n, Sums<1> before) const {
    __shared__ unsigned begins[kScanThreads];
    if (static_cast<int>(threadIdx.x) < n) begins[threadIdx.x] = static_cast<unsigned>(before.v[0]);
    __syncthreads();
    const Index origin = stream.at(stream.cu, 0);
    for (int i = 0; i < n; ++i) {
      if (!shared.ok[i]) continue;
      const Index used = shared.side.used[i], sum = stream.at(stream.cu, first + i) - origin;
      const Index chunks = max_of(1, ceil_div(used, chunk));
      for (Index c = threadIdx.x; c < chunks; c += kScanThreads) {
        const unsigned at = begins[i] + static_cast<unsigned>(c);
        if (at >= out.capacity) continue;
        out.cu_seqlens[at] = static_cast<std::int32_t>(sum + c * chunk);
        out.cu_seqlens_padded[at] = static_cast<std::int32_t>(shared.side.offsets[i] + c * chunk);
        out.sequence[at] = first + i;
      }
    }
    __syncthreads();
  }
  __device__ void finish(ScanState& state) const {
    const OffsetFault fault = final_fault(state, stream, 1, stream, 1, out.capacity);
    const bool sound = fault.code == OffsetFault::none;
    const int entries = sound ? static_cast<int>(state.total[0]) : 0;
    const Index sum = sound ? stream.at(stream.cu, stream.sequences) - stream.at(stream.cu, 0) : 0;
    const Index end = valid_extent(stream.extent(), stream.tokens).end;
    for (Index e = entries + threadIdx.x; e <= out.capacity; e += kScanThreads) {
      out.cu_seqlens[e] = static_cast<std::int32_t>(sum);
      out.cu_seqlens_padded[e] = static_cast<std::int32_t>(end);
      if (e < out.capacity) out.sequence[e] = -1;
    }
    if (threadIdx.x != 0) return;
    *out.count = entries;
    if (!sound) reporter.report(fault);
  }
};

}  // namespace

void all_gather_step(DeviceContext& context, const DeviceStepArgs& args, const DeviceStep& out) {
  context.data().enter();
  check_gather_args(args);
  launch_step<StepKind::gather>(context, args, out, {});
}

void ring_step(DeviceContext& context, const DeviceStepArgs& args, const DeviceStep& out) {
  context.data().enter();
  check_ring_args(args);
  launch_step<StepKind::ring>(context, args, out, ring_tile(args.layout.ranks, args.rank, args.step));
}

void sequences_to_chunks(DeviceContext& context, const DeviceStream& stream, Index chunk, const DeviceChunks& out) {
  context.data().enter();
  device_chunks_capacity(stream, chunk);  // throws for invalid arguments
  check_offsets(stream);
  if (out.cu_seqlens == nullptr || out.cu_seqlens_padded == nullptr || out.sequence == nullptr || out.count == nullptr)
    throw Error("chunks have an array without data", "give all four, in device memory");
  if (out.capacity < 0 || out.capacity >= kMaxTokens)
    throw Error(text("chunks with room for ", out.capacity), "give what device_chunks_capacity says");
  launch_scan(ChunkJob{offsets_view(stream), min_of(chunk, kMaxTokens), out, context.data().reporter()},
              context.data());
}

}  // namespace weft
