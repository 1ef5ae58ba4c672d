// The index type, the passes, and the macros that mark functions for the device and for export.
#pragma once

#include <cstdint>

// Planning code runs on the host and, compiled by nvcc, on the device from the same source.
#ifdef __CUDACC__
#define WEFT_HD __host__ __device__
#else
#define WEFT_HD
#endif

// Symbols are hidden by default; what a caller may link against is marked.
#if defined(__GNUC__) || defined(__clang__)
#define WEFT_API __attribute__((visibility("default")))
#else
#define WEFT_API
#endif

namespace weft {

// Counts and positions of rows, tokens, heads, elements and bytes.
using Index = std::int64_t;

// Rows and tokens fit 32 bits on devices, so streams of more tokens are refused everywhere.
inline constexpr Index kMaxTokens = (Index{1} << 31) - 1;

// The two passes of attention.
enum class Pass { forward, backward };

}  // namespace weft
