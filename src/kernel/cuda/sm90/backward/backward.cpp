#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/handle_pool.h"
#include "cuda/runtime.h"
#include "index.h"
#include "kernel/cuda/host.h"
#include "kernel/cuda/sm90/aligned_copy.h"
#include "kernel/cuda/sm90/backward/work.h"
#include "kernel/cuda/work/list.h"
#include "kernel/cuda_kernels.h"
#include "text.h"

namespace weft::cuda::sm90 {
namespace {

// A tensor in the inputs' dtype: itself, or a rounded copy.
struct Rounded {
  Rounded(const ConstTensorView& from, DType dtype, cudaStream_t stream) : view(from) {
    if (from.dtype == dtype || from.rows == 0) return;
    const Index width = ceil_div(from.dim, 8) * 8;
    copy = StreamArray<std::uint16_t>(at(from.rows * from.heads * width), stream);
    round_to(from, dtype, copy.get(), width, stream);
    view = thd(copy.get(), dtype, from.rows, from.heads, width);
    view.dim = from.dim;
  }
  StreamArray<std::uint16_t> copy;
  ConstTensorView view;
};

// Mean number of query rows of a slice.
Index mean_rows(const KernelBackwardArgs& args) {
  if (args.device_plan != nullptr) return mean_rows_of(*args.device_plan);
  Index rows = 0;
  if (args.steps != nullptr) {
    for (const Range& r : args.steps->rows) rows += r.size();
    return args.steps->rows.empty() ? 0 : rows / static_cast<Index>(args.steps->rows.size());
  }
  for (const Slice& s : args.slices) rows += s.q_end - s.q_begin;
  return args.slices.empty() ? 0 : rows / static_cast<Index>(args.slices.size());
}

// The work of a call, from the cache if `known`, otherwise new and still to be completed.
struct CachedWork {
  CachedWork(const KernelBackwardArgs& args, const BackwardShape& shape, int log2_heads, int dq_tiles_per_item,
             cudaStream_t stream) {
    enum : Index { kBackward = 2 };
    if (args.device_plan == nullptr) {
      sizes = {kBackward,       args.q.rows, args.k.rows,       args.q.heads,          args.k.heads, shape.keys,
               shape.log2_rows, log2_heads,  dq_tiles_per_item, args.add_keys ? 1 : 0, shape.dim_qk};
      if (args.steps != nullptr)
        for (const Range& r : args.steps->rows) sizes.insert(sizes.end(), {r.begin, r.end});
      key = {args.slices, args.attention.head_map, sizes};
      of = std::static_pointer_cast<BackwardWork>(find_cached_lists(key, stream));
    }
    known = of != nullptr;
    if (!known) of = std::make_shared<BackwardWork>(args, shape, log2_heads, dq_tiles_per_item, stream);
  }
  void complete(int sm_count, cudaStream_t stream) {
    if (known) return;
    of->add_keys(sm_count, stream);
    if (!sizes.empty()) cache_lists(key, of, of->bytes(), stream);
  }
  // Are the lists complete before prepare_rows, which is launched without programmatic stream serialization? Those that
  // were cached are, and those of a device_plan, to which nothing is added after it.
  bool ready_first() const { return known || sizes.empty(); }
  std::vector<Index> sizes;  // empty with a device_plan
  ListKey key;
  std::shared_ptr<BackwardWork> of;
  bool known = false;
};

Index most_key_tiles(const KernelBackwardArgs& args, const BackwardWork& work, const BackwardShape& shape) {
  if (args.device_plan != nullptr) return work.keys.active;
  return ceil_div(args.k.rows, shape.keys) + static_cast<Index>(args.slices.size());
}

// Statistics of the query rows and the sums of dQ, for one call or for all calls of QuerySteps.
struct StepMemory {
  // `room`: memory for the statistics, or null.
  StepMemory(std::size_t of, std::size_t columns, const void* of_dq, float* room, cudaStream_t stream)
      : rows(of),
        dq(of_dq),
        memory((columns + (room == nullptr ? 2 : 0)) * of, stream),
        statistics(room != nullptr ? room : memory.get() + columns * of),
        dq_sums(columns > 0 ? memory.get() : nullptr) {}
  std::size_t rows;
  const void* dq;
  StreamArray<float> memory;
  float *statistics, *dq_sums;  // 2 floats per row; `columns` floats per row
};

// The memory of dQ as scratch for the statistics, which are read before dQ is written; null if dQ is not dense and
// large enough.
float* scratch_in_dq(const TensorView& dq, std::size_t rows) {
  const bool dense = dq.inner == 0 && dq.head_stride == dq.dim && dq.row_stride == dq.heads * dq.dim;
  const auto bytes = at(dq.rows * dq.heads * dq.dim * size_of(dq.dtype));
  const bool fits = dense && reinterpret_cast<std::uintptr_t>(dq.data) % 16 == 0 && bytes >= 2 * rows * sizeof(float);
  return fits ? static_cast<float*>(dq.data) : nullptr;
}

// What the kernels of a call share.
struct BackwardInputs {
  const KernelBackwardArgs& args;
  const BackwardWork& work;
  DType dtype;
  int group;  // query heads of a K/V head, or 0 with a head_map
  double scale;
  float *statistics, *dq_sums;
  int* additions;
  const AlignedOutput &dk, &dv;
};
PrepareParams prepare_params(const BackwardInputs& p, const QueryTiles& rows, double* dsink, int* counter) {
  return {.out = input_view(p.args.out, p.dtype),
          .dout = input_view(p.args.dout, p.dtype),
          .lse = p.args.lse,
          .rows = rows,
          .sink = sink_of(p.args.attention.sink),
          .scale = static_cast<float>(p.scale),
          .statistics = p.statistics,
          .dq_sums = p.dq_sums,
          .additions = p.additions,
          .dsink = dsink,
          .counter = counter,
          .heads_q = static_cast<int>(p.args.q.heads)};
}
BackwardParams backward_params(const BackwardInputs& p, int* counter) {
  return {.q = {},
          .dout = {},
          .k = {},
          .v = {},
          .rows = p.work.rows,
          .keys = p.work.keys,
          .heads = {p.work.heads, p.group},
          .q_rows = static_cast<int>(p.args.q.rows),
          .k_rows = static_cast<int>(p.args.k.rows),
          .heads_k = static_cast<int>(p.args.k.heads),
          .sm_count = sm_count_of(p.args.place.device),
          .counter = counter,
          .scores = score_scale_of(p.scale, p.args.attention.softcap),
          .scale = static_cast<float>(p.scale),
          .statistics = p.statistics,
          .dq_sums = p.dq_sums,
          .additions = p.additions,
          .dk = p.dk.view(),
          .dv = p.dv.view(),
          .vec8_dk = p.dk.vec8(),
          .vec8_dv = p.dv.vec8(),
          .add_keys = p.args.add_keys,
          .dk_parts = nullptr,
          .dv_parts = nullptr,
          .unseen = p.work.unseen,
          .unseen_tiles = p.args.add_keys ? 0 : p.work.unseen_tiles,
          .programmatic = false,
          .keys_ready = false};
}
DqParams dq_params(const BackwardInputs& p, const BackwardParams& products) {
  return {.q = products.q,
          .dout = products.dout,
          .k = {},
          .v = {},
          .rows = products.rows,
          .items = p.work.dq_items,
          .slices = p.work.dq_slices,
          .active = p.work.dq_active,
          .count = p.work.dq_count,
          .heads = products.heads,
          .k_rows = products.k_rows,
          .heads_q = static_cast<int>(p.args.q.heads),
          .scores = products.scores,
          .scale = products.scale,
          .statistics = p.statistics,
          .dq = p.args.dq,
          .vec8 = stores_vec8(p.args.dq, p.dtype)};
}
StoreParams store_params(const BackwardInputs& p, bool programmatic) {
  return {.rows = p.work.rows,
          .lse = p.args.lse,
          .dq_sums = p.dq_sums,
          .dq = p.args.dq,
          .vec8 = stores_vec8(p.args.dq, p.dtype),
          .programmatic = programmatic};
}

// The parts of dK and dV of tiles of keys that several items share (split_keys.h).
class KeyParts {
 public:
  KeyParts(const BackwardWork& work, const KernelBackwardArgs& args, const BackwardShape& shape, BackwardParams& params,
           cudaStream_t stream)
      : keys_(at(work.part_count * args.k.heads * shape.keys)),
        dk_(keys_ * at(shape.dim_qk), stream),
        dv_(keys_ * at(shape.dim_v), stream),
        sums_{work.split_tiles, work.split_count, shape.keys, shape.dim_qk, shape.dim_v,
              dk_.get(),        dv_.get(),        args.dk,    args.dv},
        heads_(static_cast<int>(args.k.heads)) {
    params.dk_parts = dk_.get();
    params.dv_parts = dv_.get();
  }
  // After dK and dV of the other tiles.
  void sum(cudaStream_t stream) const { sum_parts(sums_, heads_, stream); }

 private:
  std::size_t keys_;
  StreamArray<float> dk_, dv_;
  PartSums sums_;
  int heads_;
};

}  // namespace

bool takes_steps_backward(const BackwardArgs& args) { return !args.deterministic && args.device_plan == nullptr; }

void backward(const KernelBackwardArgs& given) {
  const DType dtype = given.q.dtype;
  Width width = width_of(dtype, given.q.dim, given.v.dim);
  // With softcap the registers of the kernel for 64 columns do not suffice.
  if (width == Width::w64 && given.attention.softcap > 0) width = Width::w128;
  const DeviceGuard on(given.place.device);
  const cudaStream_t stream = stream_of(given.place);
  KernelBackwardArgs args = given;
  check_rows(max_of(args.q.rows, args.k.rows));
  const RecomputedForward recomputed(args, &forward, stream);
  const BackwardShape shape = backward_shape(width);
  const int group = args.attention.head_map.empty() ? static_cast<int>(args.q.heads / args.k.heads) : 0;
  const int log2_heads = log2_heads_of_tile(group > 0 ? group : 1, shape.rows(), mean_rows(args));
  const int log2_size = shape.log2_rows - log2_heads;
  const Index units = args.q.heads >> log2_heads;
  CachedWork lists(args, shape, log2_heads, args.deterministic ? dq_tiles_per_item(width) : 0, stream);
  const BackwardWork& work = *lists.of;
  const bool alone = args.deterministic && !work.ordered_dq;  // dQ in a kernel of its own
  check_grid(max_of(work.rows.tiles, most_key_tiles(args, work, shape)), max_of(units, args.k.heads));

  const std::size_t tiles = at(work.rows.tiles) * at(units), rows = tiles * at(shape.rows());
  auto step_memory = args.steps != nullptr ? std::static_pointer_cast<StepMemory>(args.steps->state) : nullptr;
  const bool prepared = step_memory != nullptr;
  if (!prepared)
    step_memory = std::make_shared<StepMemory>(rows, alone ? 0 : at(shape.dim_qk), args.dq.data,
                                               alone ? nullptr : scratch_in_dq(args.dq, rows), stream);
  if (step_memory->rows != rows)
    throw Error(text("a call of QuerySteps has ", rows, " rows of tiles after one with ", step_memory->rows),
                "give all calls the same queries and the same QuerySteps::rows");
  if (step_memory->dq != args.dq.data)
    throw Error("a call of QuerySteps has another dq than the first one", "give all calls the same dq");
  float *const statistics = step_memory->statistics, *const dq_sums = step_memory->dq_sums;
  const StreamArray<int> additions(work.ordered_dq ? at(shape.parts_of_tile()) * tiles : 0, stream);
  const StreamArray<double> dsink(args.dsink.given() ? tiles << log2_heads : 0, stream);
  const StreamArray<int> own_counter(work.counter == nullptr ? 1 : 0, stream);
  QueryTiles unprepared = work.rows;
  if (prepared) unprepared.tiles = 0;
  const AlignedOutput dk(args.dk, dtype, stream), dv(args.dv, dtype, stream);
  const Rounded dout_rounded(args.dout, dtype, stream);
  const AlignedInput q(args.q, stream), k(args.k, stream), v(args.v, stream), dout(dout_rounded.view, stream);
  const BackwardInputs pass{args,       work,    dtype,           group, scale_of(args.attention, args.q.dim),
                            statistics, dq_sums, additions.get(), dk,    dv};
  prepare_rows(width, prepare_params(pass, unprepared, dsink.get(), own_counter.get()), stream);
  if (args.dsink.given()) sum_dsink(dsink.get(), work.rows.tiles, args.dsink, stream);

  lists.complete(sm_count_of(args.place.device), stream);
  BackwardParams params = backward_params(pass, work.counter != nullptr ? work.counter : own_counter.get());
  params.programmatic = lists.ready_first();
  params.keys_ready = params.programmatic && unprepared.tiles > 0 && !args.dsink.given();
  // Without rows there is no tensor to describe, and nothing is read.
  if (args.q.rows > 0 && args.k.rows > 0) {
    params.q = tensor_map(q.view(), 1 << log2_heads, 1 << log2_size);
    params.dout = tensor_map(dout.view(), 1 << log2_heads, 1 << log2_size);
    params.k = tensor_map(k.view(), 1, shape.keys);
    params.v = tensor_map(v.view(), 1, shape.keys);
  }
  const KeyParts parts(work, args, shape, params, stream);
  if (shares_keys(width))
    select_16bit(dtype, &run_backward_wide<Bf16>, &run_backward_wide<F16>)(params, stream);
  else
    select_16bit(dtype, &run_backward<Bf16>, &run_backward<F16>)(width, params, stream);
  dk.finish();
  dv.finish();
  parts.sum(stream);
  if (alone) {
    DqParams dq = dq_params(pass, params);
    if (args.q.rows > 0 && args.k.rows > 0) {  // its steps may have another number of keys
      dq.k = tensor_map(k.view(), 1, dq_shape(width).keys);
      dq.v = tensor_map(v.view(), 1, dq_shape(width).keys);
    }
    select_16bit(dtype, &run_dq<Bf16>, &run_dq<F16>)(width, dq, stream);
    return;
  }
  if (args.steps != nullptr) {
    args.steps->state = args.steps->last ? nullptr : step_memory;
    if (!args.steps->last) return;
  }
  store_rows(width, store_params(pass, params.programmatic), dtype, stream);
}

}  // namespace weft::cuda::sm90
