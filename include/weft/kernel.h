// For those who write kernels, or call one several times on parts of the keys: what a kernel is given, and the registry
// of all kernels. Each kernel says what it can do and, if it cannot, why.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "weft/attention.h"
#include "weft/device.h"
#include "weft/state.h"

namespace weft {

// Partial softmax states of all rows, which further calls add keys to and finish_partial ends. They start as
// RowState{}; `sums` may start as anything, because the sums of an empty state are never read.
struct PartialView {
  TensorView sums = {};                    // [tq, hq, dv] f32, or f64 of f64 inputs: sums of exp(logit - max)·v
  RowState<float>* states = nullptr;       // [tq, hq] if sums are f32
  RowState<double>* states_f64 = nullptr;  // [tq, hq] if sums are f64

  bool given() const { return states != nullptr || states_f64 != nullptr || sums.heads != 0; }
};

// Shared by calls that have the same queries and each some of the keys, such as the steps of a ring. The kernel keeps
// its own accumulators between them; out and lse, or dq, are complete after the last call. For kernels that can
// (Kernel::takes_steps).
struct QuerySteps {
  std::span<const Range> rows = {};  // query rows that occur in the slices of any call; the same in all calls
  // Of each of `rows` the last call that has slices for it, counted from 0; optional. A kernel may then finish rows
  // before the last call.
  std::span<const Index> ends = {};
  bool last = false;                 // the caller sets it for the last call
  std::shared_ptr<void> state = {};  // the kernel's, empty before the first call and after the last
};

// What a kernel is given in a forward: arguments that were checked, and where the results of several calls meet.
struct KernelForwardArgs : ForwardArgs {
  PartialView partial = {};     // instead of out, lse and max_logit; rows in no slice keep what they have. Optional
  QuerySteps* steps = nullptr;  // out and lse are the same in all calls, complete after the last. Optional
};

// What a kernel is given in a backward.
struct KernelBackwardArgs : BackwardArgs {
  // dk and dv, which are then f32 (or f64 of f64 inputs), are added to; keys that nobody sees keep their bits.
  bool add_keys = false;
  QuerySteps* steps = nullptr;  // dq is the same in all calls, the kernel's own memory until the last. Optional
};

// Arguments of finish_partial().
struct FinishArgs {
  PartialView partial = {};   // of the forward calls
  Sink sink = {};             // left out: none
  TensorView out = {};        // [tq, hq, dv] any dtype
  TensorView lse = {};        // [tq, hq] f32 or f64, natural log, with the sink; optional
  TensorView max_logit = {};  // [hq] f32 or f64, without the sink; optional
  Place place = {};           // left out: the CPU
};

// What decides whether a kernel can do a call.
struct KernelRequest {
  Pass pass = Pass::forward;
  DType dtype = DType::f32;  // of q, k and v
  Index dim_qk = 0, dim_v = 0;
  bool partial = false;                 // KernelForwardArgs::partial is given
  bool add_keys = false;                // KernelBackwardArgs::add_keys
  DeviceKind device = DeviceKind::cpu;  // where the tensors lie
  bool device_plan = false;             // slices in device memory
  int gpu = 0;                          // which of several GPUs
};

// One entry of the registry.
struct Kernel {
  std::string_view name;   // "reference", "cpu.scalar", "cpu.neon", "cpu.avx2", "cpu.avx512", ...
  std::string_view about;  // one line
  // Why it cannot do the request; none if it can. Asks this machine too, so the answer holds here and now.
  std::optional<std::string> (*refusal)(const KernelRequest& request);
  void (*forward)(const KernelForwardArgs& args);
  void (*backward)(const KernelBackwardArgs& args);
  // Whether it can do such calls with QuerySteps; null: never.
  bool (*takes_steps)(const ForwardArgs& args) = nullptr;
  bool (*takes_steps_backward)(const BackwardArgs& args) = nullptr;
};

// Every kernel of this build, best first; those for other machines refuse every request.
WEFT_API std::span<const Kernel> kernels();
// The kernel of that name; "cpu" is the best CPU target of this machine, "" the best of all. Error lists the names.
WEFT_API const Kernel& find_kernel(std::string_view name);

// As attend and attend_backward of attention.h, for one of several calls on parts of the keys.
WEFT_API void attend(const KernelForwardArgs& args, std::string_view kernel = "");
WEFT_API void attend_backward(const KernelBackwardArgs& args, std::string_view kernel = "");
// Turns partial states into out, lse and max_logit.
WEFT_API void finish_partial(const FinishArgs& args);

}  // namespace weft
