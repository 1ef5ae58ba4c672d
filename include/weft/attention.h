// What every kernel is asked, and the exact reference that answers in f64.
//
// Query head h uses K/V head h / (heads_q / heads_k). With x = scale·(q·k) a logit is x, or softcap·tanh(x / softcap).
// out = sum over visible keys of exp(logit - lse)·v, lse = log(sum of exp(logit) + exp(sink)).
// A row that sees no key: out and gradients exactly 0, lse -inf (or the sink). Rows that see nothing and rows that
// nobody sees are never used; every element of every output is written.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "weft/config.h"
#include "weft/device.h"
#include "weft/slice.h"
#include "weft/state.h"
#include "weft/tensor.h"

namespace weft {

class DevicePlan;  // device_plan.h

// A logit beside the keys' that has no value: it takes a share of every row.
struct Sink {
  enum class Kind { none, off_by_one, learnable };
  Kind kind = Kind::none;
  ConstTensorView logits = {};  // [hq] f32 or f64, if learnable

  static Sink none() { return {}; }
  static Sink off_by_one() { return {Kind::off_by_one, {}}; }  // logit 0: softmax with 1 + sum in the denominator
  static Sink learnable(ConstTensorView logits) { return {Kind::learnable, logits}; }
};

// What a model sets.
struct Attention {
  std::optional<double> scale = {};  // 1 / sqrt(dim_qk) if not given
  double softcap = 0;                // 0: off
  Sink sink = {};
  std::span<const Index> head_map = {};  // [hq] K/V head of each query head; empty: heads in equal groups
  // Refused if given (support.h): nothing here computes them, and nothing is ignored.
  ConstTensorView bias = {};
  double dropout = 0;
};

// Un-normalised results that further calls add keys to (other slices, other K/V) and finish_partial ends. Starts as
// RowState{} and anything in `sums`: the sum of an empty state is never read. Of f64 inputs they may be f64 too.
struct PartialView {
  TensorView sums = {};                    // [tq, hq, dv] f32 or f64
  RowState<float>* states = nullptr;       // [tq, hq], with sums in f32, or
  RowState<double>* states_f64 = nullptr;  // .. with sums in f64

  bool given() const { return states != nullptr || states_f64 != nullptr || sums.heads != 0; }
};

// Calls with the same queries and parts of the keys, as the steps of a ring: what all need to know of the rows stays
// with the kernel between them, out and lse, or dq, are written by the last. All calls have the same dq, whose memory
// is the kernel's from the first call on. For kernels that can (Kernel::takes_steps).
struct QuerySteps {
  std::span<const Range> rows = {};  // that slices of some call hold, the same in all calls
  // Of each of `rows` the last call that holds some of them, counted from 0, or nothing: with it a kernel is done with
  // rows before the last call.
  std::span<const Index> ends = {};
  bool last = false;
  std::shared_ptr<void> kept = {};  // the kernel's, from the first call to the last
};

// ForwardArgs::part_keys for so many query heads: those of the whole problem where a call has only some of them.
constexpr Index part_keys_of(Index heads_q) { return heads_q > 16 ? kUnlimited : heads_q > 8 ? 16384 : 8192; }

inline constexpr Index kNoLayer = -1;

// Slices are in rows of these buffers; no pair may lie in two of them (Problem and make_plan see to that).
struct ForwardArgs {
  ConstTensorView q = {};  // [tq, hq, dqk]
  ConstTensorView k = {};  // [tk, hk, dqk]
  ConstTensorView v = {};  // [tk, hk, dv], all three of one dtype
  std::span<const Slice> slices = {};
  // Instead of `slices`: slices in device memory, whose number the host does not know. Such a call may be captured in a
  // CUDA graph, which then attends what the plan holds when it is replayed.
  DevicePlan* device_plan = nullptr;
  Attention attention = {};
  TensorView out = {};          // [tq, hq, dv]; not with `partial`
  TensorView lse = {};          // [tq, hq] f32 or f64, natural log, with the sink; optional
  TensorView max_logit = {};    // [hq] f32 or f64, without the sink, -inf if nothing is visible; optional
  PartialView partial = {};     // instead of out and lse: rows in no slice keep what they have
  QuerySteps* steps = nullptr;  // out and lse, the same in all calls, are then complete after the last one
  // Rows that see more keys may be computed in parts of about so many, several at once, and merged in a fixed order:
  // what long rows of few heads need to fill a GPU. kUnlimited: they are not. 0: part_keys_of(q.heads). A row's bits
  // depend on it; kernels without parts do not look.
  Index part_keys = 0;
  Place place = {};  // of all tensors; slices and head_map are read on the host
  // Which layer of a model asks. Checked ranks compare it: calls of two layers look alike in all the rest. Kernels do
  // not look.
  Index layer = kNoLayer;
};

// out and lse are those of the whole row, so K/V may be a part of the keys: dq is then that part's share.
struct BackwardArgs {
  ConstTensorView q = {};  // [tq, hq, dqk]
  ConstTensorView k = {};  // [tk, hk, dqk]
  ConstTensorView v = {};  // [tk, hk, dv]
  std::span<const Slice> slices = {};
  DevicePlan* device_plan = nullptr;  // as in ForwardArgs
  Attention attention = {};
  ConstTensorView dout = {};  // [tq, hq, dv]
  ConstTensorView out = {};   // [tq, hq, dv] of the forward, and
  ConstTensorView lse = {};   // [tq, hq]: both or neither; the reference computes them anew where they are left out
  TensorView dq = {};         // [tq, hq, dqk]
  TensorView dk = {};         // [tk, hk, dqk]
  TensorView dv = {};         // [tk, hk, dv]
  // dk and dv, then f32 (or f64, of f64 inputs), are added to: keys that nobody sees keep what they have, bit for bit.
  bool add_keys = false;
  TensorView dsink = {};  // [hq] f32 or f64, over the rows that see a key in `slices`; optional, learnable sink only
  Place place = {};       // as in ForwardArgs
  bool deterministic = false;   // the same bits on every run; kernels that have them always do not look
  QuerySteps* steps = nullptr;  // dq is then written by the last call only
  Index layer = kNoLayer;       // as in ForwardArgs
};

// Everything below throws Error, naming the tensor, the values and the way out, before it writes anything.
// All arithmetic is f64; every output is rounded once, to the dtype of its view.
WEFT_API void reference_forward(const ForwardArgs& args);
WEFT_API void reference_backward(const BackwardArgs& args);

// What is known of every query row after some of its keys.
struct ReferenceState {
  ReferenceState(Index tokens_q, Index heads_q, Index dim_v)
      : rows(tokens_q),
        heads(heads_q),
        dim(dim_v),
        states(static_cast<std::size_t>(rows * heads)),
        accumulators(static_cast<std::size_t>(rows * heads * dim)),
        max_logit(static_cast<std::size_t>(heads), kMinusInfinity<double>) {}

  Index rows, heads, dim;
  std::vector<RowState<double>> states;  // [tq, hq]
  std::vector<double> accumulators;      // [tq, hq, dv], not normalised
  std::vector<double> max_logit;         // [hq]
};

// Adds the keys of `slices` to the state: reads q, k, v, slices and attention of `args`.
WEFT_API void reference_partial(const ForwardArgs& args, ReferenceState& state);
// The end of all partial steps: reads the sink of `args` and writes its out, lse and max_logit.
WEFT_API void reference_finish(const ReferenceState& state, const ForwardArgs& args);

}  // namespace weft
