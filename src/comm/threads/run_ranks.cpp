// run_ranks: starts the threads, runs the body on each, and reports the first failure.
#include <cstddef>
#include <functional>
#include <new>
#include <stop_token>
#include <system_error>
#include <thread>

#include "comm/threads/world.h"

namespace weft {
namespace threads {
namespace {

void check_options(Index ranks, const ThreadRanks& how) {
  constexpr Index kMostRanks = 1 << 16;
  constexpr double kMost = 1e8, kMostBandwidth = 1e18;  // three years of seconds; an exabyte
  if (ranks < 1) throw Error(text(ranks, " ranks"), "ask for at least one");
  if (ranks > kMostRanks) throw Error(text(ranks, " ranks"), text("ask for at most ", kMostRanks, " threads"));
  if (!(how.time_limit >= 1e-3) || how.time_limit > kMost)
    throw Error(text("a time limit of ", how.time_limit, " seconds"), text("give 0.001 to ", kMost));
  const bool fast = how.bandwidth == 0 || (how.bandwidth >= 1 && how.bandwidth <= kMostBandwidth);
  if (!fast || !(how.latency >= 0) || how.latency > kMost)
    throw Error(text("a link of ", how.bandwidth, " bytes per second and ", how.latency, " seconds a call"),
                text("give a bandwidth of 0 (as fast as memory), or of 1 to ", kMostBandwidth,
                     ", and a latency of 0 to ", kMost));
}

void set_failure(World& world, World::Failure failure) {
  const Lock lock(world.mutex);
  world.ranks[at(failure.rank)].left = true;
  if (!world.failure || (world.failure->consequence && !failure.consequence)) world.failure = std::move(failure);
  world.wake_all();
}

void leave(World& world, Index rank) {
  const Lock lock(world.mutex);
  world.ranks[at(rank)].left = true;
  world.wake_all();
}

// Returns false if not all ranks could be started: then none runs.
bool pass_gate(World& world) {
  Lock lock(world.mutex);
  world.gate_moved.wait(lock, [&] { return world.gate != World::Gate::closed; });
  return world.gate == World::Gate::open;
}

void move_gate(World& world, World::Gate gate) {
  const Lock lock(world.mutex);
  world.gate = gate;
  world.gate_moved.notify_all();
}

// Works also where there is no memory left for the text.
std::string words_of(const char* what) noexcept {
  try {
    return what;
  } catch (const std::bad_alloc&) {
    return "out of memory";  // short enough for the string's own buffer
  }
}

void run_rank(Member self, const std::function<void(Communicator&)>& body) {
  World& world = *self.world;
  const Index rank = self.rank;
  if (!pass_gate(world)) return;
  try {
    const std::unique_ptr<Communicator> communicator = make_communicator(std::move(self));
    body(*communicator);
    leave(world, rank);
  } catch (const PeerError& e) {
    set_failure(world, {rank, words_of(e.what()), std::current_exception(), e.consequence()});
  } catch (const std::exception& e) {
    set_failure(world, {rank, words_of(e.what()), std::current_exception(), false});
  } catch (...) {
    set_failure(world, {rank, words_of("an exception without a text"), std::current_exception(), false});
  }
}

// Joins the threads on every way out.
struct Threads {
  ~Threads() {
    for (std::thread& thread : all) thread.join();
  }
  std::vector<std::thread> all;
};

void run_all(const std::shared_ptr<World>& world, const std::function<void(Communicator&)>& body) {
  const std::size_t ranks = world->ranks.size();
  auto group = std::make_shared<Group>();
  group->whole = true;
  for (std::size_t rank = 0; rank < ranks; ++rank) group->members.push_back(static_cast<Index>(rank));
  const std::stop_callback wake(world->how.stop, [&world] {
    const Lock lock(world->mutex);
    world->wake_all();
  });
  Threads threads;
  threads.all.reserve(ranks);
  try {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      threads.all.emplace_back(run_rank, Member{world, group, static_cast<Index>(rank)}, std::cref(body));
    }
  } catch (const std::system_error& e) {
    move_gate(*world, World::Gate::cancelled);
    throw Error(text("thread ", threads.all.size(), " of ", ranks, " could not be started: ", e.what()),
                "run fewer ranks in this process");
  } catch (...) {
    move_gate(*world, World::Gate::cancelled);
    throw;
  }
  move_gate(*world, World::Gate::open);
}

}  // namespace
}  // namespace threads

void run_ranks(Index ranks, const std::function<void(Communicator&)>& body, const ThreadRanks& how) {
  threads::check_options(ranks, how);
  const auto world = std::make_shared<threads::World>(ranks, how);
  threads::run_all(world, body);
  if (!world->failure) return;
  try {
    std::rethrow_exception(world->failure->error);
  } catch (const Error& e) {
    throw Error(text("rank ", world->failure->rank, ": ", e.problem()), e.remedy());
  }
}

}  // namespace weft
