// Messages in the form that MPI takes: pieces whose size fits an int, each contiguous bytes or an MPI datatype.
#pragma once

#include <span>
#include <vector>

#include <mpi.h>

#include "weft/communicator.h"

namespace weft::mpi {

// Bytes [begin, end) of a block, as blocks.
void append_bytes(const Block& block, Index begin, Index end, std::vector<Block>& to);

// Cuts a message into pieces of `largest` bytes and a last one; an empty message is one empty piece. The pieces do not
// depend on how blocks are cut, so both sides get the same.
std::vector<std::vector<Block>> cut_in_pieces(std::span<const Block> blocks, Index largest);

// The arguments of MPI_Isend or MPI_Irecv, to be freed any time after the call. A datatype, not a packed copy: MPI then
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
