#include "comm/mpi/transfers.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "comm/blocks.h"
#include "comm/mpi/session.h"
#include "index.h"

namespace weft::mpi {

namespace {

// Bytes [begin, end) of a block, as blocks.
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

// Cuts a message into pieces of `largest` bytes and a last one; an empty message is one empty piece. The pieces do not
// depend on how blocks are cut, so both sides get the same.
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

// A rank that unwinds an exception does not wait long for its messages to end, so that it can report the cause.
constexpr double kWhenFailing = 1;  // seconds

constexpr std::chrono::milliseconds kAwake{5};  // after that other ranks compute: leave them the core
constexpr std::chrono::microseconds kNap{50};

// Keeps memory that MPI may still use until the process ends, which is about to happen.
void abandon(std::vector<Scratch> scratch) {
  static std::vector<Scratch> all;
  for (Scratch& one : scratch) all.push_back(std::move(one));
}

// The transfers of all communicators. No lock: MPI is used by one thread at a time.
std::vector<Transfers*>& in_flight() {
  static std::vector<Transfers*> all;
  return all;
}

Index bytes_of(std::span<const Block> blocks) {
  Index bytes = 0;
  for (const Block& block : blocks) bytes += block.size();
  return bytes;
}

}  // namespace

Patience::Patience(double seconds)
    : limit_(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e8)))),
      begin_(Clock::now()) {}

void Patience::pause() const {
  if (Clock::now() - begin_ < kAwake) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(kNap);
  }
}

Transfers::Transfers(MPI_Comm comm, int tag, const MpiOptions& options) : comm_(comm), tag_(tag), options_(options) {
  in_flight().push_back(this);
}

void Transfers::post(Way way, std::size_t message, Index peer, std::vector<Block> blocks) {
  const Part part{way, message, peer, bytes_of(blocks)};
  if (part.bytes <= options_.largest) return post_piece(part, std::move(blocks));
  for (std::vector<Block>& piece : cut_in_pieces(blocks, options_.largest)) {
    const Index bytes = bytes_of(piece);
    post_piece({way, message, peer, bytes}, std::move(piece));
  }
}

void Transfers::post_piece(Part part, std::vector<Block> blocks) {
  if (part.way == Way::send) {
    send(part, blocks);
  } else {
    inbox(part.peer).expected.push_back({part, std::move(blocks)});
  }
  ++left_;
}

Transfers::Inbox& Transfers::inbox(Index peer) {
  const auto found = std::find_if(inboxes_.begin(), inboxes_.end(), [&](const Inbox& i) { return i.peer == peer; });
  return found != inboxes_.end() ? *found : inboxes_.emplace_back(Inbox{peer, {}});
}

void Transfers::send(const Part& part, std::span<const Block> blocks) {
  const Typed bytes(blocks);
  parts_.push_back(part);
  check(MPI_Isend(bytes.data(), bytes.count(), bytes.type(), static_cast<int>(part.peer), tag_, comm_,
                  &requests_.emplace_back(MPI_REQUEST_NULL)),
        "MPI_Isend");
}

void Transfers::receive(const Part& part, std::span<const Block> blocks, MPI_Message* message) {
  const Typed bytes(blocks);
  parts_.push_back(part);
  check(MPI_Imrecv(bytes.data(), bytes.count(), bytes.type(), message, &requests_.emplace_back(MPI_REQUEST_NULL)),
        "MPI_Imrecv");
}

// Receives what has arrived from one peer, in the order in which it was sent.
bool Transfers::take(Inbox& from) {
  bool moved = false;
  while (!from.expected.empty()) {
    int there = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check(MPI_Improbe(static_cast<int>(from.peer), tag_, comm_, &there, &message, &status), "MPI_Improbe");
    if (there == 0) break;
    moved = true;
    Expected next = std::move(from.expected.front());
    from.expected.pop_front();
    MPI_Count got = 0;
    check(MPI_Get_elements_x(&status, MPI_BYTE, &got), "MPI_Get_elements_x");
    if (got != next.part.bytes) {  // received all the same, so that its sender can end
      wrong_.push_back({next.part.message, from.peer, got, next.part.bytes});
      float* aside = keep(std::make_unique_for_overwrite<float[]>(at(got) / sizeof(float) + 1)).get();
      next.blocks = {{.data = aside, .rows = 1, .bytes = got}};
    }
    receive(next.part, next.blocks, &message);
  }
  return moved;
}

bool Transfers::test() {
  ended_.resize(requests_.size());
  int count = 0;
  check(MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, ended_.data(), MPI_STATUSES_IGNORE),
        "MPI_Testsome");
  if (count == MPI_UNDEFINED) return false;
  left_ -= at(count);
  return count > 0;
}

bool Transfers::advance() {
  if (done()) return false;
  bool moved = false;
  for (Inbox& from : inboxes_) moved |= take(from);
  return test() || moved;
}

bool Transfers::advance_all() {
  bool moved = false;
  for (Transfers* one : in_flight()) moved |= one->advance();
  return moved;
}

std::vector<Index> Transfers::peers_left() const {
  std::vector<Index> peers;
  for (const Inbox& from : inboxes_)
    if (!from.expected.empty()) peers.push_back(from.peer);
  for (std::size_t i = 0; i < requests_.size(); ++i)
    if (requests_[i] != MPI_REQUEST_NULL) peers.push_back(parts_[i].peer);
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

Transfers::~Transfers() {
  for (Inbox& from : inboxes_) {  // nothing is received any more
    left_ -= from.expected.size();
    from.expected.clear();
  }
  Patience patience(std::uncaught_exceptions() > 0 ? std::min(kWhenFailing, options_.time_limit) : options_.time_limit);
  while (!done() && !patience.over() && !lost() && running()) {
    try {
      if (!advance_all()) patience.pause();
    } catch (...) {
      break;
    }
  }
  std::erase(in_flight(), this);
  if (done()) return;
  set_lost();
  abandon(std::move(scratch_));
}

}  // namespace weft::mpi
