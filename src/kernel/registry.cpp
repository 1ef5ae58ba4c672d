#include "kernel/registry.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include "kernel/cpu/drive.h"
#include "kernel/inputs.h"
#include "text.h"
#include "weft/error.h"
#include "weft/kernel.h"

#ifdef WEFT_WITH_CUDA
#include "kernel/cuda/portable/portable.h"
#endif
#ifdef WEFT_WITH_SM90
#include "kernel/cuda/sm90/sm90.h"
#endif

namespace weft {
namespace {

constexpr const char* kNoScales = "it keeps no scale for every block, which floats of 8 bits need";
constexpr const char* kHostSlices = "it reads slices in memory of the CPU, and those of a device_plan lie on a GPU";

std::optional<std::string> cpu_refusal(const KernelRequest& request) {
  if (request.device != DeviceKind::cpu) return "it reads memory of the CPU, and the tensors lie on a GPU";
  if (request.device_plan) return kHostSlices;
  switch (request.dtype) {
    case DType::f32:
    case DType::bf16:
    case DType::f16:
      break;
    case DType::f64:
      return "it computes in f32 and would lose half of f64's digits";
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      return kNoScales;
  }
  return {};
}

// A function pointer per target: the registry is a plain table.
template <const cpu::Target& (*kTarget)()>
Kernel cpu_kernel(std::string_view name) {
  return {.name = name,
          .about = kTarget().about,
          .refusal = [](const KernelRequest& request) -> std::optional<std::string> {
            if (!kTarget().runs_here()) return "this machine does not have its instructions";
            return cpu_refusal(request);
          },
          .forward = [](const ForwardArgs& args) { cpu::forward(kTarget(), args); },
          .backward = [](const BackwardArgs& args) { cpu::backward(kTarget(), args); }};
}

// f64 inside; the caller's states are read and written around it.
template <class T>
void reference_kernel_partial(const ForwardArgs& args, RowState<T>* states) {
  const TensorView& sums = args.partial.sums;
  ReferenceState state(sums.rows, sums.heads, sums.dim);
  std::vector<char> touched(static_cast<std::size_t>(sums.rows), 0);
  for (const Slice& s : args.slices) {
    const Slice t = trimmed(s, false);
    for (Index row = t.q_begin; row < t.q_end; ++row) touched[static_cast<std::size_t>(row)] = 1;
  }
  for (Index row = 0; row < sums.rows; ++row) {
    for (Index head = 0; head < sums.heads; ++head) {
      const std::size_t at = static_cast<std::size_t>(row * sums.heads + head);
      const RowState<T>& old = states[at];
      if (!touched[static_cast<std::size_t>(row)] || is_empty(old)) continue;
      state.states[at] = {static_cast<double>(old.max), static_cast<double>(old.sum)};
      load_row(sums, row, head, state.accumulators.data() + at * static_cast<std::size_t>(sums.dim));
    }
  }
  reference_partial(args, state);
  for (Index row = 0; row < sums.rows; ++row) {
    for (Index head = 0; touched[static_cast<std::size_t>(row)] && head < sums.heads; ++head) {
      const std::size_t at = static_cast<std::size_t>(row * sums.heads + head);
      const RowState<double>& now = state.states[at];
      states[at] = {static_cast<T>(now.max), static_cast<T>(now.sum)};
      store_row(sums, row, head, state.accumulators.data() + at * static_cast<std::size_t>(sums.dim));
    }
  }
}

void reference_kernel_forward(const ForwardArgs& args) {
  if (!args.partial.given())
    reference_forward(args);
  else if (args.partial.states_f64 != nullptr)
    reference_kernel_partial(args, args.partial.states_f64);
  else
    reference_kernel_partial(args, args.partial.states);
}

#ifdef WEFT_WITH_CUDA
GpuProperties properties_for(const KernelRequest& request) {
  return request.device == DeviceKind::cuda ? cuda::gpu_properties(request.gpu) : GpuProperties{};
}
#endif

std::vector<Kernel> all_kernels() {
  std::vector<Kernel> all;
#ifdef WEFT_WITH_SM90
  all.push_back({.name = "cuda.sm90",
                 .about = "Hopper's bulk copies and warpgroup products: bf16, f16, head dims to 256",
                 .refusal = [](const KernelRequest& request) { return sm90_refusal(properties_for(request), request); },
                 .forward = cuda::sm90::forward,
                 .backward = cuda::sm90::backward,
                 .takes_steps = cuda::sm90::takes_steps,
                 .takes_steps_backward = cuda::sm90::takes_steps_backward});
#endif
#ifdef WEFT_WITH_CUDA
  all.push_back(
      {.name = "cuda.portable",
       .about = "tensor cores by mma.sync, any GPU since compute capability 8.0: bf16, f16, f32, head dims to 256",
       .refusal = [](const KernelRequest& request) { return portable_refusal(properties_for(request), request); },
       .forward = cuda::portable_forward,
       .backward = cuda::portable_backward});
#endif
#ifdef __aarch64__
  all.push_back(cpu_kernel<cpu::neon_bf16_target>("cpu.neon_bf16"));
  all.push_back(cpu_kernel<cpu::neon_target>("cpu.neon"));
#endif
#ifdef __x86_64__
  all.push_back(cpu_kernel<cpu::avx512_target>("cpu.avx512"));
  // Behind it: where it was measured, one port of VDPBF16PS does no more than two of FMA (docs/performance.md).
  all.push_back(cpu_kernel<cpu::avx512_bf16_target>("cpu.avx512_bf16"));
  all.push_back(cpu_kernel<cpu::avx2_target>("cpu.avx2"));
#endif
  all.push_back(cpu_kernel<cpu::scalar_target>("cpu.scalar"));
  all.push_back({.name = "reference",
                 .about = "exact: f64 inside, every dtype, any head dim",
                 .refusal = [](const KernelRequest& request) -> std::optional<std::string> {
                   if (request.device != DeviceKind::cpu)
                     return "it reads memory of the CPU, and the tensors lie on a GPU";
                   if (request.device_plan) return kHostSlices;
                   if (std::find(std::begin(kDTypes), std::end(kDTypes), request.dtype) == std::end(kDTypes))
                     return kNoScales;
                   return {};
                 },
                 .forward = reference_kernel_forward,
                 .backward = reference_backward});
  return all;
}

// Is this one meant by the name? "" means any, "cpu" any CPU target.
bool meant(std::string_view name, const Kernel& kernel) {
  return name.empty() || kernel.name == name || (name == "cpu" && kernel.name.starts_with("cpu."));
}

void check_partial(const ForwardArgs& args) {
  const DType either[] = {DType::f32, sum_type(args.q.dtype)};
  const std::size_t types = args.q.dtype == DType::f64 ? 2 : 1;
  check_tensor(args.partial.sums, {.name = "partial.sums",
                                   .rows = args.q.rows,
                                   .heads = args.q.heads,
                                   .dim = args.v.dim,
                                   .dtypes = std::span(either, types),
                                   .output = true});
  const bool f64 = args.partial.sums.dtype == DType::f64;
  const bool states = f64 ? args.partial.states_f64 != nullptr : args.partial.states != nullptr;
  const bool others = f64 ? args.partial.states != nullptr : args.partial.states_f64 != nullptr;
  if ((!states && args.q.rows > 0) || others)
    throw Error(text("partial.sums is ", name(args.partial.sums.dtype), " and is given ",
                     others ? "with states of another type" : "without states"),
                text("give a RowState of ", f64 ? "double (partial.states_f64)" : "float (partial.states)",
                     " for every row and head"));
  if (args.out.given() || args.lse.given() || args.max_logit.given())
    throw Error("out, lse or max_logit is given together with partial",
                "leave them out here; finish_partial writes them at the end");
}

}  // namespace

std::span<const Kernel> kernels() {
  static const std::vector<Kernel> all = all_kernels();
  return all;
}

const Kernel& find_kernel(std::string_view name) {
  std::string names;
  for (const Kernel& kernel : kernels()) {
    const bool here =
        !name.empty() && name != "cpu" ? true : !kernel.refusal({Pass::forward, DType::f32, 64, 64, false});
    if (meant(name, kernel) && here) return kernel;
    names += text(names.empty() ? "" : ", ", kernel.name);
  }
  throw Error(text("there is no kernel '", name, "'"), text("use one of ", names, ", or cpu for the best CPU target"));
}

const Kernel& select_kernel(std::string_view name, const KernelRequest& request) {
  std::string reasons;
  for (const Kernel& kernel : kernels()) {
    if (!meant(name, kernel)) continue;
    const std::optional<std::string> refusal = kernel.refusal(request);
    if (!refusal) return kernel;
    reasons += text(reasons.empty() ? "" : "; ", "kernel ", kernel.name, " cannot: ", *refusal);
  }
  if (reasons.empty()) find_kernel(name);  // there is none of that name: says so
  throw Error(
      text(request.pass == Pass::forward ? "forward" : "backward", " of ", weft::name(request.dtype), ", head dims ",
           request.dim_qk, " and ", request.dim_v, ": ", reasons),
      request.device == DeviceKind::cuda
          ? "name no kernel, for the best that can, or bring the tensors to the CPU, where kernel reference can do all"
          : "use kernel reference, which can do all, or none to take the best that can");
}

void attend(const ForwardArgs& args, std::string_view kernel) {
  reference::check_inputs(reference::inputs_of(args));
  if (args.partial.given())
    check_partial(args);
  else
    reference::check_outputs(args, args.q.rows, args.q.heads, args.v.dim);
  const Kernel& chosen =
      select_kernel(kernel, {Pass::forward, args.q.dtype, args.q.dim, args.v.dim, args.partial.given(), false,
                             args.place.kind, args.device_plan != nullptr, args.place.device});
  if (args.steps != nullptr && (chosen.takes_steps == nullptr || !chosen.takes_steps(args)))
    throw Error(text("kernel ", chosen.name, " keeps no sums between calls (steps) for these arguments"),
                "leave steps out and give partial states, which finish_partial ends");
  chosen.forward(args);
}

void attend_backward(const BackwardArgs& args, std::string_view kernel) {
  reference::check_backward(args);
  const Kernel& chosen =
      select_kernel(kernel, {Pass::backward, args.q.dtype, args.q.dim, args.v.dim, false, args.add_keys,
                             args.place.kind, args.device_plan != nullptr, args.place.device});
  if (args.steps != nullptr && (chosen.takes_steps_backward == nullptr || !chosen.takes_steps_backward(args)))
    throw Error(text("kernel ", chosen.name, " has no dq summed up over calls (steps) for these arguments"),
                "leave steps out, give each call an f32 dq of its own and add them");
  chosen.backward(args);
}

}  // namespace weft
