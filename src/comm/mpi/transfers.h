// The MPI messages of one call.
#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include <mpi.h>

#include "weft/communicator.h"
#include "weft/mpi.h"

namespace weft::mpi {

// Time without progress: yields at first, then sleeps between looks, and is over after a limit.
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

class Transfers {
 public:
  enum class Way { send, receive };
  // A message that came, and is not what was expected.
  struct Mismatch {
    std::size_t message = 0;  // as it was posted
    Index peer = 0;
    Index got = 0, expected = 0;  // bytes of the piece
    bool longer = false;          // than expected; `got` may then be what there was room for
    int error = MPI_SUCCESS;      // of another kind
  };

  Transfers(MPI_Comm comm, int tag, const MpiOptions& options) : comm_(comm), tag_(tag), options_(options) {}
  // Takes back what has not ended (see mpi_world), and returns when MPI has let go of the memory, or never will.
  ~Transfers();
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  void post(Way way, std::size_t message, Index peer, std::span<const Block> blocks);
  Scratch& keep(Scratch scratch) { return scratch_.emplace_back(std::move(scratch)); }

  bool done() const { return left_ == 0; }
  // Whether something ended. What is wrong with what came is told once.
  bool advance(std::vector<Mismatch>& wrong);
  std::vector<Index> peers_left() const;

 private:
  struct Part {
    Way way = Way::send;
    std::size_t message = 0;
    Index peer = 0, bytes = 0;
  };
  void post_piece(const Part& part, std::span<const Block> blocks);
  void judge(const Part& part, const MPI_Status& status, int error, std::vector<Mismatch>& wrong) const;

  MPI_Comm comm_;
  int tag_;
  MpiOptions options_;
  std::vector<MPI_Request> requests_;
  std::vector<Part> parts_;  // of each request
  std::size_t left_ = 0;
  std::vector<Scratch> scratch_;
  std::vector<int> ended_;
  std::vector<MPI_Status> statuses_;
};

}  // namespace weft::mpi
