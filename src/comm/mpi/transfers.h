// The MPI messages of one call.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include <mpi.h>

#include "weft/communicator.h"
#include "weft/mpi.h"

namespace weft::mpi {

// A time limit on waiting without progress. pause() yields at first, and sleeps later.
class Patience {
 public:
  explicit Patience(double seconds);
  void renew() { begin_ = Clock::now(); }
  bool over() const { return Clock::now() - begin_ >= limit_; }
  void pause() const;

 private:
  using Clock = std::chrono::steady_clock;
  Clock::duration limit_;
  Clock::time_point begin_;
};

using Scratch = std::unique_ptr<float[]>;

// A message is received only when it is there and its size is known (MPI_Improbe, MPI_Imrecv): a receive that is posted
// before and is too short is an overrun in some MPI (Open MPI 4.1 over shared memory), not an error. So every wait has
// to advance all calls in flight.
class Transfers {
 public:
  enum class Way { send, receive };
  // A message that arrived with another size than expected.
  struct Mismatch {
    std::size_t message = 0;  // its number as it was posted
    Index peer = 0;
    Index got = 0, expected = 0;  // bytes of the piece
  };

  Transfers(MPI_Comm comm, int tag, const MpiOptions& options);
  // Gives up what has not ended (see mpi_world), and returns when MPI no longer uses the memory, or never will stop to.
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  void post(Way way, std::size_t message, Index peer, std::vector<Block> blocks);
  Scratch& keep(Scratch scratch) { return scratch_.emplace_back(std::move(scratch)); }

  bool done() const { return left_ == 0; }
  const std::vector<Mismatch>& wrong() const { return wrong_; }
  std::vector<Index> peers_left() const;

  // Advances all calls of this process; returns whether anything moved.
  static bool advance_all();

 private:
  struct Part {
    Way way = Way::send;
    std::size_t message = 0;
    Index peer = 0, bytes = 0;
  };
  struct Expected {
    Part part;
    std::vector<Block> blocks;
  };
  struct Inbox {  // what one peer has still to send, in order
    Index peer = 0;
    std::deque<Expected> expected;
  };

  void post_piece(Part part, std::vector<Block> blocks);
  void send(const Part& part, std::span<const Block> blocks);
  void receive(const Part& part, std::span<const Block> blocks, MPI_Message* message);
  Inbox& inbox(Index peer);
  bool take(Inbox& from);
  bool test();
  bool advance();

  MPI_Comm comm_;
  int tag_;
  MpiOptions options_;
  std::vector<Inbox> inboxes_;
  std::vector<MPI_Request> requests_;
  std::vector<Part> parts_;  // what each request moves
  std::size_t left_ = 0;     // messages expected or in flight
  std::vector<Mismatch> wrong_;
  std::vector<Scratch> scratch_;
  std::vector<int> ended_;
};

}  // namespace weft::mpi
