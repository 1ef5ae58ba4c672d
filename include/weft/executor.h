// The executor runs a schedule, forward and backward: the only place where plans, kernels and communicators meet.
#pragma once

#include <functional>
#include <memory>
#include <memory_resource>
#include <span>
#include <string>

#include "weft/attention.h"
#include "weft/communicator.h"
#include "weft/device.h"
#include "weft/kernel.h"
#include "weft/schedule.h"

namespace weft {

// Something that this rank did, as the observer is told.
struct StepEvent {
  enum class Kind {
    wait,       // waited for the keys of the step
    compute,    // attended the slices of the step
    give_back,  // waited for gradients of keys that travel to their owners
  };
  Kind kind = Kind::compute;
  Pass pass = Pass::forward;
  Index step = 0, steps = 0;  // which of how many
  Index slices = 0;           // of the step
  double begin = 0, end = 0;  // seconds since the pass began
};

// Options of an Executor, the same on every rank but for `observer`, `memory` and `place`.
struct ExecutorOptions {
  std::string kernel = {};  // as for attend
  // Gradients have the same bits on every run. CPU kernels and all sums over ranks always have a fixed order; GPU
  // kernels take longer with it.
  bool deterministic = false;
  // Ranks compare fingerprints of the problem, the options and each call's arguments, and messages carry checksums: an
  // Error names the ranks that differ. Makes the constructor collective. On a GPU calls wait for it.
  bool checked = false;
  std::function<void(const StepEvent&)> observer = {};  // called by the rank's own thread; optional
  std::pmr::memory_resource* memory = nullptr;  // for workspaces; null: new and delete, or the GPU's memory pool
  // Where the tensors of all calls lie. On a GPU the constructor is collective, and a call returns when its work is in
  // the stream.
  Place place = {};
};

// Rows of a source whose K and V are wanted: the first ones of the buffer of a step.
struct SourceRows {
  ConstTensorView rows = {};              // [rows, 1, width], contiguous
  std::span<const Range> seen = {};       // rows that queries see, in order; the others may hold anything
  std::span<const Index> tokens = {};     // of the rows that are seen, one after another
  std::span<const Index> positions = {};  // of the same, in their sequences
  Range heads = {};                       // K/V heads that are wanted
  Index step = 0;                         // of the schedule; `seen`, tokens and positions are the same in each pass
  Place place = {};                       // the call's: work is put into its stream
};

// K and V, or their gradients, of the same rows.
struct KeyValueViews {
  ConstTensorView k = {};  // [rows, heads, dqk]
  ConstTensorView v = {};  // [rows, heads, dv]
};

// What K and V are made of, row by row: it moves in their place (a latent, say). Both functions are called by the
// rank's own thread inside of a pass, once or several times a step, and must not call the executor.
struct Source {
  ConstTensorView rows = {};  // [tk, 1, width] of q's dtype, contiguous: the rank's own
  // K and V of the heads asked for, in q's dtype: of the rows that are seen alone, one after another. The memory stays
  // the caller's, and what it is until the next call of one of the two functions, or the end of the pass.
  std::function<KeyValueViews(const SourceRows&)> expand = {};
  // Backward, after expand() of the same rows and heads: adds what the gradients of K and V, of the rows that are seen
  // and in q's dtype, make of those rows to `gradient` [rows, 1, width], f32 or f64. It has all rows of the buffer.
  std::function<void(const SourceRows&, const KeyValueViews&, const TensorView& gradient)> reduce = {};
};

// Arguments of Executor::forward. Rows are the rank's own, tq and tk of them by the layouts; what they see is the
// schedule's. Shapes and dtypes are those of ForwardArgs (attention.h).
struct ExecutorForwardArgs {
  ConstTensorView q = {};     // [tq, hq, dqk]
  ConstTensorView k = {};     // [tk, hk, dqk]
  ConstTensorView v = {};     // [tk, hk, dv]
  Attention attention = {};   // head_map is that of the schedule
  TensorView out = {};        // [tq, hq, dv]
  TensorView lse = {};        // [tq, hq]; optional
  TensorView max_logit = {};  // [hq] over all ranks, the same on each; optional
  Index keys_per_split = 0;   // as in ForwardArgs; 0: by the heads of the whole problem
  Place place = {};           // the device of ExecutorOptions::place; the stream may be another
  Index layer = kNoLayer;     // of the model; checked ranks compare it, because calls of two layers look alike
  // One for each plan of the schedule, in its place, made in the stream of `place`. The schedule's own plans say only
  // which steps there are, so its moves must not depend on them. Such a call can be captured in a CUDA graph: on one
  // rank, or over NCCL after a first call outside of the capture, in which NCCL connects the ranks. Optional
  std::span<DevicePlan* const> device_plans = {};
  // In place of k and v, which are then left out. Not with device_plans. Optional
  const Source* source = nullptr;
};

// Arguments of Executor::backward; the same rows.
struct ExecutorBackwardArgs {
  ConstTensorView q = {};     // [tq, hq, dqk]
  ConstTensorView k = {};     // [tk, hk, dqk]
  ConstTensorView v = {};     // [tk, hk, dv]
  Attention attention = {};   // as in the forward
  ConstTensorView dout = {};  // [tq, hq, dv]
  ConstTensorView out = {};   // [tq, hq, dv] of the forward
  ConstTensorView lse = {};   // [tq, hq] of the forward
  TensorView dq = {};         // [tq, hq, dqk]
  TensorView dk = {};         // [tk, hk, dqk]
  TensorView dv = {};         // [tk, hk, dv]
  TensorView dsink = {};      // [hq] over all ranks, the same on each; optional, learnable sink only
  Place place = {};           // as in the forward
  Index layer = kNoLayer;     // as in the forward
  std::span<DevicePlan* const> device_plans = {};  // as in the forward
  const Source* source = nullptr;                  // as in the forward, in place of k, v, dk and dv
  TensorView dsource = {};                         // [tk, 1, width]; with a source
};

// Runs one rank's schedule. Belongs to one thread at a time: a call that begins while another is in it is an Error. All
// ranks make the same calls in the same order. Workspaces are kept for the next call and freed by the destructor.
class WEFT_API Executor {
 public:
  // The communicator must outlive the executor; rank and ranks are those of the schedule.
  Executor(Communicator& communicator, Schedule schedule, ExecutorOptions options = {});
  ~Executor();
  Executor(Executor&&) noexcept;
  Executor& operator=(Executor&&) = delete;

  // Collective. Error before anything moves if the arguments do not fit.
  void forward(const ExecutorForwardArgs& args);
  void backward(const ExecutorBackwardArgs& args);

  const Schedule& schedule() const;
  Index workspace_bytes() const;  // held now

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

}  // namespace weft
