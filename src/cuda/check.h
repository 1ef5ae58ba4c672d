// The one place where the result of a CUDA call is looked at.
#pragma once

#include <cuda_runtime_api.h>

namespace weft::cuda {

// Error with the call's name and CUDA's own words.
void check(cudaError_t result, const char* call);

}  // namespace weft::cuda

// What the caller wrote is what the error names.
#define WEFT_CUDA(call) ::weft::cuda::check((call), #call)
