// A communicator whose messages carry call number, route, size and checksum, which the receiver compares.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "weft/communicator.h"

namespace weft {

// A checksum of the bytes of the blocks in order, which does not depend on how they are cut.
std::uint64_t checksum(std::span<const Block> blocks);

// `inner` must outlive it. Every message grows by 32 bytes, which `inner` counts as traffic and the result does not.
std::unique_ptr<Communicator> make_checked(Communicator& inner);

}  // namespace weft
