// The forward's consumer warpgroups. One persistent launch has as many blocks as SMs, and each block claims tiles until
// none are left.
//
// A tile is some query rows times the query heads that share a K/V head. In the producer warpgroup one thread iterates
// over the tile's slices and loads Q and K by TMA, another loads V; two or three consumer warpgroups compute 64 rows
// each. Steps of different tiles follow without a gap: the scores of the next tile are computed while the last P·V of
// this tile runs.
//
// In a step a consumer issues S = Q·K^T of this step and O += P·V of the previous one, and computes P from S while the
// other consumers have the tensor cores (ping-pong). A row's bits depend on its keys alone, and on where splits end:
// tiles of keys are counted from the slice's k_first, and a tile of which a row sees nothing leaves the row's state
// unchanged.
#pragma once

#include <type_traits>

#include "kernel/cuda/sm90/forward/key_splits.cuh"
#include "kernel/cuda/sm90/forward/warp_scores.cuh"
#include "kernel/cuda/sm90/ptx/wgmma.cuh"

namespace weft::cuda::sm90 {

// tanh(x). Small x go by the series, because a large softcap multiplies the result together with its error.
__device__ inline float softcap_tanh(float x) {
  const float y = x * x;
  if (y < 0.01f) return x * fmaf(y, fmaf(y, 2.0f / 15, -1.0f / 3), 1.0f);
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(x * (2 * kLog2E)));
}

// Lazy rescaling: P is computed against ref_max, the row's maximum in its first step, until a lane's sum of P exceeds
// kRescaleThreshold. So most steps need no row maximum.
template <class N, Width kWidth, Variant kVariant>
struct ForwardConsumer : ForwardKeySplits<N, kWidth, kVariant> {
  static constexpr bool kGeneral = is_general(kVariant), kSteps = kVariant == Variant::steps,
                        kSplits = has_splits(kVariant);
  static constexpr ForwardShape kShape = forward_shape(kWidth);
  static constexpr bool kBf16 = std::is_same_v<N, Bf16>;
  static constexpr int kKeys = kShape.keys, kConsumers = kShape.consumers, kDimV = kShape.dim_v;
  static constexpr int kEights = kKeys / 8, kEightsBeforePvWait = kShape.eights_before_pv_wait;
  static constexpr float kRescaleThreshold = 1 << 14;  // sum of a lane's 32 elements of P; f16 can hold each

  // A bit beside a step's flags: O starts at zero, because the tile is a new one.
  static constexpr int kFresh = 1 << 20;
  // Steps that see at most half a tile of keys have code of their own. The general variant has no registers for it, nor
  // have splits with three consumers; QuerySteps, whose tiles are short, lose more to instruction cache misses than
  // they gain, and 64 keys are too few to halve.
  static constexpr bool kHalfSteps =
      (kVariant == Variant::plain || (kVariant == Variant::splits && kConsumers == 2)) && kKeys == 128;

  using Base = ForwardKeySplits<N, kWidth, kVariant>;
  using Base::begin_rows, Base::begin_sums, Base::resumes, Base::save_states, Base::load_saved, Base::row_of,
      Base::rows_now, Base::rescale_saved, Base::store, Base::sums_resume;
  using Base::ref_max, Base::params, Base::warpgroup, Base::kUnseen, Base::o, Base::max_score, Base::shared, Base::tile,
      Base::row_sum, Base::unseen, Base::untouched;
  using typename Base::Rows;
  using typename Base::SavedState;
  float s[kKeys / 2];
  unsigned p[kKeys / 4];
  PipelineState<kShape.k_stages> stage;   // stage of this step's K
  PipelineState<kShape.v_stages> before;  // stage of the previous step's V
  PipelineState<kShape.q_stages> buffer;
  int flags;  // flags of this step

  __device__ __forceinline__ ForwardConsumer(const ForwardParams& c, const SharedMemory<kWidth>& sh, int g)
      : Base(c, sh, g) {}

  // S of the first kCount groups of 8 keys.
  template <int kCount>
  __device__ __forceinline__ void mma_qk(int q_at, int k_at) {
    float(&some)[4 * kCount] = reinterpret_cast<float(&)[4 * kCount]>(s);
    const unsigned q = smem_descriptor(shared.q(q_at) + static_cast<unsigned>(warpgroup) * 8192);
    const unsigned k = smem_descriptor(shared.k(k_at));
#pragma unroll
    for (int i = 0; i < kShape.dim_qk / 16; ++i)
      wgmma<kBf16>(some, advance_descriptor(q, static_cast<unsigned>(i / 4 * kShape.rows() * 128 + i % 4 * 32)),
                   advance_descriptor(k, static_cast<unsigned>(i / 4 * kKeys * 128 + i % 4 * 32)), i > 0);
    wgmma_commit_group();
  }
  __device__ __forceinline__ void mma_pv(int v_at, bool add) {
    const unsigned v = smem_descriptor<kKeys * 128>(shared.v(v_at));
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) {
      const unsigned a[4] = {p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]};
      wgmma<kBf16>(o, a, advance_descriptor(v, static_cast<unsigned>(i * 2048)), add || i > 0);
    }
    wgmma_commit_group();
  }

  // A bit for each of the lane's keys in a row, two of every eight: set for the first `count` keys of the step.
  __device__ __forceinline__ static unsigned keys_below(int count) {
    const int own = max(0, count - 2 * static_cast<int>(threadIdx.x % 4));
    const int bits = own / 8 * 2 + min(own % 8, 2);
    return bits >= 32 ? 0xffffffffu : (1u << bits) - 1;
  }
  // Applies softcap, and -inf where the row does not see the key.
  template <int kCount>
  __device__ __forceinline__ void apply_softcap_and_mask(int now, int k_at) {
    if constexpr (kGeneral) {
      const float softcap_scale = params.scores.softcap_scale * params.sign;
#pragma unroll
      for (int i = 0; i < 4 * kCount; ++i)
        s[i] = softcap_scale != 0 ? softcap_tanh(s[i] * softcap_scale) : s[i] * params.sign;
    }
    if ((now & Step::kMasked << warpgroup) == 0) {
      untouched &= ~3;
      return;
    }
    const Step step = read_step(shared.step(k_at));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const VisibleRange seen = visible_keys(step, row_of(i));
      if (seen.first <= seen.last) untouched &= ~(1 << i);
      const unsigned shown = seen.last < seen.first ? 0u : keys_below(seen.last + 1) & ~keys_below(seen.first);
#pragma unroll
      for (int n = 0; n < kCount; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if ((shown >> (2 * n + j) & 1) == 0) s[4 * n + 2 * i + j] = kMinusInfinity<float>;
    }
  }
  // Each row's maximum in this step.
  template <int kCount>
  __device__ __forceinline__ void row_max(float (&largest)[2]) {
    float most[4] = {s[0], s[1], s[2], s[3]};  // two chains per row
#pragma unroll
    for (int n = 1; n < kCount; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) most[i] = max_nan(most[i], s[4 * n + i]);
    largest[0] = max_nan(most[0], most[1]);
    largest[1] = max_nan(most[2], most[3]);
#pragma unroll
    for (int bit = 1; bit <= 2; ++bit)
#pragma unroll
      for (int i = 0; i < 2; ++i) largest[i] = max_nan(largest[i], __shfl_xor_sync(0xffffffffu, largest[i], bit));
  }
  __device__ __forceinline__ void update_max_score() {
    if constexpr (kGeneral) {
      if (params.max_logit == nullptr && !resumes()) return;
      float largest[2];
      row_max<kEights>(largest);
      max_score[0] = max_nan(max_score[0], largest[0]);
      max_score[1] = max_nan(max_score[1], largest[1]);
    }
  }

  // Rows that see their first keys in this step take its maximum as ref_max.
  template <int kCount>
  __device__ __forceinline__ void init_ref_max() {
    float largest[2];
    row_max<kCount>(largest);
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if ((unseen & kUnseen << i) != 0 && largest[i] != kMinusInfinity<float>) {
        ref_max[i] = __fmul_rn(largest[i], params.scores.scale_log2);
        unseen ^= kUnseen << i;
      }
  }
  // P of the groups of 8 keys [kFrom, kTo) of kCount.
  //
  // An exponential takes eight clocks, and all other work fits between exponentials if it is interleaved. Left alone,
  // ptxas computes all the arguments first and all the sums last. So each pair of groups is made to depend on the sums
  // of the pair before.
  template <int kFrom, int kTo, int kCount = kEights>
  __device__ __forceinline__ void compute_p(float (&sum)[2]) {
    if constexpr (kGeneral) {  // registers are short there
#pragma unroll
      for (int i = 4 * kFrom; i < 4 * kTo; ++i) {
        s[i] = exp2_fast(fmaf(s[i], params.scores.scale_log2, -ref_max[i / 2 % 2]));
        sum[i / 2 % 2] += s[i];
      }
    } else {
      static_assert(kFrom % 2 == 0 && kTo % 2 == 0);
      compute_p_pairs<kFrom / 2, kTo / 2, kCount / 2>(sum);
    }
  }
  template <int kFrom, int kTo, int kPairs>
  __device__ __forceinline__ void compute_p_pairs(float (&sum)[2]) {
    constexpr int kPairSize = 8;
    if constexpr (kFrom == 0) scale_scores<kPairSize>(0);
#pragma unroll
    for (int pair = kFrom; pair < kTo; ++pair) {
#pragma unroll
      for (int i = pair * kPairSize; i < (pair + 1) * kPairSize; ++i) {
        asm volatile("ex2.approx.ftz.f32 %0, %0;\n" : "+f"(s[i]));
        if (pair > 0) add_to_sum(sum, i - kPairSize);
      }
      if (pair + 1 == kPairs) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) order_after(ref_max[i], pair > 0 ? sum[i] : s[2 * i]);
      scale_scores<kPairSize>((pair + 1) * kPairSize);
    }
    if constexpr (kTo == kPairs)
#pragma unroll
      for (int i = (kPairs - 1) * kPairSize; i < kPairs * kPairSize; ++i) add_to_sum(sum, i);
  }
  template <int kCount>
  __device__ __forceinline__ void scale_scores(int first) {
#pragma unroll
    for (int i = first; i < first + kCount; ++i)
      asm volatile("fma.rn.f32 %0, %0, %1, %2;\n"
                   : "+f"(s[i])
                   : "f"(params.scores.scale_log2), "f"(-ref_max[i / 2 % 2]));
  }
  __device__ __forceinline__ void add_to_sum(float (&sum)[2], int i) const {
    asm volatile("add.f32 %0, %0, %1;\n" : "+f"(sum[i / 2 % 2]) : "f"(s[i]));
  }
  // Keeps x unchanged but makes it depend on y: x ^ (y & 0), with a 0 that the compiler does not know.
  __device__ __forceinline__ void order_after(float& x, float y) const {
    asm volatile("lop3.b32 %0, %0, %1, %2, 0x78;\n" : "+f"(x) : "f"(y), "r"(params.opaque_zero));
  }
  template <int kFrom, int kTo>
  __device__ __forceinline__ void pack_p() {
#pragma unroll
    for (int i = 2 * kFrom; i < 2 * kTo; ++i) {
      unsigned one[1];
      N::pack(one, s[2 * i], s[2 * i + 1]);
      p[i] = one[0];
    }
  }
  // The sum of P of a row exceeded the threshold: P is recomputed against this step's maximum. WGMMA would need all
  // warps of the warpgroup, so the warp computes its scores with mma.sync. Other rows of the warp keep their bits.
  __device__ __forceinline__ void recompute_p_rescaled(int now, float (&sum)[2]) {
    const int warp = static_cast<int>(threadIdx.x % 128) / 32;
    scores_by_warp<N, kShape.dim_qk>(s, shared.q(q_of(now)) + static_cast<unsigned>((warpgroup * 64 + warp * 16) * 128),
                                     kShape.rows() * 128, shared.k(k_of(now)), kKeys * 128);
    apply_softcap_and_mask<kEights>(now, k_of(now));
    float largest[2], rescale[2];
    row_max<kEights>(largest);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = sum[i];  // of the row's four lanes
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
      const bool recompute = most > kRescaleThreshold;
      const float old = ref_max[i];
      if (recompute) ref_max[i] = __fmul_rn(largest[i], params.scores.scale_log2);
      rescale[i] = recompute ? exp2_fast(__fsub_rn(old, ref_max[i])) : 1.0f;
      row_sum[i] *= rescale[i];
      float fresh = 0;
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        const float x = exp2_fast(fmaf(s[4 * n + 2 * i], params.scores.scale_log2, -ref_max[i]));
        const float y = exp2_fast(fmaf(s[4 * n + 2 * i + 1], params.scores.scale_log2, -ref_max[i]));
        fresh += x;
        fresh += y;
        unsigned one[1];
        N::pack(one, x, y);
        if (recompute) p[2 * n + i] = one[0];
      }
      if (recompute) sum[i] = fresh;
    }
#pragma unroll
    for (int i = 0; i < kDimV / 2; ++i) o[i] *= rescale[i / 2 % 2];
    if constexpr (kSteps) rescale_saved(rescale);
  }

  __device__ __forceinline__ void rescale_if_needed(int now, float (&sum)[2]) {
    if (__any_sync(0xffffffffu, sum[0] > kRescaleThreshold || sum[1] > kRescaleThreshold))
      recompute_p_rescaled(now, sum);
  }

  __device__ __forceinline__ void fence_operands() {
    warpgroup_fence_operand(p);
    warpgroup_fence_operand(o);
    wgmma_fence();
  }

  // Ping-pong: consumers take turns in issuing WGMMA; while one has the slot, the others compute P.
  __device__ __forceinline__ void wait_for_slot() const { bar_sync(1 + warpgroup, 256); }
  __device__ __forceinline__ void pass_slot() const { bar_arrive(1 + (warpgroup + 1) % kConsumers, 256); }
  __device__ __forceinline__ void wait_for_step() {
    mbarrier_wait(shared.k_full(stage.index), stage.phase);
    flags = ld_shared_s32(shared.step(stage.index));
  }
  // A step's flags and pipeline stages packed into one word that the compiler knows to be warp-uniform, so that it
  // computes descriptors in the uniform datapath.
  __device__ __forceinline__ int packed_step_state() const {
    const int own = flags | unseen | stage.index << 8 | before.index << 12 | buffer.index << 16;
    return static_cast<int>(__reduce_or_sync(0xffffffffu, static_cast<unsigned>(own)));
  }
  __device__ static int k_of(int now) { return now >> 8 & 15; }
  __device__ static int v_of(int now) { return now >> 12 & 15; }
  __device__ static int q_of(int now) { return now >> 16 & 15; }

  __device__ __forceinline__ void run() {
    if (warpgroup == kConsumers - 1) bar_arrive(1, 256);  // opens the slot of the first consumer
    wait_for_step();
    if ((flags & Step::kStop) != 0) return;
    tile = read_tile<kSteps, kSplits>(shared.step(0));
    mbarrier_wait(shared.q_full(0), 0);
    const SavedState saved = load_saved(tile, 0);
    wait_for_slot();
    fence_operands();
    mma_qk<kEights>(0, 0);
    pass_slot();
    wgmma_wait_group<0>();
    warpgroup_fence_operand(s);
    begin_rows(saved, flags);
    if (sums_resume(flags)) begin_sums(saved);
    apply_softcap_and_mask<kEights>(flags, 0);
    update_max_score();
    init_ref_max<kEights>();
    float sum[2] = {0, 0};
    compute_p<0, kEights>(sum);
    pack_p<0, kEights>();
    if (resumes()) rescale_if_needed(flags, sum);
    row_sum[0] += sum[0];
    row_sum[1] += sum[1];
    release(flags, 0);
    mbarrier_wait(shared.v_full(0), 0);
    stage.advance();
    const int first_fresh = sums_resume(flags) ? 0 : kFresh;
    wait_for_step();
    flags |= first_fresh;
    const int others =
        Step::kFirst | Step::kStop | Step::kIdle << warpgroup | (kHalfSteps ? Step::kHalf << warpgroup : 0);
    while (true) {
      while ((flags & others) == 0) next_step<false, kEights>();
      if ((flags & Step::kStop) != 0) break;
      if ((flags & Step::kFirst) != 0) {
        const int fresh = sums_resume(flags) ? 0 : kFresh;
        next_step<true, kEights>();
        flags |= fresh;
      } else if ((flags & Step::kIdle << warpgroup) != 0) {
        idle_step();
      } else if constexpr (kHalfSteps) {
        next_step<false, kEights / 2>();
      }
    }
    fence_operands();
    mma_pv(before.index, (flags & kFresh) == 0);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(o);
    if constexpr (kSteps) save_states();
    store(rows_now(), kGeneral ? load_saved(tile, 0) : SavedState{});
  }

  // kFirst: the step begins a new tile. kCount: groups of 8 keys, all or half of the tile's.
  template <bool kFirst, int kCount>
  __device__ __forceinline__ void next_step() {
    // Additions to saved sums take a while to be issued: the earlier they start, the more of P is computed meanwhile.
    constexpr int kBeforePvWait = kFirst && kSteps    ? kEights / 2 - 2
                                  : kCount == kEights ? kEightsBeforePvWait
                                                      : kCount / 2;
    const int now = packed_step_state();
    QueryTile next_tile;
    SavedState old, saved;  // of the previous tile, if its state is partial, and of this one
    if constexpr (kFirst) {
      next_tile = read_tile<kSteps, kSplits>(shared.step(stage.index));
      if constexpr (kGeneral) old = load_saved(tile, 0);
      if constexpr (kGeneral) saved = load_saved(next_tile, 0);
      mbarrier_wait(shared.q_full(buffer.index), buffer.phase);
    }
    wait_for_slot();
    fence_operands();
    mma_qk<kCount>(q_of(now), k_of(now));
    mma_pv(v_of(now), (now & kFresh) == 0);
    pass_slot();
    if constexpr (kFirst && kSteps) {
      save_states();
      saved = load_saved(next_tile, q_of(now));
    }
    wgmma_wait_group<1>();
    warpgroup_fence_operand(reinterpret_cast<float(&)[4 * kCount]>(s));
    const Rows done = rows_now();
    const QueryTile done_tile = tile;
    if constexpr (kFirst) {
      tile = next_tile;
      begin_rows(saved, now);
    }
    apply_softcap_and_mask<kCount>(now, k_of(now));
    update_max_score();
    // Of rows that resume from saved state, few or none start here.
    const bool begins = kFirst ? !resumes() || __any_sync(0xffffffffu, unseen != 0) : (now & 3 * kUnseen) != 0;
    if (begins) init_ref_max<kCount>();
    PipelineState<kShape.v_stages> values = before;
    values.advance();
    const bool v_ready = mbarrier_test_wait(shared.v_full(values.index), values.phase);
    float sum[2] = {0, 0};
    compute_p<0, kBeforePvWait, kCount>(sum);
    warpgroup_fence_operand(reinterpret_cast<float(&)[4 * kCount]>(s));
    // The branch keeps the compiler from moving the next wait across it. Where V is often zero-filled and late, in half
    // steps and in the short tiles of QuerySteps, V is waited for at the end, and the branch of QuerySteps is never
    // taken.
    constexpr bool kWaitsForVLate = kSteps || kCount != kEights;
    if (kSteps ? params.opaque_zero != 0 : !kWaitsForVLate && !v_ready)
      mbarrier_wait(shared.v_full(values.index), values.phase);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(o);
    warpgroup_fence_operand(p);
    mbarrier_arrive_elected(shared.v_free(before.index));
    before = values;
    if constexpr (kFirst) {
      tile = done_tile;
      store(done, old);
      tile = next_tile;
      if (sums_resume(now)) begin_sums(saved);
    }
    // The next step's barrier is tested and its flags are read now, and looked at after P is computed. The flags may
    // have been read before the barrier was tested, if the GPU switches contexts in between; their phase bit tells.
    stage.advance();
    const bool k_ready = kReadsBeforeBarrier && mbarrier_test_wait(shared.k_full(stage.index), stage.phase);
    const int next_flags = kReadsBeforeBarrier ? ld_shared_s32(shared.step(stage.index)) : 0;
    pack_p<0, kBeforePvWait>();
    compute_p<kBeforePvWait, kCount, kCount>(sum);
    pack_p<kBeforePvWait, kCount>();
    // P of the second half is 0. With a zero that the compiler knows, ptxas serializes all WGMMA.
#pragma unroll
    for (int i = 2 * kCount; i < kKeys / 4; ++i) asm volatile("mov.b32 %0, %1;" : "=r"(p[i]) : "r"(params.opaque_zero));
    if (!kFirst || resumes()) rescale_if_needed(now, sum);
    row_sum[0] += sum[0];
    row_sum[1] += sum[1];
    if (kWaitsForVLate && (!kSteps || !v_ready)) mbarrier_wait(shared.v_full(before.index), before.phase);
    release(now, k_of(now));
    flags = next_flags;
    if (!k_ready || (next_flags & Step::kPhase) != Step::phase_flag(stage.phase)) wait_for_step();
  }
  // No row of the warpgroup sees these keys: only P·V of the previous step, then P = 0.
  __device__ __forceinline__ void idle_step() {
    const int now = packed_step_state();
    wait_for_slot();
    fence_operands();
    mma_pv(v_of(now), (now & kFresh) == 0);
    pass_slot();
    PipelineState<kShape.v_stages> values = before;
    values.advance();
    mbarrier_wait(shared.v_full(values.index), values.phase);
    wgmma_wait_group<0>();
    warpgroup_fence_operand(o);
    warpgroup_fence_operand(p);
    mbarrier_arrive_elected(shared.v_free(before.index));
    before = values;
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) p[i] = 0;
    stage.advance();
    release(now, k_of(now));
    wait_for_step();
  }
  // P is computed, so the stage of K is released, and Q's after the tile's last step.
  __device__ __forceinline__ void release(int now, int k_at) {
    mbarrier_arrive_elected(shared.k_free(k_at));
    if ((now & Step::kLast) != 0) {
      mbarrier_arrive_elected(shared.q_free(buffer.index));
      buffer.advance();
    }
  }
};

}  // namespace weft::cuda::sm90
