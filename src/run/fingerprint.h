// Hashes of what must be the same on all ranks: those that checked ranks compare (agreement.h; docs/schedules.md has a
// table of what is compared and what may differ), and those that travel with every pass (comm/sign.h).
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "comm/sign.h"
#include "weft/executor.h"
#include "weft/kv_buffer.h"

namespace weft::run {

struct Fingerprint {
  std::string_view part;  // "packing", "mask", ..
  std::uint64_t value = 0;
};

std::vector<Fingerprint> fingerprints(const Schedule& schedule);
std::vector<Fingerprint> fingerprints(const MicroSequences& micros, const Problem& problem);
std::vector<Fingerprint> fingerprints(const ExecutorOptions& options);
std::vector<Fingerprint> fingerprints(const KvBufferOptions& options);
// `kernel`: the name in the options; ranks compare the kernel that it selects for the call.
std::vector<Fingerprint> fingerprints(const KernelForwardArgs& args, std::string_view kernel = {});
std::vector<Fingerprint> fingerprints(const KernelBackwardArgs& args, std::string_view kernel = {});

// What travels with the messages of every pass: of the schedule, or of a sequence of a K/V buffer, made once..
detail::CallSign sign_of(const Schedule& schedule, const ExecutorOptions& options);
detail::CallSign sign_of(const MicroSequences& micros, const Problem& problem, const KvBufferOptions& options);
// ..and the same with what a call adds to it. Cheap: nothing is read from a GPU. Left out is what ranks may differ in
// without harm, such as the kernel, and dtypes of outputs unless they travel (`swapped`: with the heads). `micro`: of a
// K/V buffer.
struct SignedCallInfo {
  Index layer = kNoLayer, micro = -1;
  bool swapped = false;
  Index source = 0;  // numbers in a row of it; 0: K and V move
};
// What checked ranks compare of a call's source.
Fingerprint fingerprint(const Source* source);
detail::CallSign with_call(detail::CallSign sign, const KernelForwardArgs& args, const SignedCallInfo& info);
detail::CallSign with_call(detail::CallSign sign, const KernelBackwardArgs& args, const SignedCallInfo& info);
detail::CallSign with_call(detail::CallSign sign, const SignedCallInfo& info);

}  // namespace weft::run
