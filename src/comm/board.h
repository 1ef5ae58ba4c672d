// What ranks that are processes of one machine see of each other beside their messages: shared memory in which each
// writes what it is at. Ranks on GPUs need it, because a call that hangs in NCCL does not say who is missing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/flight.h"
#include "comm/sign.h"
#include "weft/communicator.h"

namespace weft::detail {

// Memory that forked processes share, as words that any of them may read and write.
class BoardMemory {
 public:
  using Word = std::atomic<std::uint64_t>;
  enum class End : std::uint64_t { runs, well, failed };
  static constexpr Index kLinks = 8;  // connections of a rank at a time; of further ones nothing is seen

  explicit BoardMemory(Index ranks);  // before the fork
  ~BoardMemory();
  BoardMemory(const BoardMemory&) = delete;
  BoardMemory& operator=(const BoardMemory&) = delete;

  Index ranks() const { return ranks_; }
  Word& beats(Index rank) { return rank_(rank)[0]; }  // grows as long as the rank lives
  Word& end(Index rank) { return rank_(rank)[1]; }
  // What a rank shows of its last passes; kShown places of kSignWords: context, then the parts of a CallSign.
  static constexpr Index kShown = 4, kSignWords = 1 + static_cast<Index>(CallSign::kParts);
  Word* shown(Index rank, Index place) { return rank_(rank) + 2 + place % kShown * kSignWords; }
  Word* link(Index rank, Index link) { return rank_(rank) + kRankWords + link * link_words_; }

 private:
  static constexpr Index kRankWords = 2 + kShown * kSignWords;
  Word* rank_(Index rank) { return words_ + rank * (kRankWords + kLinks * link_words_); }

  Index ranks_, link_words_;
  std::size_t bytes_;
  Word* words_;
};

// Why a call will not end.
struct Trouble {
  std::string problem;
  bool consequence = false;  // of a failure that another rank reports itself
  std::string cause = {};    // what the rank that gave up first has said, if it is not this one
};

// The ranks of a communicator on the board, and one connection of theirs.
class Board {
 public:
  Board(std::shared_ptr<BoardMemory> memory, std::vector<Index> members, Index self);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  // The same ranks for another connection; `context`: what tells it from others on all its ranks, not 0. `first`: the
  // number of its first call on this rank, which another has on a rank that gave up an earlier connection sooner.
  std::unique_ptr<Board> connection(std::uint64_t context, Index first = 0) const;
  // The ranks of a split.
  std::unique_ptr<Board> part(std::vector<Index> members, Index self) const;

  void beat();
  // What names the communicator on all its ranks, not 0: passes are shown under it.
  void set_communicator(std::uint64_t name) { communicator_ = name; }
  // This rank begins a pass.
  void show(const CallSign& sign);
  // What the other ranks show of their last passes.
  std::vector<RankSign> shown() const;
  // This rank has started a call.
  void post(const RecordedCall& call, std::span<const Message> sends, std::span<const Message> receives);
  // This rank gives up the connection; the others learn why.
  void fail(const Trouble& why);

  // What keeps a call, in which this rank has waited so many seconds, from ending: a rank that has ended or failed, or
  // names other sizes; and, once the limit is over, whoever is missing. call -1: the connection itself.
  std::optional<Trouble> trouble(Index call, double waited, double limit);
  // A rank that sends or receives other sizes in a call than this one: data may have come all the same.
  std::optional<Trouble> mismatch(Index call) const;

 private:
  using Clock = std::chrono::steady_clock;
  using Word = BoardMemory::Word;
  struct Seen {
    std::uint64_t beats = 0;
    Clock::time_point since = Clock::now();
  };

  Word* link_of(Index peer) const;
  void append_shown(Index member, std::vector<RankSign>& to) const;
  // "; ranks 0 and 1 differ in the mask", if that is seen; else nothing.
  std::string why_they_differ() const;
  std::optional<Trouble> ended(Index peer, Index call) const;
  std::optional<Trouble> mismatch_with(Index peer, Index call) const;
  Trouble over(Index call, double limit) const;
  std::string waits(Index call) const;
  std::string call_name(Word* link, Index call) const;
  // The same for all ranks of a call.
  Index place(Index call) const { return call < 0 ? call : call - first_; }

  std::shared_ptr<BoardMemory> memory_;
  std::vector<Index> members_;  // ranks of the whole
  Index self_;
  std::uint64_t context_ = 0;
  Index first_ = 0;
  std::uint64_t communicator_ = 0;
  Word* mine_ = nullptr;  // of the connection; null: no room
  std::vector<Seen> seen_;
};

}  // namespace weft::detail
