#include "comm/mpi/transfers.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "comm/mpi/pieces.h"
#include "comm/mpi/session.h"

namespace weft::mpi {

namespace {

// A rank that unwinds has something to say: it does not wait long for its messages to end.
constexpr double kWhenFailing = 1;  // seconds

constexpr std::chrono::milliseconds kAwake{5};  // then another rank computes: leave it the core
constexpr std::chrono::microseconds kNap{50};

// Memory that MPI has not let go of, and never will: the process is about to end.
void abandon(std::vector<Scratch> scratch) {
  static std::vector<Scratch> all;
  for (Scratch& one : scratch) all.push_back(std::move(one));
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

void Transfers::post(Way way, std::size_t message, Index peer, std::span<const Block> blocks) {
  Part part{way, message, peer, 0};
  for (const Block& block : blocks) part.bytes += block.size();
  if (part.bytes <= options_.largest) return post_piece(part, blocks);
  for (const std::vector<Block>& piece : cut_in_pieces(blocks, options_.largest)) {
    part.bytes = 0;
    for (const Block& block : piece) part.bytes += block.size();
    post_piece(part, piece);
  }
}

void Transfers::post_piece(const Part& part, std::span<const Block> blocks) {
  const Typed bytes(blocks);
  const int peer = static_cast<int>(part.peer);
  parts_.push_back(part);
  requests_.push_back(MPI_REQUEST_NULL);
  if (part.way == Way::send) {
    check(MPI_Isend(bytes.data(), bytes.count(), bytes.type(), peer, tag_, comm_, &requests_.back()), "MPI_Isend");
  } else {
    check(MPI_Irecv(bytes.data(), bytes.count(), bytes.type(), peer, tag_, comm_, &requests_.back()), "MPI_Irecv");
  }
  ++left_;
}

bool Transfers::advance(std::vector<Mismatch>& wrong) {
  ended_.resize(requests_.size());
  statuses_.resize(requests_.size());
  int count = 0;
  const int code =
      MPI_Testsome(static_cast<int>(requests_.size()), requests_.data(), &count, ended_.data(), statuses_.data());
  if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) check(code, "MPI_Testsome");
  if (count == MPI_UNDEFINED) count = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
    // Without an error somewhere MPI leaves the field as it was.
    const int error = code == MPI_ERR_IN_STATUS ? statuses_[i].MPI_ERROR : MPI_SUCCESS;
    if (error == MPI_ERR_PENDING) continue;
    --left_;
    judge(parts_[static_cast<std::size_t>(ended_[i])], statuses_[i], error, wrong);
  }
  return count > 0;
}

void Transfers::judge(const Part& part, const MPI_Status& status, int error, std::vector<Mismatch>& wrong) const {
  Mismatch m{part.message, part.peer, part.bytes, part.bytes, false, error};
  if (error != MPI_SUCCESS) MPI_Error_class(error, &m.error);
  if (part.way == Way::receive) {
    MPI_Count got = 0;
    MPI_Get_elements_x(&status, MPI_BYTE, &got);
    m.got = got;
    m.longer = m.error == MPI_ERR_TRUNCATE;
  }
  if (error != MPI_SUCCESS || m.got != m.expected) wrong.push_back(m);
}

std::vector<Index> Transfers::peers_left() const {
  std::vector<Index> peers;
  for (std::size_t i = 0; i < requests_.size(); ++i)
    if (requests_[i] != MPI_REQUEST_NULL) peers.push_back(parts_[i].peer);
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

Transfers::~Transfers() {
  if (done()) return;
  if (lost() || !running()) {
    abandon(std::move(scratch_));
    return;
  }
  for (std::size_t i = 0; i < requests_.size(); ++i)
    if (requests_[i] != MPI_REQUEST_NULL && parts_[i].way == Way::receive) MPI_Cancel(&requests_[i]);
  Patience patience(std::uncaught_exceptions() > 0 ? std::min(kWhenFailing, options_.time_limit) : options_.time_limit);
  std::vector<Mismatch> unheard;
  while (!done() && !patience.over()) {
    try {
      if (!advance(unheard)) patience.pause();
    } catch (...) {
      break;
    }
  }
  if (done()) return;
  set_lost();
  abandon(std::move(scratch_));
}

}  // namespace weft::mpi
