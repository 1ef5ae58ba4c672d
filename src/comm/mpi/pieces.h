// Messages as MPI takes them: in pieces that an int can count, each contiguous bytes or a datatype of its own.
#pragma once

#include <span>
#include <vector>

#include <mpi.h>

#include "weft/communicator.h"

namespace weft::mpi {

// Bytes [begin, end) of a block, as blocks.
void append_bytes(const Block& block, Index begin, Index end, std::vector<Block>& to);

// In pieces of `largest` bytes and a last one; one, of no bytes, for an empty message. How blocks are cut does not
// matter, so both sides get the same pieces.
std::vector<std::vector<Block>> cut_in_pieces(std::span<const Block> blocks, Index largest);

// What to hand to MPI_Isend or MPI_Irecv; may go as soon as they return. A type rather than a packed copy: MPI then
// moves row by row into its own buffers, which is faster in all shapes measured (docs/performance.md).
class Typed {
 public:
  explicit Typed(std::span<const Block> blocks);
  ~Typed();
  Typed(const Typed&) = delete;
  Typed& operator=(const Typed&) = delete;

  void* data() const { return data_; }
  int count() const { return count_; }
  MPI_Datatype type() const { return type_; }

 private:
  void* data_ = nullptr;
  int count_ = 0;
  MPI_Datatype type_ = MPI_BYTE;
};

}  // namespace weft::mpi
