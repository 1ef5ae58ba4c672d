// Error checks of CUDA calls.
#pragma once

#include <cuda_runtime_api.h>

namespace weft::cuda {

// Error with the call's name and CUDA's own message.
void check(cudaError_t result, const char* call);

}  // namespace weft::cuda

// The error quotes the call as it is written.
#define WEFT_CUDA(call) ::weft::cuda::check((call), #call)
