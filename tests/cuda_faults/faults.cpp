#include "cuda_faults/faults.h"

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string_view>
#include <utility>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/handle_pool.h"
#include "weft/error.h"

namespace weft::faults {
namespace {

std::atomic<long> left{-1};  // calls until one fails; below 0: none does
std::atomic<bool> lasts{false};
std::atomic<long> pending{0};
thread_local cudaError_t last_error = cudaSuccess;
thread_local bool nothing_new = false;  // only what is kept can be had

struct Live {
  std::atomic<long> memory{0}, pinned{0}, pools{0}, events{0}, streams{0};
};
Live live;

std::mutex mutex;  // guards
Failed first;
std::map<std::string, long, std::less<>> times;

bool hit(const char* call, bool told) {
  if (left.load(std::memory_order_relaxed) < 0) return false;
  if (left.fetch_sub(1) != 0) return false;
  if (lasts) left = 0;
  const std::lock_guard lock(mutex);
  if (first.call.empty()) first = {call, told};
  const auto known = times.find(call);
  ++(known != times.end() ? known->second : times[call]);
  return true;
}

cudaError_t fail(cudaError_t error) {
  if (last_error == cudaSuccess) ++pending;
  return last_error = error;
}

// How many are kept: all are taken, until a new one would have to be made.
template <class T, class... Arguments>
long kept(Arguments... arguments) {
  std::vector<std::unique_ptr<T>> all;
  nothing_new = true;
  try {
    for (;;) all.push_back(std::make_unique<T>(arguments...));
  } catch (const Error&) {
  }
  nothing_new = false;
  return static_cast<long>(all.size());
}

}  // namespace

void arm(long n, bool lasting) {
  {
    const std::lock_guard lock(mutex);
    first = {};
  }
  lasts = lasting;
  left = n;
}

Failed disarm() {
  left = -1;
  const std::lock_guard lock(mutex);
  return first;
}

Ledger ledger() {
  Ledger now{live.memory, live.pinned, live.pools, live.events, live.streams};
  now.events -= kept<cuda::PooledEvent>();
  now.streams -= kept<cuda::PooledStream>(false) + kept<cuda::PooledStream>(true);
  for (std::size_t size = 1; size <= std::size_t{1} << 26; size *= 2) now.pinned -= kept<cuda::PooledPinned>(size);
  return now;
}

std::string words(const Ledger& l) {
  std::ostringstream to;
  to << l.memory << " pieces of memory, " << l.pinned << " pinned, " << l.pools << " pools, " << l.events << " events, "
     << l.streams << " streams";
  return to.str();
}

long left_behind() { return pending; }

std::string table() {
  std::ostringstream to;
  const auto line = [&](const char* call) {
    const std::lock_guard lock(mutex);
    to << "  " << times[call] << "\t" << call << "\n";
  };
#define REFUSED(name, parameters, arguments) line(#name);
#define ASKED(name, parameters, arguments) line(#name);
#define TAKES(name, what, parameters, arguments) line(#name);
#define GIVES(name, what, parameters, arguments) line(#name);
#define MADE(name, parameters, arguments) line(#name);
#define SPECIAL(name)
#include "cuda_faults/calls.inc"
#undef REFUSED
#undef ASKED
#undef TAKES
#undef GIVES
#undef MADE
  line("cudaGetDriverEntryPointByVersion");
  line("cuTensorMapEncodeTiled");
  return to.str();
}

}  // namespace weft::faults

using namespace weft::faults;

#define NOT_MADE(name, told, parameters, arguments)                                   \
  extern "C" cudaError_t __real_##name parameters;                                    \
  extern "C" cudaError_t __wrap_##name parameters;                                    \
  extern "C" cudaError_t __wrap_##name parameters {                                   \
    return hit(#name, told) ? fail(cudaErrorLaunchFailure) : __real_##name arguments; \
  }
#define REFUSED(name, parameters, arguments) NOT_MADE(name, true, parameters, arguments)
#define ASKED(name, parameters, arguments) NOT_MADE(name, false, parameters, arguments)
#define TAKES(name, what, parameters, arguments)                  \
  extern "C" cudaError_t __real_##name parameters;                \
  extern "C" cudaError_t __wrap_##name parameters;                \
  extern "C" cudaError_t __wrap_##name parameters {               \
    if (nothing_new) return cudaErrorMemoryAllocation;            \
    if (hit(#name, true)) return fail(cudaErrorMemoryAllocation); \
    const cudaError_t result = __real_##name arguments;           \
    if (result == cudaSuccess) ++live.what;                       \
    return result;                                                \
  }
#define GIVES(name, what, parameters, arguments)                \
  extern "C" cudaError_t __real_##name parameters;              \
  extern "C" cudaError_t __wrap_##name parameters;              \
  extern "C" cudaError_t __wrap_##name parameters {             \
    const bool fails = hit(#name, false);                       \
    const cudaError_t result = __real_##name arguments;         \
    if (result == cudaSuccess && thing != nullptr) --live.what; \
    return fails ? fail(cudaErrorLaunchFailure) : result;       \
  }
#define MADE(name, parameters, arguments)                 \
  extern "C" cudaError_t __real_##name parameters;        \
  extern "C" cudaError_t __wrap_##name parameters;        \
  extern "C" cudaError_t __wrap_##name parameters {       \
    const bool fails = hit(#name, false);                 \
    const cudaError_t result = __real_##name arguments;   \
    return fails ? fail(cudaErrorLaunchFailure) : result; \
  }
#undef SPECIAL
#define SPECIAL(name)
#include "cuda_faults/calls.inc"

extern "C" cudaError_t __real_cudaGetLastError();
extern "C" cudaError_t __wrap_cudaGetLastError();
extern "C" cudaError_t __wrap_cudaGetLastError() {
  if (last_error == cudaSuccess) return __real_cudaGetLastError();
  --pending;
  return std::exchange(last_error, cudaSuccess);
}

namespace {

// The one function of the driver that Weft asks for.
decltype(&cuTensorMapEncodeTiled) encode = nullptr;

template <class... Parameters>
CUresult refusable(Parameters... arguments) {
  return hit("cuTensorMapEncodeTiled", true) ? CUDA_ERROR_LAUNCH_FAILED : encode(arguments...);
}
template <class... Parameters>
void* wrapped(CUresult (*)(Parameters...)) {
  return reinterpret_cast<void*>(&refusable<Parameters...>);
}

}  // namespace

extern "C" cudaError_t __real_cudaGetDriverEntryPointByVersion(const char* symbol, void** to, unsigned version,
                                                               unsigned long long flags,
                                                               cudaDriverEntryPointQueryResult* status);
extern "C" cudaError_t __wrap_cudaGetDriverEntryPointByVersion(const char* symbol, void** to, unsigned version,
                                                               unsigned long long flags,
                                                               cudaDriverEntryPointQueryResult* status);
extern "C" cudaError_t __wrap_cudaGetDriverEntryPointByVersion(const char* symbol, void** to, unsigned version,
                                                               unsigned long long flags,
                                                               cudaDriverEntryPointQueryResult* status) {
  if (hit("cudaGetDriverEntryPointByVersion", true)) return fail(cudaErrorLaunchFailure);
  if (std::string_view(symbol) != "cuTensorMapEncodeTiled") return cudaErrorInvalidValue;  // has no wrapper yet
  const cudaError_t result = __real_cudaGetDriverEntryPointByVersion(symbol, to, version, flags, status);
  if (result != cudaSuccess || *to == nullptr) return result;
  encode = reinterpret_cast<decltype(encode)>(*to);
  *to = wrapped(encode);
  return result;
}
