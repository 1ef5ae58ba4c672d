// A communicator whose messages carry what is needed to see that they arrived whole, in order and unchanged.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "weft/communicator.h"

namespace weft {

// Of the bytes of the blocks one after another, however they are cut.
std::uint64_t checksum(std::span<const Block> blocks);

// Lives no longer than `inner`. Every message grows by 32 bytes, which `inner` counts and the result does not.
std::unique_ptr<Communicator> make_checked(Communicator& inner);

}  // namespace weft
