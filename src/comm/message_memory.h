// What a communicator that wraps another one does with the bytes of messages where they lie: on the CPU, or on a GPU in
// the order of a stream.
#pragma once

#include <memory>
#include <span>

#include "weft/communicator.h"

namespace weft {

class MessageMemory {
 public:
  virtual ~MessageMemory() = default;

  // Memory in one piece, aligned for numbers, which lives as long as this object.
  virtual Block take(Index bytes) = 0;
  // As move_blocks (comm/blocks.h).
  virtual void move(std::span<const Block> from, std::span<const Block> to, Message::Combine how) = 0;
  // Between memory of the host and a block in one piece. `from` may change after write(); read() waits for the bytes.
  virtual void write(const void* from, const Block& to) = 0;
  virtual void read(const Block& from, void* to) = 0;
  // Writes 64 bits, a checksum of the bytes of the blocks in order, which does not depend on how they are cut.
  virtual void sum(std::span<const Block> blocks, void* to) = 0;
};

// Error for a GPU in a build without CUDA.
std::unique_ptr<MessageMemory> memory_of(const Place& place);

}  // namespace weft
