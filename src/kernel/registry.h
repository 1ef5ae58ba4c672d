// The registry for callers that check arguments once and call a kernel many times, and reasons that kernels share.
#pragma once

#include "weft/kernel.h"

namespace weft {

// The best kernel meant by the name that can do the request; Error with the reasons if there is none.
const Kernel& select_kernel(std::string_view name, const KernelRequest& request);

// What decides whether a kernel can do the call. Args: those of a kernel or of an executor.
template <class Args>
KernelRequest request_of(Pass pass, const Args& args) {
  KernelRequest request{.pass = pass,
                        .dtype = args.q.dtype,
                        .dim_qk = args.q.dim,
                        .dim_v = args.v.dim,
                        .device = args.place.kind,
                        .gpu = args.place.device};
  if constexpr (requires { args.partial; }) request.partial = args.partial.given();
  if constexpr (requires { args.add_keys; }) request.add_keys = args.add_keys;
  if constexpr (requires { args.device_plan; }) request.device_plan = args.device_plan != nullptr;
  return request;
}

// Why a kernel with f32 accumulators cannot take the dtype; none if it can.
std::optional<std::string> f32_refusal(DType dtype);

}  // namespace weft
