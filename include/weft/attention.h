// Attention on one rank: what a caller sets, and the two functions that compute it with the kernels of kernel.h.
//
// Query head h reads K/V head h / (heads_q / heads_k). With x = scale·(q·k) a logit is x, or softcap·tanh(x / softcap).
// out = sum over visible keys of exp(logit - lse)·v, lse = log(sum of exp(logit) + exp(sink)).
// A row that sees no key has out and gradients of exactly 0 and an lse of -inf (or the sink). Rows that see nothing and
// keys that nobody sees are never read; every element of every output is written.
//
// In shapes, tq and tk are rows of queries and keys, hq and hk heads, dqk and dv head dims.
#pragma once

#include <optional>
#include <span>
#include <string_view>

#include "weft/device.h"
#include "weft/slice.h"
#include "weft/tensor.h"

namespace weft {

class DevicePlan;  // device_plan.h

// The layer of a call that does not say which one it belongs to.
inline constexpr Index kNoLayer = -1;

// An attention sink: a logit without a value that enters the denominator of every row's softmax.
struct Sink {
  enum class Kind { none, off_by_one, learnable };
  Kind kind = Kind::none;
  ConstTensorView logits = {};  // [hq] f32 or f64; learnable only

  static Sink none() { return {}; }
  static Sink off_by_one() { return {Kind::off_by_one, {}}; }  // logit 0: the denominator is 1 + sum
  static Sink learnable(ConstTensorView logits) { return {Kind::learnable, logits}; }
};

// The settings of a model, the same for every call of a layer.
struct Attention {
  std::optional<double> scale = {};      // of logits; left out: 1 / sqrt(dqk)
  double softcap = 0;                    // 0: off
  Sink sink = {};                        // left out: none
  std::span<const Index> head_map = {};  // [hq] K/V head of each query head; left out: equal groups
  ConstTensorView bias = {};             // refused if given (support.h): no kernel computes it
  double dropout = 0;                    // refused unless 0
};

// Split-KV for q heads in all: the default of ForwardArgs::keys_per_split. Few heads do not fill a GPU by themselves.
constexpr Index default_keys_per_split(Index heads_q) { return heads_q > 16 ? kUnlimited : heads_q > 8 ? 16384 : 8192; }

// Arguments of attend(). Tensors belong to the caller and lie in `place`; slices and head_map are read on the host.
struct ForwardArgs {
  ConstTensorView q = {};  // [tq, hq, dqk]
  ConstTensorView k = {};  // [tk, hk, dqk], dtype of q
  ConstTensorView v = {};  // [tk, hk, dv], dtype of q
  // Which rows of q see which rows of k. No pair may lie in two slices (Problem and make_plan guarantee that); none at
  // all: no row sees a key.
  std::span<const Slice> slices = {};
  // Instead of `slices`: slices in device memory, whose number the host does not know. Such a call may be captured in a
  // CUDA graph, which then attends what the plan holds when it is replayed.
  DevicePlan* device_plan = nullptr;
  Attention attention = {};
  TensorView out = {};        // [tq, hq, dv] any dtype
  TensorView lse = {};        // [tq, hq] f32 or f64, natural log, with the sink; optional
  TensorView max_logit = {};  // [hq] f32 or f64, without the sink, -inf if nothing is visible; optional
  // Split-KV: a row that sees more keys than this may be computed in splits of about so many, in parallel, which are
  // merged in a fixed order. kUnlimited: never split. 0: default_keys_per_split(hq). A row's bits depend on it; kernels
  // that do not split ignore it.
  Index keys_per_split = 0;
  Place place = {};  // left out: the CPU
};

// Arguments of attend_backward(). out and lse are those of whole rows, so k and v may be some of the keys: dq is then
// the part of it that comes from these keys.
struct BackwardArgs {
  ConstTensorView q = {};              // [tq, hq, dqk]
  ConstTensorView k = {};              // [tk, hk, dqk], dtype of q
  ConstTensorView v = {};              // [tk, hk, dv], dtype of q
  std::span<const Slice> slices = {};  // as in ForwardArgs
  DevicePlan* device_plan = nullptr;   // as in ForwardArgs
  Attention attention = {};            // as in the forward
  ConstTensorView dout = {};           // [tq, hq, dv] any dtype
  ConstTensorView out = {};            // [tq, hq, dv] of the forward; optional, together with lse
  ConstTensorView lse = {};            // [tq, hq] of the forward; left out: both are computed again, from these keys
  TensorView dq = {};                  // [tq, hq, dqk] any dtype
  TensorView dk = {};                  // [tk, hk, dqk] any dtype
  TensorView dv = {};                  // [tk, hk, dv] any dtype
  TensorView dsink = {};  // [hq] f32 or f64, over the rows that see a key in `slices`; optional, learnable sink only
  Place place = {};       // left out: the CPU
  bool deterministic = false;  // the same bits on every run; CPU kernels always have them
};

// Checks the arguments and computes with the best kernel that is meant by the name and can do the call: one of
// kernels(), "cpu" for any CPU target, "" for any. Error, before anything is written, with each kernel's reason if none
// can; a kernel that was named is never replaced by another.
WEFT_API void attend(const ForwardArgs& args, std::string_view kernel = "");
WEFT_API void attend_backward(const BackwardArgs& args, std::string_view kernel = "");

// Threads that CPU kernels use at most, all calls together; 0: as many as the machine has.
WEFT_API void set_cpu_threads(int threads);

}  // namespace weft
