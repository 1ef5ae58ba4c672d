// Kernels attend slices. Each says what it can do and, if not, why; one registry holds them all.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "weft/attention.h"
#include "weft/config.h"
#include "weft/device.h"
#include "weft/pass.h"

namespace weft {

// What decides whether a kernel can do a call.
struct KernelRequest {
  Pass pass = Pass::forward;
  DType dtype = DType::f32;
  Index dim_qk = 0, dim_v = 0;
  bool partial = false;
  bool add_keys = false;
  DeviceKind device = DeviceKind::cpu;
  bool device_plan = false;  // slices in device memory
  int gpu = 0;               // of several
};

struct Kernel {
  std::string_view name;   // "reference", "cpu.scalar", "cpu.neon", "cpu.avx2", "cpu.avx512", ...
  std::string_view about;  // one line
  // Why it cannot do the request; none if it can. Asks this machine too, so the answer holds here and now.
  std::optional<std::string> (*refusal)(const KernelRequest& request);
  void (*forward)(const ForwardArgs& args);
  void (*backward)(const BackwardArgs& args);
  // Can it do such calls with QuerySteps? Null: none.
  bool (*takes_steps)(const ForwardArgs& args) = nullptr;
  bool (*takes_steps_backward)(const BackwardArgs& args) = nullptr;
};

// Every kernel of this build, best first; those of other machines refuse.
WEFT_API std::span<const Kernel> kernels();
// By name; "cpu" is the best CPU target of this machine, "" the best of all. Error lists the names.
WEFT_API const Kernel& find_kernel(std::string_view name);

// Checks the arguments, asks the kernel, runs it. Error with the kernel's reason if it refuses: never another instead.
// Named "" or "cpu": the best one that can.
WEFT_API void attend(const ForwardArgs& args, std::string_view kernel = "");
WEFT_API void attend_backward(const BackwardArgs& args, std::string_view kernel = "");
// Turns partial states into out, lse and max_logit: reads the sink and `partial` of args, writes its outputs.
WEFT_API void finish_partial(const ForwardArgs& args);

// Threads that CPU kernels use at most, all calls together; 0: as many as the machine has.
WEFT_API void set_cpu_threads(int threads);

}  // namespace weft
