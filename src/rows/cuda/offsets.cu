// The offsets of sequences in one rank's rows, from offsets in device memory.
#include "plan/cuda/scan.h"
#include "rows/rank_rows.h"
#include "text.h"
#include "weft/device_rows.h"

namespace weft {
namespace {

struct RankOffsetsJob {
  static constexpr int kSums = 1;  // real rows
  struct Cache {};
  struct Shared {
    SharedSide<kScanThreads> side;
    bool ok[kScanThreads];
  };

  OffsetsView stream;
  RunsSpec spec;
  Index rank;
  DeviceRankOffsets out;
  Reporter reporter;

  WEFT_HD int sequences() const { return static_cast<int>(stream.sequences); }
  WEFT_HD int per_tile() const { return kScanThreads; }

  __device__ void load(Shared& shared, int first, int count) const {
    if (static_cast<int>(threadIdx.x) < count) shared.ok[threadIdx.x] = true;
    load_side(shared.side, shared.ok, stream, spec.multiple(), 0, reporter.state, first, count);
  }
  __device__ Sums<1> visit(const Shared& shared, Cache&, int first, int n, bool emitting, Sums<1> before) const {
    Sums<1> own;
    const int i = static_cast<int>(threadIdx.x);
    if (i >= n || !shared.ok[i]) return own;
    const RankRows rows{spec, rank, shared.side.extent()};
    const Range sequence{shared.side.offsets[i], shared.side.offsets[i + 1]};
    const Index begin = rows.before(sequence.begin, sequence);
    own.v[0] = static_cast<int>(rows.before(sequence.begin + shared.side.used[i], sequence) - begin);
    if (emitting) {
      out.cu_seqlens[first + i] = before.v[0];
      out.cu_seqlens_padded[first + i] = static_cast<std::int32_t>(begin);
    }
    return own;
  }
  __device__ void finish(ScanState& state) const {
    const bool sound = state.worst == 0;
    const Range dealt = valid_extent(stream.extent(), stream.tokens);
    for (Index i = threadIdx.x; !sound && i < stream.sequences; i += kScanThreads)
      out.cu_seqlens[i] = out.cu_seqlens_padded[i] = 0;
    if (threadIdx.x != 0) return;
    const RankRows rows{spec, rank, dealt};
    out.cu_seqlens[stream.sequences] = sound ? static_cast<std::int32_t>(state.total[0]) : 0;
    out.cu_seqlens_padded[stream.sequences] =
        sound ? static_cast<std::int32_t>(rows.before(dealt.end, {dealt.end, dealt.end})) : 0;
    if (sound) return;
    OffsetFault fault = find_offset_fault(stream, static_cast<Index>(~state.worst >> 8), spec.multiple());
    reporter.report(fault);
  }
};

}  // namespace

void cu_seqlens_on_rank(DeviceContext& context, const DeviceStream& stream, const DeviceLayout& layout, Index rank,
                        const DeviceRankOffsets& out) {
  context.data().enter();
  check_stream("device", stream);
  if (stream.cu_seqlens == nullptr || out.cu_seqlens == nullptr || out.cu_seqlens_padded == nullptr)
    throw Error("cu_seqlens_on_rank has an array without data", "give device pointers to sequences + 1 offsets");
  const RunsSpec spec = runs_spec("device", layout.runs(rank), stream.tokens);
  launch_scan(RankOffsetsJob{offsets_view(stream), spec, rank, out, context.data().reporter()}, context.data());
}

}  // namespace weft
