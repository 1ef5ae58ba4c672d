#include "kernel/registry.h"

#include <vector>

#include "kernel/check_args.h"
#include "kernel/cpu/target.h"
#include "kernel/cuda_kernels.h"
#include "text.h"
#include "weft/reference.h"

#ifdef WEFT_EMULATED_AMX
namespace weft::cpu {
const Target& emulated_amx_target();
}
#endif

namespace weft {
namespace {

// Why a kernel that reads host memory, a CPU target or the reference, cannot do the request.
std::optional<std::string> host_refusal(const KernelRequest& request) {
  if (request.device != DeviceKind::cpu) return "it reads memory of the CPU, and the tensors lie on a GPU";
  if (request.device_plan) return "it reads slices in memory of the CPU, and those of a device_plan lie on a GPU";
  return {};
}

// A function pointer per target: the registry is a plain table.
template <const cpu::Target& (*kTarget)()>
Kernel cpu_kernel(std::string_view name) {
  return {.name = name,
          .about = kTarget().about,
          .refusal = [](const KernelRequest& request) -> std::optional<std::string> {
            if (!kTarget().runs_here())
              return text("this machine, or its system, does not offer its instructions (", kTarget().about, ")");
            if (auto reason = host_refusal(request)) return reason;
            return f32_refusal(request.dtype);
          },
          .forward = [](const KernelForwardArgs& args) { cpu::forward(kTarget(), args); },
          .backward = [](const KernelBackwardArgs& args) { cpu::backward(kTarget(), args); }};
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
                 .about = "Hopper's bulk copies and warpgroup products: bf16, f16, head dims to 256 (forward: 576/512)",
                 .refusal = [](const KernelRequest& request) { return sm90_refusal(properties_for(request), request); },
                 .forward = cuda::sm90::forward,
                 .backward = cuda::sm90::backward,
                 .takes_steps = cuda::sm90::takes_steps,
                 .takes_steps_backward = cuda::sm90::takes_steps_backward});
#endif
#ifdef WEFT_WITH_CUDA
  all.push_back(
      {.name = "cuda.portable",
       .about = "tensor cores by mma.sync, any GPU since compute capability 8.0: bf16, f16, f32, head dims to 576/512",
       .refusal = [](const KernelRequest& request) { return portable_refusal(properties_for(request), request); },
       .forward = cuda::portable_forward,
       .backward = cuda::portable_backward});
#endif
#ifdef __aarch64__
  all.push_back(cpu_kernel<cpu::neon_bf16_target>("cpu.neon_bf16"));
  all.push_back(cpu_kernel<cpu::neon_target>("cpu.neon"));
#endif
#ifdef __x86_64__
  all.push_back(cpu_kernel<cpu::amx_target>("cpu.amx"));
  all.push_back(cpu_kernel<cpu::avx512_target>("cpu.avx512"));
  // After avx512: where it was measured, one port of VDPBF16PS does no more than two of FMA (docs/performance.md).
  all.push_back(cpu_kernel<cpu::avx512_bf16_target>("cpu.avx512_bf16"));
  all.push_back(cpu_kernel<cpu::avx2_target>("cpu.avx2"));
#endif
#ifdef WEFT_EMULATED_AMX  // tests/kernel
  all.push_back(cpu_kernel<cpu::emulated_amx_target>("cpu.emulated_amx"));
#endif
  all.push_back(cpu_kernel<cpu::scalar_target>("cpu.scalar"));
  all.push_back({.name = "reference",
                 .about = "exact: f64 inside, every dtype, any head dim",
                 .refusal = [](const KernelRequest& request) -> std::optional<std::string> {
                   if (auto reason = host_refusal(request)) return reason;
                   if (request.dtype != DType::f64) return f32_refusal(request.dtype);
                   return {};
                 },
                 .forward = reference_forward,
                 .backward = reference_backward});
  return all;
}

// Whether the name selects this kernel: "" selects any, "cpu" any CPU target.
bool meant(std::string_view name, const Kernel& kernel) {
  return name.empty() || kernel.name == name || (name == "cpu" && kernel.name.starts_with("cpu."));
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
  const bool without_cuda = name.starts_with("cuda") && names.find("cuda") == std::string::npos;
  throw Error(text("there is no kernel '", name, "'", without_cuda ? " in a build of Weft without CUDA" : ""),
              text(without_cuda ? "install the wheel of version +cu13, or build with -DWEFT_CUDA=ON; or " : "",
                   "use one of ", names, ", or cpu for the best CPU target"));
}

std::optional<std::string> f32_refusal(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::bf16:
    case DType::f16:
      return {};
    case DType::f64:
      return "it computes in f32 and would lose half of f64's digits";
    case DType::f8_e4m3:
    case DType::f8_e5m2:
      return text("it keeps no scale for every block, which ", name(dtype), " needs");
  }
  return {};
}

const Kernel& select_kernel(std::string_view name, const KernelRequest& request) {
  std::string reasons;
  for (const Kernel& kernel : kernels()) {
    if (!meant(name, kernel)) continue;
    const std::optional<std::string> refusal = kernel.refusal(request);
    if (!refusal) return kernel;
    reasons += text(reasons.empty() ? "" : "; ", "kernel ", kernel.name, " cannot: ", *refusal);
  }
  if (reasons.empty()) find_kernel(name);  // Error: there is no kernel of that name
  throw Error(
      text(request.pass == Pass::forward ? "forward" : "backward", " of ", weft::name(request.dtype), ", head dims ",
           request.dim_qk, " and ", request.dim_v, ": ", reasons),
      request.device == DeviceKind::cuda
          ? "name no kernel, for the best that can, or bring the tensors to the CPU, where kernel reference can do all"
          : "use kernel reference, which can do all, or none to take the best that can");
}

void attend(const KernelForwardArgs& args, std::string_view kernel) {
  check_forward(args);
  const Kernel chosen = select_kernel(kernel, request_of(Pass::forward, args));
  if (args.steps != nullptr && (args.partial.given() || chosen.takes_steps == nullptr || !chosen.takes_steps(args)))
    throw Error(text("kernel ", chosen.name, " keeps no sums between calls (steps) for these arguments"),
                "leave steps out and give partial states, which finish_partial ends");
  chosen.forward(args);
}

void attend_backward(const KernelBackwardArgs& args, std::string_view kernel) {
  check_backward(args);
  const Kernel chosen = select_kernel(kernel, request_of(Pass::backward, args));
  if (args.steps != nullptr && (chosen.takes_steps_backward == nullptr || !chosen.takes_steps_backward(args)))
    throw Error(text("kernel ", chosen.name, " has no dq summed up over calls (steps) for these arguments"),
                "leave steps out, give each call an f32 dq of its own and add them");
  chosen.backward(args);
}

void attend(const ForwardArgs& args, std::string_view kernel) { attend(KernelForwardArgs{args}, kernel); }
void attend_backward(const BackwardArgs& args, std::string_view kernel) {
  attend_backward(KernelBackwardArgs{args}, kernel);
}

}  // namespace weft
