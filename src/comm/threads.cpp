// Ranks as threads. A call posts what it sends; whoever receives copies it straight from the sender's memory. So
// nothing is packed and nothing is pushed: a send is over when its receiver has taken it.
//
// A rank that waits takes whatever has been posted for any of its calls under way, so that ranks may wait for them in
// different orders. A call that adds writes in its own wait() alone; if its sender can do nothing else meanwhile, what
// it brings is put aside. All bookkeeping is under one lock for the world; bytes are copied outside of it.
#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>

#include "comm/blocks.h"
#ifdef WEFT_WITH_CUDA
#include "comm/cuda/device_threads.h"
#endif
#include "text.h"
#include "weft/communicator.h"
#include "weft/error.h"

namespace weft {

namespace {

using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;
using Lock = std::unique_lock<std::mutex>;

// A rank that gives up a call because of an exception is about to fail, or will catch it. Its peers wait this long to
// learn which, so that they can say why it failed.
constexpr std::chrono::seconds kToLearnWhy{1};

Clock::duration seconds(double count) {
  constexpr double kMost = 1e8;  // far from where a clock overflows
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(count, kMost)));
}

// Another rank is the cause; told apart so that the cause itself is what run_ranks throws.
struct PeerFailure : Error {
  using Error::Error;
};

// What one rank does in one call, as the others see it.
struct Post {
  std::vector<Message> sends;
  std::vector<bool> taken;  // of each send
  Index untaken = 0;
  Index readers = 0;       // copying from the sends just now
  Time time;               // when it was posted
  bool received = false;   // will take nothing more
  bool withdrawn = false;  // gave up
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
  bool whole = false;                                // the world itself, not a split
  std::vector<Index> members;                        // ranks of the world
  std::map<Index, std::shared_ptr<Call>> calls;      // that not all members have posted
  std::map<std::tuple<Index, Index>, Split> splits;  // by call and color
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
    std::condition_variable changed;  // something that this rank may be waiting for
    std::vector<Exchange*> under_way;
    bool left = false;
    Time link_free;
  };
  struct Failure {
    Index rank = 0;
    std::string what;
    std::exception_ptr error;
    bool consequence = false;
  };
  enum class Gate { closed, open, cancelled };

  World(Index count, const ThreadRanks& options)
      : how(options), time_limit(seconds(options.time_limit)), ranks(slot(count)) {}

  void wake(const Group& group) {
    for (const Index member : group.members) ranks[slot(member)].changed.notify_all();
  }
  void wake_all() {
    for (Rank& rank : ranks) rank.changed.notify_all();
  }

  const ThreadRanks how;
  const Clock::duration time_limit;
  std::mutex mutex;  // guards all below, groups, calls and posts
  std::vector<Rank> ranks;
  std::optional<Failure> failure;
  Gate gate = Gate::closed;
  std::condition_variable gate_moved;
};

// Where a communicator stands.
struct Standing {
  std::shared_ptr<World> world;
  std::shared_ptr<Group> group;
  Index rank = 0;  // in the group

  Index world_rank(Index member) const { return group->members[slot(member)]; }
  World::Rank& state(Index member) const { return world->ranks[slot(world_rank(member))]; }
  std::string name(Index member) const {
    if (group->whole) return text("rank ", member);
    return text("rank ", member, " of a split (", world_rank(member), " of all)");
  }
};

Block whole(std::vector<float>& memory, Index bytes) { return {.data = memory.data(), .rows = 1, .bytes = bytes}; }

// One call of one rank.
class Exchange final : public Request::Pending {
 public:
  Exchange(Standing place, Index number, std::vector<Message> sends, std::vector<Message> receives);
  ~Exchange() override;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  void wait() override;
  // Takes what has been posted for this call, in the order of the list. False: nothing to take.
  bool advance(Lock& lock);

 private:
  bool all_received() const { return next_ == receives_.size(); }
  // Whether receives go where they belong, or are put aside.
  bool direct() const { return waiting_ || !adds_; }
  bool complete() const { return all_received() && !busy_ && mine_->untaken == 0; }
  Post* post_of(Index peer) const { return call_->posts[slot(peer)].get(); }
  std::optional<std::size_t> next_source() const;
  bool can_take(const Post& post, std::size_t send) const;
  void take(Lock& lock, Post& post, std::size_t send);
  void settle(Lock& lock);
  void await_sends();
  void set_received();
  bool advance_all(Lock& lock);
  void end();

  void check_next() const;
  void check_unwanted() const;
  void check_peer(Index peer, Time now, Time& until) const;
  Time check(Time deadline) const;
  std::vector<Index> waited_for() const;
  [[noreturn]] void give_up() const;
  void wait_for_link(Lock& lock);

  Standing place_;
  Index number_;
  std::shared_ptr<Call> call_;
  std::shared_ptr<Post> mine_;
  std::vector<Message> receives_;
  std::size_t next_ = 0;                   // receive
  std::vector<std::size_t> seen_;          // sends of each peer that were looked at
  std::vector<Index> taken_from_;          // messages taken of each peer
  bool adds_;                              // some receive does
  bool waiting_ = false;                   // in its own wait()
  std::vector<std::vector<float>> aside_;  // the first receives, in order, until that
  bool busy_ = false;                      // being copied to, by some thread of this rank
  bool ended_ = false;
  Time posted_;      // by all peers that something came from, and by this rank
  Index bytes_ = 0;  // from others
  bool from_others_ = false;
};

Exchange::Exchange(Standing place, Index number, std::vector<Message> sends, std::vector<Message> receives)
    : place_(std::move(place)),
      number_(number),
      mine_(std::make_shared<Post>()),
      receives_(std::move(receives)),
      seen_(place_.group->members.size()),
      taken_from_(place_.group->members.size()),
      adds_(std::any_of(receives_.begin(), receives_.end(), [](const Message& m) { return adds(m.combine); })) {
  Group& group = *place_.group;
  mine_->taken.resize(sends.size());
  mine_->untaken = static_cast<Index>(sends.size());
  mine_->sends = std::move(sends);
  mine_->received = receives_.empty();
  auto fresh = std::make_shared<Call>(Call{.posts = Posts(group.members.size())});  // if this rank is the first
  const Lock lock(place_.world->mutex);
  std::vector<Exchange*>& under_way = place_.state(place_.rank).under_way;
  under_way.reserve(under_way.size() + 1);
  call_ = group.calls.try_emplace(number, std::move(fresh)).first->second;
  // From here on nothing throws: others know of this call only if it is under way.
  under_way.push_back(this);
  call_->posts[slot(place_.rank)] = mine_;
  mine_->time = posted_ = Clock::now();
  const bool last =
      std::all_of(call_->posts.begin(), call_->posts.end(), [](const auto& post) { return post != nullptr; });
  if (last) group.calls.erase(number);
  place_.world->wake(group);
}

Exchange::~Exchange() {
  Lock lock(place_.world->mutex);
  if (ended_) return;
  mine_->withdrawn = true;
  const Time now = Clock::now();
  mine_->learn_until = std::uncaught_exceptions() > 0 ? now + kToLearnWhy : now;
  place_.world->wake(*place_.group);
  place_.state(place_.rank).changed.wait(lock, [&] { return mine_->readers == 0 && !busy_; });
  end();
}

// Which send of its peer the next receive would take; none if that has not come, or has no such send.
std::optional<std::size_t> Exchange::next_source() const {
  const Index peer = receives_[next_].peer;
  const Post* post = post_of(peer);
  if (post == nullptr) return {};
  for (std::size_t send = seen_[slot(peer)]; send < post->sends.size(); ++send) {
    if (post->sends[send].peer == place_.rank) return send;
  }
  return {};
}

bool Exchange::can_take(const Post& post, std::size_t send) const {
  const Message& from = post.sends[send];
  const Message& to = receives_[next_];
  if (!direct() && !call_->awaited) return false;
  if (post.withdrawn || from.size() != to.size()) return false;
  return std::all_of(from.blocks.begin(), from.blocks.end(),
                     [&](const Block& block) { return holds_numbers(block, to.combine); });
}

void Exchange::take(Lock& lock, Post& post, std::size_t send) {
  const Message& to = receives_[next_];
  const Message& from = post.sends[send];
  const bool aside = !direct();
  if (aside) aside_.emplace_back(slot(ceil_div(to.size(), Index{sizeof(float)})));
  busy_ = true;
  ++post.readers;
  lock.unlock();
  if (aside) {
    move_blocks(from.blocks, std::array{whole(aside_.back(), to.size())}, Message::Combine::replace);
  } else {
    move_blocks(from.blocks, to.blocks, to.combine);
  }
  lock.lock();
  --post.readers;
  busy_ = false;
  post.taken[send] = true;
  --post.untaken;
  if (to.peer != place_.rank) {
    from_others_ = true;
    bytes_ += to.size();
    posted_ = std::max(posted_, post.time);
  }
  seen_[slot(to.peer)] = send + 1;
  ++taken_from_[slot(to.peer)];
  ++next_;
  if (post.untaken == 0 || post.withdrawn) place_.state(to.peer).changed.notify_all();
}

// What was put aside goes where it belongs, before anything else is taken.
void Exchange::settle(Lock& lock) {
  if (aside_.empty()) return;
  busy_ = true;
  lock.unlock();
  for (std::size_t i = 0; i < aside_.size(); ++i) {
    const Message& to = receives_[i];
    move_blocks(std::array{whole(aside_[i], to.size())}, to.blocks, to.combine);
  }
  aside_.clear();
  lock.lock();
  busy_ = false;
}

// Nothing is left but that others take what this rank sends.
void Exchange::await_sends() {
  if (!all_received() || call_->awaited) return;
  call_->awaited = true;
  place_.world->wake(*place_.group);
}

bool Exchange::advance(Lock& lock) {
  if (busy_) return false;
  bool moved = false;
  while (!all_received() && !mine_->withdrawn) {
    const std::optional<std::size_t> send = next_source();
    if (!send || !can_take(*post_of(receives_[next_].peer), *send)) break;
    take(lock, *post_of(receives_[next_].peer), *send);
    moved = true;
  }
  if (moved) {
    if (all_received()) set_received();
    place_.state(place_.rank).changed.notify_all();  // another thread of this rank may wait for this call
  }
  return moved;
}

void Exchange::set_received() {
  mine_->received = true;
  for (std::size_t peer = 0; peer < call_->posts.size();
       ++peer) {  // senders of more than this rank receives learn it now
    const Post* post = call_->posts[peer].get();
    if (post != nullptr && post->untaken > 0) place_.state(static_cast<Index>(peer)).changed.notify_all();
  }
}

bool Exchange::advance_all(Lock& lock) {
  bool moved = false;
  std::vector<Exchange*>& under_way = place_.state(place_.rank).under_way;
  for (std::size_t i = 0; i < under_way.size(); ++i) moved |= under_way[i]->advance(lock);
  return moved;
}

void Exchange::end() {
  ended_ = true;
  std::vector<Exchange*>& under_way = place_.state(place_.rank).under_way;
  under_way.erase(std::find(under_way.begin(), under_way.end(), this));
}

// The next receive has no send that fits it, and never will have.
void Exchange::check_next() const {
  if (all_received()) return;
  const Message& to = receives_[next_];
  const Post* post = post_of(to.peer);
  if (post == nullptr || post->withdrawn) return;
  const std::string self = place_.name(place_.rank), peer = place_.name(to.peer);
  const std::optional<std::size_t> send = next_source();
  if (!send) {
    throw Error(text("call ", number_, ": ", self, " receives more messages from ", peer, " than the ",
                     taken_from_[slot(to.peer)], " that it sends; the next one has ", to.size(), " bytes"),
                "let all ranks make the same calls in the same order, and both sides name the same messages");
  }
  const Message& from = post->sends[*send];
  if (from.size() != to.size()) {
    throw Error(text("call ", number_, ": ", peer, " sends ", from.size(), " bytes to ", self, ", which receives ",
                     to.size(), " (message ", taken_from_[slot(to.peer)], " between them)"),
                "let both sides name as many bytes, and all ranks make the same calls in the same order");
  }
  if (!can_take(*post, *send)) {
    throw Error(
        text("call ", number_, ": ", self, " adds what ", peer, " sends from blocks that are not cut and aligned to ",
             number_size(to.combine) == 8 ? "f64" : "f32"),
        text("align the blocks that are sent, their sizes and their strides to ", number_size(to.combine), " bytes"));
  }
}

// A send whose receiver has all that it wants.
void Exchange::check_unwanted() const {
  for (std::size_t send = 0; send < mine_->sends.size(); ++send) {
    const Message& message = mine_->sends[send];
    const Post* post = post_of(message.peer);
    if (mine_->taken[send] || post == nullptr || !post->received) continue;
    throw Error(text("call ", number_, ": ", place_.name(place_.rank), " sends ", message.size(), " bytes to ",
                     place_.name(message.peer), ", which does not receive them"),
                "let all ranks make the same calls in the same order, and both sides name the same messages");
  }
}

// Ranks that something must still come from or go to.
std::vector<Index> Exchange::waited_for() const {
  std::vector<Index> peers;
  if (!all_received()) peers.push_back(receives_[next_].peer);
  for (std::size_t send = 0; send < mine_->sends.size(); ++send) {
    if (!mine_->taken[send]) peers.push_back(mine_->sends[send].peer);
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  std::erase(peers, place_.rank);
  return peers;
}

// A peer that gave up or left will do nothing more for this call.
void Exchange::check_peer(Index peer, Time now, Time& until) const {
  const Post* post = post_of(peer);
  const bool left = place_.state(peer).left;
  if (post != nullptr && post->withdrawn) {
    if (!left && now < post->learn_until) {
      until = std::min(until, post->learn_until);
      return;
    }
    throw PeerFailure(
        text(place_.name(peer), " gave up call ", number_, " that ", place_.name(place_.rank), " waits in"),
        "wait() for every request before it goes, or see why that rank ended");
  }
  if (left) {
    throw PeerFailure(
        text(place_.name(peer), " has left, and ", place_.name(place_.rank), " waits for it in call ", number_),
        "let all ranks make the same calls in the same order");
  }
}

// Throws if waiting is in vain. Otherwise: when to look again.
Time Exchange::check(Time deadline) const {
  check_next();
  check_unwanted();
  const World& world = *place_.world;
  if (world.failure) {
    throw PeerFailure(text("rank ", world.failure->rank, " failed: ", world.failure->what),
                      text("see to rank ", world.failure->rank, "; the others end because of it"));
  }
  if (world.how.stop.stop_requested())
    throw PeerFailure(text("the ranks were told to stop, and ", place_.name(place_.rank), " waits in call ", number_),
                      "run them again");
  const Time now = Clock::now();
  Time until = deadline;
  for (const Index peer : waited_for()) check_peer(peer, now, until);
  if (now >= deadline) give_up();
  return until;
}

void Exchange::give_up() const {
  std::vector<Index> peers = waited_for();
  // Ranks that have started may wait themselves for one that has not: that one is to be named.
  const auto started = std::partition(peers.begin(), peers.end(), [&](Index peer) { return post_of(peer) == nullptr; });
  if (started != peers.begin()) peers.erase(started, peers.end());
  std::string names;
  for (const Index peer : peers) names += text(names.empty() ? "" : ", ", place_.name(peer));
  throw Error(text(place_.name(place_.rank), " waited ", place_.world->how.time_limit, " seconds in call ", number_,
                   " for ", names),
              "see what those ranks do, or raise ThreadRanks::time_limit");
}

void Exchange::wait() {
  Lock lock(place_.world->mutex);
  place_.state(place_.rank).changed.wait(lock, [&] { return !busy_; });
  waiting_ = true;
  settle(lock);
  Time deadline = Clock::now() + place_.world->time_limit;
  while (!complete()) {
    if (advance_all(lock)) {
      deadline = Clock::now() + place_.world->time_limit;
    } else {
      await_sends();
      place_.state(place_.rank).changed.wait_until(lock, check(deadline));
    }
  }
  end();
  wait_for_link(lock);
}

// The modelled link: bytes come one call after another, once all who send have started, and this rank too.
void Exchange::wait_for_link(Lock& lock) {
  const World& world = *place_.world;
  if (!from_others_ || (world.how.bandwidth == 0 && world.how.latency == 0)) return;
  World::Rank& state = place_.state(place_.rank);
  const double transfer = world.how.bandwidth == 0 ? 0 : static_cast<double>(bytes_) / world.how.bandwidth;
  const Time arrival = std::max(posted_, state.link_free) + seconds(world.how.latency + transfer);
  if (arrival - Clock::now() > world.time_limit)
    throw Error(text("call ", number_, ": ", place_.name(place_.rank), " receives ", bytes_, " bytes over a link of ",
                     world.how.bandwidth, " bytes per second and ", world.how.latency,
                     " seconds a call, which takes longer than the time limit of ", world.how.time_limit, " seconds"),
                "give a faster link, or a longer time limit");
  state.link_free = arrival;
  // Meanwhile others may wait for what this rank should take.
  while (!world.failure && !world.how.stop.stop_requested() && Clock::now() < arrival) {
    if (!advance_all(lock)) state.changed.wait_until(lock, arrival);
  }
}

class ThreadCommunicator final : public Communicator {
 public:
  explicit ThreadCommunicator(Standing place)
      : Communicator(place.rank, static_cast<Index>(place.group->members.size())), place_(std::move(place)) {}

  std::string_view name() const override { return "threads"; }

 private:
  std::unique_ptr<Request::Pending> start(std::vector<Message> sends, std::vector<Message> receives) override {
    return std::make_unique<Exchange>(place_, calls_++, std::move(sends), std::move(receives));
  }
  std::unique_ptr<Communicator> make_split(Index color, Index key) override;
#ifdef WEFT_WITH_CUDA
  std::unique_ptr<DeviceCommunicator> make_on(const Place& place) override;
#endif

  Standing place_;
  Index calls_ = 0;
};

struct Choice {
  Index color = 0, key = 0, rank = 0;
};

std::unique_ptr<Communicator> ThreadCommunicator::make_split(Index color, Index key) {
  Choice mine{color, key, rank()};
  std::vector<Choice> all(slot(ranks()));
  std::vector<Message> sends, receives;
  for (Index peer = 0; peer < ranks(); ++peer) {
    sends.push_back({peer, {{.data = &mine, .rows = 1, .bytes = sizeof(Choice)}}});
    receives.push_back({peer, {{.data = &all[slot(peer)], .rows = 1, .bytes = sizeof(Choice)}}});
  }
  const Index number = calls_;
  start(std::move(sends), std::move(receives))->wait();  // not counted as traffic

  std::erase_if(all, [&](const Choice& choice) { return choice.color != color; });
  std::sort(all.begin(), all.end(),
            [](const Choice& a, const Choice& b) { return std::tie(a.key, a.rank) < std::tie(b.key, b.rank); });
  const auto me = std::find_if(all.begin(), all.end(), [&](const Choice& choice) { return choice.rank == rank(); });

  const Lock lock(place_.world->mutex);
  Group::Split& split = place_.group->splits[{number, color}];
  if (split.group == nullptr) {  // the first to come makes it for all
    split.group = std::make_shared<Group>();
    for (const Choice& choice : all) split.group->members.push_back(place_.world_rank(choice.rank));
    split.missing = static_cast<Index>(all.size());
  }
  Standing place{place_.world, split.group, me - all.begin()};
  if (--split.missing == 0) place_.group->splits.erase({number, color});
  return std::make_unique<ThreadCommunicator>(std::move(place));
}

#ifdef WEFT_WITH_CUDA
std::unique_ptr<DeviceCommunicator> ThreadCommunicator::make_on(const Place& place) {
  // A number of their own for boards: calls_ is the same on all ranks here, and is not used twice.
  const Index number = calls_++;
  std::shared_ptr<cuda::Board> board;
  {
    const Lock lock(place_.world->mutex);
    Group::Boards& shared = place_.group->boards[number];
    if (shared.board == nullptr) shared = {cuda::make_board(ranks()), ranks()};  // the first to come makes it for all
    board = shared.board;
    if (--shared.missing == 0) place_.group->boards.erase(number);
  }
  return cuda::make_device_threads(*this, std::move(board), place,
                                   [this](std::vector<Message> sends, std::vector<Message> receives) {
                                     return start(std::move(sends), std::move(receives));
                                   });
}
#endif

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
  world.ranks[slot(failure.rank)].left = true;
  if (!world.failure || (world.failure->consequence && !failure.consequence)) world.failure = std::move(failure);
  world.wake_all();
}

void leave(World& world, Index rank) {
  const Lock lock(world.mutex);
  world.ranks[slot(rank)].left = true;
  world.wake_all();
}

// False: not all ranks could be started, so none runs.
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

// Also where there is no memory left for the text.
std::string words_of(const char* what) noexcept {
  try {
    return what;
  } catch (const std::bad_alloc&) {
    return "out of memory";  // short enough to lie in the string itself
  }
}

void run_rank(Standing place, const std::function<void(Communicator&)>& body) {
  World& world = *place.world;
  const Index rank = place.rank;
  if (!pass_gate(world)) return;
  try {
    ThreadCommunicator communicator(std::move(place));
    body(communicator);
    leave(world, rank);
  } catch (const PeerFailure& e) {
    set_failure(world, {rank, words_of(e.what()), std::current_exception(), true});
  } catch (const std::exception& e) {
    set_failure(world, {rank, words_of(e.what()), std::current_exception(), false});
  } catch (...) {
    set_failure(world, {rank, words_of("an exception without a text"), std::current_exception(), false});
  }
}

// Joins on the way out, however that is.
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
      threads.all.emplace_back(run_rank, Standing{world, group, static_cast<Index>(rank)}, std::cref(body));
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

void run_ranks(Index ranks, const std::function<void(Communicator&)>& body, const ThreadRanks& how) {
  check_options(ranks, how);
  const auto world = std::make_shared<World>(ranks, how);
  run_all(world, body);
  if (!world->failure) return;
  try {
    std::rethrow_exception(world->failure->error);
  } catch (const Error& e) {
    throw Error(text("rank ", world->failure->rank, ": ", e.problem()), e.remedy());
  }
}

}  // namespace weft
