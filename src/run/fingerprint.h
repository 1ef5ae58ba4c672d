// Hashes of what must be the same on all ranks, which checked ranks compare (agreement.h). docs/schedules.md has a
// table of what is compared and what may differ.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

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

}  // namespace weft::run
