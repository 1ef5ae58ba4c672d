// What the ranks of one run_ranks share: their groups, the calls in flight and what each rank posted for them.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "comm/blocks.h"
#include "comm/sign.h"
#ifdef WEFT_WITH_CUDA
#include "comm/cuda/transports.h"
#endif
#include "text.h"
#include "weft/communicator.h"

namespace weft::threads {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Lock = std::unique_lock<std::mutex>;

inline Clock::duration seconds(double count) {
  constexpr double kMost = 1e8;  // far from where a clock overflows
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(count, kMost)));
}

// What one rank does in one call, as the others see it.
struct Post {
  std::vector<Message> sends;
  std::vector<bool> taken;  // of each send
  Index untaken = 0;
  detail::CallSign sign;   // of the pass, in the calls that carry it
  Index readers = 0;       // copying from the sends just now
  Time time;               // when it was posted
  bool received = false;   // will take nothing more
  bool withdrawn = false;  // the rank gave up the call
  Time learn_until;        // if withdrawn: when the reason should be known
};

using Posts = std::vector<std::shared_ptr<Post>>;

struct Call {
  Posts posts;           // of each rank of the group, null until it comes
  bool awaited = false;  // some rank can do nothing else until its sends are taken
};

struct Group {
  struct Split {
    std::shared_ptr<Group> group;
    Index missing = 0;  // members that have not taken it yet
  };
  // What a member shows of its last passes beside its messages, by their number.
  static constexpr std::size_t kShown = 4;
  using Shown = std::array<detail::CallSign, kShown>;

  bool whole = false;                                // the world itself, not a split
  std::vector<Index> members;                        // ranks of the world
  std::map<Index, std::shared_ptr<Call>> calls;      // by number; those that not all members have posted
  std::map<std::tuple<Index, Index>, Split> splits;  // by call and color
  std::mutex shown_mutex;                            // guards the next
  std::vector<Shown> shown;                          // by member; none before the first pass
#ifdef WEFT_WITH_CUDA
  struct Boards {
    std::shared_ptr<cuda::Board> board;
    Index missing = 0;
  };
  std::map<Index, Boards> boards;  // by call
#endif
};

class Exchange;

struct World {
  struct Rank {
    std::condition_variable changed;  // signalled when anything changes that this rank may be waiting for
    std::vector<Exchange*> in_flight;
    bool left = false;
    Time link_free;  // when the modelled link is free again
  };
  struct Failure {
    Index rank = 0;
    std::string what;
    std::exception_ptr error;
    bool consequence = false;  // of another rank's failure
  };
  enum class Gate { closed, open, cancelled };

  World(Index count, const ThreadRanks& options)
      : how(options), time_limit(seconds(options.time_limit)), ranks(at(count)) {}

  void wake(const Group& group) {
    for (const Index member : group.members) ranks[at(member)].changed.notify_all();
  }
  void wake_all() {
    for (Rank& rank : ranks) rank.changed.notify_all();
  }

  const ThreadRanks how;
  const Clock::duration time_limit;
  std::mutex mutex;  // guards all below, groups but for what they show, calls and posts
  std::vector<Rank> ranks;
  std::optional<Failure> failure;
  Gate gate = Gate::closed;
  std::condition_variable gate_moved;
};

// A rank of a group.
struct Member {
  std::shared_ptr<World> world;
  std::shared_ptr<Group> group;
  Index rank = 0;  // in the group

  Index world_rank(Index member) const { return group->members[at(member)]; }
  World::Rank& state(Index member) const { return world->ranks[at(world_rank(member))]; }
  std::string name(Index member) const {
    if (group->whole) return text("rank ", member);
    return text("rank ", member, " of a split (", world_rank(member), " of all)");
  }
  // What the others show of their passes.
  std::vector<detail::RankSign> shown_signs() const {
    const Lock lock(group->shown_mutex);
    std::vector<detail::RankSign> all;
    for (std::size_t member = 0; member < group->shown.size(); ++member)
      for (const detail::CallSign& sign : group->shown[member])
        if (static_cast<Index>(member) != rank && sign.given()) all.emplace_back(static_cast<Index>(member), sign);
    return all;
  }
};

std::unique_ptr<Communicator> make_communicator(Member self);

}  // namespace weft::threads
