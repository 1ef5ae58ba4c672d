// The forward of widths above 256: eight warps share a block's rows. Scores are divided among them by rows and keys, so
// each is computed once; maxima of rows and P go through shared memory; then each adds P·V of its columns of V.
//
// P is computed against a reference of the row, its maximum when that last grew by more than 2^8: so sums are seldom
// rescaled, and P stays far within f16.
#pragma once

#include "cuda/launch.h"
#include "kernel/cuda/portable/forward_rows.cuh"

namespace weft::cuda {

// The products by mma.sync, and what each warp has of them.
template <class N_, bool kLargeShared>
struct MmaProducts {
  using N = N_;
  static constexpr WideShape kShape = wide_forward_shape(N::kF32, kLargeShared);
  static constexpr int kDimQk = columns_k(Width::w576_512), kDimV = columns_v(Width::w576_512);
  static constexpr int kRows = kShape.rows, kKeys = kShape.keys, kPitch = wide_pitch(kKeys);
  // Scores: 16·kScoreM rows and 8·kScoreN8 keys.
  static constexpr int kScoreN8 = 2, kKeyWarps = kKeys / 16;
  static constexpr int kScoreRowWarps = kRows / 16 < kWideWarps / kKeyWarps ? kRows / 16 : kWideWarps / kKeyWarps;
  static constexpr int kScoreM = kRows / 16 / kScoreRowWarps, kScoreWarps = kKeyWarps * kScoreRowWarps;
  // Sums: 16·kM rows and kOwn columns.
  static constexpr int kM = kRows < 32 ? 1 : 2, kColumnWarps = kWideWarps / (kRows / (16 * kM)),
                       kOwn = kDimV / kColumnWarps;
  // Rows and keys that must all be skipped or none.
  static constexpr int kScoreGroup = 16 * kScoreM, kSumGroup = 16 * kM;
  static constexpr bool kSkips = true;  // scores of which nothing is seen

  using QBlocks = Blocks<kRows, kDimQk>;
  using KBlocks = Blocks<kKeys, kDimQk>;
  using VBlocks = Blocks<kKeys, kDimV>;
  using PBlocks = Blocks<kRows, kPitch>;
  template <int kTileRows, int kColumns>
  using Layout = SwizzledRows<kColumns>;

  __device__ static int warp() { return static_cast<int>(threadIdx.x / 32); }
  __device__ static int key_warp() { return warp() % kKeyWarps; }
  __device__ static int score_row() { return warp() / kKeyWarps * 16 * kScoreM; }
  __device__ static int sum_row() { return warp() / kColumnWarps * 16 * kM; }
  __device__ static int column_warp() { return warp() % kColumnWarps; }

  __device__ static void publish() {}  // nothing to do but the barrier that follows
  __device__ static void begin_scores(float (&)[kScoreM][kScoreN8][4], unsigned, unsigned) {}
  __device__ static void end_scores(float (&to)[kScoreM][kScoreN8][4], unsigned q, unsigned k) {
    mma_in_two_chains<N, kDimQk / 16>(to, LeftRows<QBlocks>{QBlocks(q, score_row())},
                                      RightRows<KBlocks>{KBlocks(k, 16 * key_warp())});
  }
  __device__ static void begin_add(float (&)[kM][kOwn / 8][4], unsigned, unsigned) {}
  __device__ static void end_add(float (&sums)[kM][kOwn / 8][4], unsigned p, unsigned v) {
    mma_tiles<N, kKeys / 16>(sums, LeftRows<PBlocks>{PBlocks(p, sum_row())},
                             RightColumns<VBlocks>{VBlocks(v, 0), column_warp() * kOwn / 16});
  }
};

// With kVIsK the columns of V are the first ones of K, and there are two tiles of K in place of one of each.
template <class Products, bool kVIsK = false>
struct WideForwardTile : Products {
  using N = typename Products::N;
  using Products::kRows, Products::kKeys, Products::kPitch, Products::kDimQk, Products::kDimV;
  using Products::kScoreM, Products::kScoreN8, Products::kKeyWarps, Products::kScoreWarps, Products::kM, Products::kOwn;
  using Products::warp, Products::key_warp, Products::score_row, Products::sum_row, Products::column_warp;
  // Shared memory: Q, tiles of K and V, P [kRows][kPitch], and a float for each row and part of the keys.
  static constexpr unsigned kElementBytes = 2 * N::kParts, kKAt = kElementBytes * kRows * kDimQk,
                            kVAt = kKAt + kElementBytes * kKeys * kDimQk,
                            kPAt = kVAt + kElementBytes * kKeys * (kVIsK ? kDimQk : kDimV),
                            kOfRowsAt = kPAt + kElementBytes * kRows * kPitch,
                            kSharedBytes = kOfRowsAt + 4 * kRows * kKeyWarps;
  using Keys = KeyTileIterator<kKeys, kRows>;

  const ForwardParams& params;
  unsigned q;  // address of the shared memory
  int tile, head;
  float sums[kM][kOwn / 8][4];
  float sums_reference[kM][2];  // of the rows of sums; -inf: no key yet
  float score_reference[kScoreM][2];
  // Maximum logit·log2(e) among the warp's keys, and this lane's part of the sum of P.
  float score_max[kScoreM][2], score_sum[kScoreM][2];

  __device__ WideForwardTile(const ForwardParams& c, unsigned shared, int tile_, int head_)
      : params(c), q(shared), tile(tile_), head(head_) {}

  __device__ static int lane_row() { return static_cast<int>(threadIdx.x % 32) / 4; }
  __device__ int kv_head() const { return params.heads.kv_head[head]; }
  __device__ int row() const { return tile * kRows; }
  __device__ static bool has_scores() { return warp() < kScoreWarps; }
  __device__ static int column() { return column_warp() * kOwn; }
  __device__ unsigned k(int stage) const { return q + kKAt + (stage == 0 ? 0 : kVAt - kKAt); }
  __device__ unsigned v(int stage) const { return kVIsK ? k(stage) : q + kVAt; }
  __device__ unsigned of_row(int r, int keys) const {
    return q + kOfRowsAt + 4 * static_cast<unsigned>(keys * kRows + r);
  }

  __device__ void run() {
    Keys keys(params.list, tile);
    begin();
    bool more = keys.start();
    if (more) {
      const int rows = static_cast<int>(params.q.view.rows) - row();
      load<kRows, kDimQk>(q, params.q, row(), head, [=](int r) { return r < rows; });
      load_k(keys, 0);
      if (params.sign != 1.0f) apply_sign<N, kWideThreads>(q, kKAt, params.sign);
    }
    for (int stage = 0; more;) {
      cp_async_wait_all();
      Products::publish();
      __syncthreads();
      const WorkSlice slice = keys.slice();
      const int base = keys.base();
      float scores[kScoreM][kScoreN8][4];
      const int first_key = base + 8 * kScoreN8 * key_warp();
      const Visibility visibility = sees(slice, score_row() / Products::kScoreGroup * Products::kScoreGroup,
                                         Products::kScoreGroup, first_key, 8 * kScoreN8);
      // Products of warpgroups must not depend on branches: masks cover tiles of which nothing is seen.
      const bool computes = has_scores() && visibility != Visibility::none;
      if (!Products::kSkips || computes) Products::begin_scores(scores, q, k(stage));
      if (kVIsK) {
        more = keys.next();
        if (more) load_k(keys, stage ^ 1);
      } else {
        load<kKeys, kDimV>(v(stage), params.v, base, kv_head(), keys.valid());
      }
      if (!Products::kSkips || computes)
        Products::end_scores(scores, q, k(stage));
      else
        clear(scores);
      if (has_scores()) mask_scores(scores, visibility, slice, first_key);
      const bool seen = sees(slice, sum_row() / Products::kSumGroup * Products::kSumGroup, Products::kSumGroup, base,
                             kKeys) != Visibility::none;
      __syncthreads();  // maxima
      if (has_scores()) softmax(scores);
      follow_references();
      if (!kVIsK) cp_async_wait_all();
      Products::publish();
      __syncthreads();  // P and V
      if (!Products::kSkips || seen) Products::begin_add(sums, q + kPAt, v(stage));
      if (!kVIsK) {
        more = keys.next();
        if (more) load_k(keys, stage);
      }
      if (!Products::kSkips || seen) Products::end_add(sums, q + kPAt, v(stage));
      if (kVIsK) stage ^= 1;
    }
    end();
  }

  template <int kTileRows, int kColumns, class Valid>
  __device__ static void load(unsigned to, const InputView& from, int first, int of_head, const Valid& valid) {
    load_tile<N, kTileRows, kColumns, kWideThreads, typename Products::template Layout<kTileRows, kColumns>>(
        to, from, first, of_head, valid);
  }
  __device__ void load_k(const Keys& keys, int stage) const {
    load<kKeys, kDimQk>(k(stage), params.k, keys.base(), kv_head(), keys.valid());
  }
  // What some rows of the tile see of some keys.
  __device__ Visibility sees(const WorkSlice& slice, int first_row, int rows, int first_key, int keys) const {
    return visibility_of(slice, row() + first_row, row() + first_row + rows - 1, first_key, first_key + keys - 1);
  }

  // Starts rows as empty, or where an earlier call left them.
  __device__ void begin() {
    clear(sums);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) sums_reference[m][i] = kMinusInfinity<float>;
#pragma unroll
    for (int m = 0; m < kScoreM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        score_reference[m][i] = score_max[m][i] = kMinusInfinity<float>;
        score_sum[m][i] = 0;
      }
    if (params.partial.states == nullptr) return;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = row() + sum_row() + lane_row() + 16 * m + 8 * i;
        if (!resumes(params, tile, r, head)) continue;
        sums_reference[m][i] = state_of(params, r, head).max * kLog2E;
        resume_sums(params.partial.sums, r, head, column(), i, sums[m]);
      }
#pragma unroll
    for (int m = 0; m < kScoreM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = row() + score_row() + lane_row() + 16 * m + 8 * i;
        if (!has_scores() || !resumes(params, tile, r, head)) continue;
        score_reference[m][i] = score_max[m][i] = state_of(params, r, head).max * kLog2E;
        if (key_warp() == 0 && threadIdx.x % 4 == 0) score_sum[m][i] = state_of(params, r, head).sum;
      }
  }

  // And their maxima, to shared memory.
  __device__ void mask_scores(float (&scores)[kScoreM][kScoreN8][4], Visibility visibility, const WorkSlice& slice,
                              int first_key) const {
    if (params.scores.softcap_scale != 0) apply_softcap(scores, params.scores.softcap_scale);
    if (visibility != Visibility::full) apply_mask(scores, slice, row() + score_row() + lane_row(), first_key);
#pragma unroll
    for (int m = 0; m < kScoreM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float most = row_maximum(scores[m], i);
        if (threadIdx.x % 4 == 0) store_float(of_row(score_row() + lane_row() + 16 * m + 8 * i, key_warp()), most);
      }
  }

  // A row's maximum score among all keys of this tile, and the reference that follows from it. A row's own keys decide.
  __device__ float reference(float old, int r) const {
    float most = load_float(of_row(r, 0));
#pragma unroll
    for (int keys = 1; keys < kKeyWarps; ++keys) most = max_nan(most, load_float(of_row(r, keys)));
    most *= params.scores.scale_log2;
    return most > old + 8 || old == kMinusInfinity<float> ? most : old;
  }

  // Scores become P in shared memory.
  __device__ void softmax(float (&scores)[kScoreM][kScoreN8][4]) {
    const float scale_log2 = params.scores.scale_log2;
#pragma unroll
    for (int m = 0; m < kScoreM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        score_max[m][i] = max_nan(score_max[m][i], row_maximum(scores[m], i) * scale_log2);
        const float now = reference(score_reference[m][i], score_row() + lane_row() + 16 * m + 8 * i),
                    finite = reference_of(now);
        float sum = 0;
#pragma unroll
        for (int n = 0; n < kScoreN8; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& score = scores[m][n][2 * i + j];
            score = probability_against(finite, score, scale_log2);
            sum += score;
          }
        score_sum[m][i] = score_sum[m][i] * exp2_fast(score_reference[m][i] - finite) + sum;
        score_reference[m][i] = now;
      }
    store_packed<N, kRows, kPitch>(q + kPAt, score_row(), kScoreN8 * key_warp(), scores);
  }

  // Sums are rescaled to the new references.
  __device__ void follow_references() {
    float rescale[kM][2];
    bool same = true;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float now = reference(sums_reference[m][i], sum_row() + lane_row() + 16 * m + 8 * i);
        rescale[m][i] = exp2_fast(sums_reference[m][i] - reference_of(now));
        same = same && sums_reference[m][i] == now;
        sums_reference[m][i] = now;
      }
    if (!__all_sync(0xffffffffu, same)) rescale_rows(sums, rescale);
  }

  // One value of each row of scores, to be combined over the warps that share its keys.
  __device__ void share(const float (&values)[kScoreM][2]) const {
    __syncthreads();
    if (has_scores() && threadIdx.x % 4 == 0)
#pragma unroll
      for (int m = 0; m < kScoreM; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          store_float(of_row(score_row() + lane_row() + 16 * m + 8 * i, key_warp()), values[m][i]);
    __syncthreads();
  }

  __device__ void end() {
    // Not an array of RowState: nvcc 13.0 was seen to begin the maximum of one of four with 0.
    float max[kM][2], sum[kM][2], rescale[kM][2];
    share(score_max);  // every warp has read its rows' old states
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = sum_row() + lane_row() + 16 * m + 8 * i;
        max[m][i] = load_float(of_row(r, 0));
#pragma unroll
        for (int keys = 1; keys < kKeyWarps; ++keys) max[m][i] = max_nan(max[m][i], load_float(of_row(r, keys)));
        rescale[m][i] = exp2_fast(sums_reference[m][i] - reference_of(max[m][i]));
      }
#pragma unroll
    for (int m = 0; m < kScoreM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) score_sum[m][i] = row_total(score_sum[m][i]);
    share(score_sum);
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = sum_row() + lane_row() + 16 * m + 8 * i;
        sum[m][i] = load_float(of_row(r, 0));
#pragma unroll
        for (int keys = 1; keys < kKeyWarps; ++keys) sum[m][i] += load_float(of_row(r, keys));
      }
    rescale_rows(sums, rescale);
    const bool owner = column_warp() == 0 && threadIdx.x % 4 == 0;
    float most = kMinusInfinity<float>;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int r = row() + sum_row() + lane_row() + 16 * m + 8 * i;
        if (r >= params.q.view.rows) continue;
        RowState<float> state;
        if (max[m][i] != kMinusInfinity<float>) state = {max[m][i] * kLn2, sum[m][i] * rescale[m][i]};
        most = max_nan(most, state.max);
        end_row(params, tile, r, head, state, owner, column(), i, sums[m]);
      }
    raise_max_logit(params, head, most);
  }
};

template <class Tile>
__device__ void run_wide_tile(const ForwardParams& params, unsigned char* shared) {
  const int item = static_cast<int>(blockIdx.x) / params.heads_q, head = static_cast<int>(blockIdx.x) % params.heads_q;
  if (item < *params.list.tiles) Tile(params, shared_address(shared), params.list.order[item], head).run();
}

template <class N, bool kLargeShared>
__global__ void __launch_bounds__(kWideThreads, 1) wide_forward_kernel(const __grid_constant__ ForwardParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  run_wide_tile<WideForwardTile<MmaProducts<N, kLargeShared>>>(params, shared);
}

inline void launch_wide_forward(void (*kernel)(ForwardParams), std::size_t shared, const ForwardParams& params,
                                cudaStream_t stream) {
  const dim3 blocks(static_cast<unsigned>(params.tiles) * static_cast<unsigned>(params.heads_q));
  launch(kernel, {blocks, dim3(kWideThreads), shared}, stream, params);
}

template <class N>
void run_wide_forward(bool large_shared, const ForwardParams& params, cudaStream_t stream) {
  constexpr bool kF32 = N::kF32;
  static_assert(WideForwardTile<MmaProducts<N, false>>::kSharedBytes == wide_forward_shared(kF32, false));
  static_assert(WideForwardTile<MmaProducts<N, !kF32>>::kSharedBytes == wide_forward_shared(kF32, true));
  auto* kernel = &wide_forward_kernel<N, false>;
  if constexpr (!N::kF32)
    if (large_shared) kernel = &wide_forward_kernel<N, true>;
  launch_wide_forward(kernel, static_cast<std::size_t>(wide_forward_shared(N::kF32, large_shared)), params, stream);
}

}  // namespace weft::cuda
