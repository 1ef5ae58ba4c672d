#include "comm/mpi/pieces.h"

#include "comm/blocks.h"
#include "comm/mpi/session.h"

namespace weft::mpi {

void append_bytes(const Block& block, Index begin, Index end, std::vector<Block>& to) {
  const Index row_bytes = block.parts * block.bytes;
  while (begin < end) {
    const Index row = begin / row_bytes, part = begin % row_bytes / block.bytes, byte = begin % block.bytes;
    Block piece = block;
    piece.data = static_cast<char*>(block.data) + row * block.row_stride + part * block.part_stride + byte;
    if (part == 0 && byte == 0 && end - begin >= row_bytes) {  // whole rows
      piece.rows = (end - begin) / row_bytes;
    } else if (byte == 0 && end - begin >= block.bytes) {  // whole parts of a row
      piece.rows = 1;
      piece.parts = min_of(block.parts - part, (end - begin) / block.bytes);
    } else {
      piece.rows = piece.parts = 1;
      piece.bytes = min_of(block.bytes - byte, end - begin);
    }
    to.push_back(piece);
    begin += piece.size();
  }
}

std::vector<std::vector<Block>> cut_in_pieces(std::span<const Block> blocks, Index largest) {
  std::vector<std::vector<Block>> pieces(1);
  Index room = largest;
  for (const Block& block : blocks) {
    for (Index begin = 0; begin < block.size();) {
      if (room == 0) {
        pieces.emplace_back();
        room = largest;
      }
      const Index bytes = min_of(block.size() - begin, room);
      append_bytes(block, begin, begin + bytes, pieces.back());
      begin += bytes;
      room -= bytes;
    }
  }
  return pieces;
}

namespace {

// The datatypes of blocks, which are freed when the datatype of the message has been made.
struct Types {
  ~Types() {
    for (MPI_Datatype& type : made) MPI_Type_free(&type);
  }
  MPI_Datatype hvector(Index count, Index length, Index stride, MPI_Datatype of) {
    MPI_Datatype type = MPI_DATATYPE_NULL;
    check(MPI_Type_create_hvector(static_cast<int>(count), static_cast<int>(length), stride, of, &type),
          "MPI_Type_create_hvector");
    made.push_back(type);
    return type;
  }
  std::vector<MPI_Datatype> made;
};

}  // namespace

Typed::Typed(std::span<const Block> blocks) {
  std::vector<int> lengths;
  std::vector<MPI_Aint> places;
  std::vector<MPI_Datatype> types;
  Types parts;
  for (const Block& given : blocks) {
    if (given.size() == 0) continue;
    const Block b = merged(given);
    const bool whole = b.rows == 1 && b.parts == 1;
    if (data_ == nullptr) data_ = b.data;
    lengths.push_back(whole ? static_cast<int>(b.bytes) : 1);
    MPI_Get_address(b.data, &places.emplace_back());
    if (whole) {
      types.push_back(MPI_BYTE);
    } else if (b.parts == 1) {
      types.push_back(parts.hvector(b.rows, b.bytes, b.row_stride, MPI_BYTE));
    } else {
      types.push_back(parts.hvector(b.rows, 1, b.row_stride, parts.hvector(b.parts, b.bytes, b.part_stride, MPI_BYTE)));
    }
  }
  if (types.empty()) return;
  if (types.size() == 1 && types[0] == MPI_BYTE) {
    count_ = lengths[0];
    return;
  }
  data_ = MPI_BOTTOM;
  count_ = 1;
  check(MPI_Type_create_struct(static_cast<int>(types.size()), lengths.data(), places.data(), types.data(), &type_),
        "MPI_Type_create_struct");
  check(MPI_Type_commit(&type_), "MPI_Type_commit");
}

Typed::~Typed() {
  if (type_ != MPI_BYTE) MPI_Type_free(&type_);
}

}  // namespace weft::mpi
