// Do all ranks mean the same? Each part of a question becomes a number, and ranks compare numbers (agreement.h). What
// is compared and what is a rank's own is a table in docs/schedules.md.
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
// `kernel`: as options name it. The one that is compared is the one that it means for the call.
std::vector<Fingerprint> fingerprints(const ForwardArgs& args, std::string_view kernel = {});
std::vector<Fingerprint> fingerprints(const BackwardArgs& args, std::string_view kernel = {});

}  // namespace weft::run
