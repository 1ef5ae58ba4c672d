// Records what ran when, as CUPTI reports it: kernels and memsets with their streams, and calls of the CUDA runtime.
// Only one recorder can exist at a time.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <cupti.h>
#include <cxxabi.h>

#include "cuda/runtime.h"
#include "text.h"
#include "weft/error.h"

namespace weft::bench {

struct Ran {
  std::string name;  // of the kernel, without namespace and parameters; or "memset"
  std::uint32_t stream = 0;
  std::uint64_t begin = 0, end = 0;  // ns
  std::uint64_t bytes = 0;           // of memsets
};

struct Called {
  std::string name;  // as CUPTI has it: "cudaLaunchKernelExC_v11060"
  std::uint64_t begin = 0, end = 0;
};

class Recorder {
 public:
  Recorder() {
    current() = this;
    check(cuptiActivityRegisterCallbacks(give_buffer, take_buffer), "cuptiActivityRegisterCallbacks");
    for (const CUpti_ActivityKind kind : kKinds) check(cuptiActivityEnable(kind), "cuptiActivityEnable");
  }
  ~Recorder() { current() = nullptr; }
  Recorder(const Recorder&) = delete;

  static std::uint64_t now() {
    std::uint64_t time = 0;
    check(cuptiGetTimestamp(&time), "cuptiGetTimestamp");
    return time;
  }
  // Synchronizes the GPU first.
  void stop() {
    WEFT_CUDA(cudaDeviceSynchronize());
    for (const CUpti_ActivityKind kind : kKinds) check(cuptiActivityDisable(kind), "cuptiActivityDisable");
    check(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "cuptiActivityFlushAll");
  }
  std::vector<Ran> ran;
  std::vector<Called> called;

 private:
  static constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMSET,
                                                  CUPTI_ACTIVITY_KIND_RUNTIME};

  static Recorder*& current() {
    static Recorder* now = nullptr;
    return now;
  }
  static void check(CUptiResult result, const char* call) {
    if (result == CUPTI_SUCCESS) return;
    const char* words = "";
    cuptiGetResultString(result, &words);
    throw Error(text("CUPTI: ", call, ": ", words), "see that nothing else profiles this process");
  }

  static void give_buffer(std::uint8_t** buffer, std::size_t* size, std::size_t* records) {
    constexpr std::size_t kSize = std::size_t{8} << 20;
    *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, kSize));
    *size = *buffer == nullptr ? 0 : kSize;
    *records = 0;
  }
  static void take_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t valid) {
    CUpti_Activity* record = nullptr;
    while (current() != nullptr && cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS)
      current()->take(*record);
    std::free(buffer);
  }

  void take(const CUpti_Activity& record) {
    const std::lock_guard lock(mutex_);
    if (record.kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
      const auto& k = reinterpret_cast<const CUpti_ActivityKernel10&>(record);
      ran.push_back({short_name(k.name), k.streamId, k.start, k.end});
    } else if (record.kind == CUPTI_ACTIVITY_KIND_MEMSET) {
      const auto& m = reinterpret_cast<const CUpti_ActivityMemset4&>(record);
      ran.push_back({"memset", m.streamId, m.start, m.end, m.bytes});
    } else if (record.kind == CUPTI_ACTIVITY_KIND_RUNTIME) {
      const auto& c = reinterpret_cast<const CUpti_ActivityAPI&>(record);
      const char* name = "";
      cuptiGetCallbackName(CUPTI_CB_DOMAIN_RUNTIME_API, c.cbid, &name);
      called.push_back({name, c.start, c.end});
    }
  }

  // weft::cuda::(anonymous namespace)::move_segments<uint4, false>(..) is move_segments.
  static std::string short_name(const char* mangled) {
    int status = 0;
    char* plain = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
    std::string name = status == 0 ? plain : mangled;
    std::free(plain);
    for (const std::string_view hidden : {"(anonymous namespace)::", "void "})
      for (std::size_t at; (at = name.find(hidden)) != std::string::npos;) name.erase(at, hidden.size());
    name = name.substr(0, name.find_first_of("<("));
    return name.substr(name.rfind(':') == std::string::npos ? 0 : name.rfind(':') + 1);
  }

  std::mutex mutex_;
};

}  // namespace weft::bench
