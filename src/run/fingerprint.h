// Do all ranks mean the same? Each part of a question becomes a number, and ranks compare numbers.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "weft/communicator.h"
#include "weft/executor.h"

namespace weft::run {

struct Fingerprint {
  std::string_view part;  // "packing", "mask", ..
  std::uint64_t value = 0;
};

std::vector<Fingerprint> fingerprints(const Schedule& schedule);
std::vector<Fingerprint> fingerprints(const ForwardArgs& args);
std::vector<Fingerprint> fingerprints(const BackwardArgs& args);

// Collective. Error, the same on every rank, that says which ranks differ from most and in what.
void compare(Communicator& communicator, const std::vector<Fingerprint>& mine);
// Collective: returns when every rank has come here.
void meet(Communicator& communicator);

}  // namespace weft::run
