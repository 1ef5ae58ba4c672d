// Exchanges between ranks that are threads. A call posts what it sends, and the receiver copies it straight from the
// sender's memory: nothing is packed, and a send is over when its receiver has taken it.
//
// A rank that waits takes whatever has been posted for any of its calls in flight, so that ranks may wait for them in
// different orders. A call that adds writes in its own wait() alone; if its sender can do nothing else meanwhile, what
// it brings is buffered. All bookkeeping is under one lock of the world; bytes are copied outside of it.
#include "comm/threads/exchange.h"

#include <array>
#include <cstddef>

namespace weft::threads {

namespace {

// A rank that gives up a call because of an exception is about to fail, or will catch it. Its peers wait this long to
// learn which, so that they can say why it failed.
constexpr std::chrono::seconds kToLearnWhy{1};

Block whole(std::vector<float>& memory, Index bytes) { return {.data = memory.data(), .rows = 1, .bytes = bytes}; }

}  // namespace

Exchange::Exchange(Member self, Index number, std::vector<Message> sends, std::vector<Message> receives,
                   const detail::CallSign& sign)
    : self_(std::move(self)),
      number_(number),
      mine_(std::make_shared<Post>()),
      receives_(std::move(receives)),
      seen_(self_.group->members.size()),
      taken_from_(self_.group->members.size()),
      adds_(std::any_of(receives_.begin(), receives_.end(), [](const Message& m) { return adds(m.combine); })) {
  Group& group = *self_.group;
  mine_->taken.resize(sends.size());
  mine_->untaken = static_cast<Index>(sends.size());
  mine_->sends = std::move(sends);
  mine_->sign = sign;
  mine_->received = receives_.empty();
  auto fresh = std::make_shared<Call>(Call{.posts = Posts(group.members.size())});  // if this rank is the first
  const Lock lock(self_.world->mutex);
  std::vector<Exchange*>& in_flight = self_.state(self_.rank).in_flight;
  in_flight.reserve(in_flight.size() + 1);
  call_ = group.calls.try_emplace(number, std::move(fresh)).first->second;
  // From here on nothing throws: others know of this call only if it is under way.
  in_flight.push_back(this);
  call_->posts[at(self_.rank)] = mine_;
  mine_->time = posted_ = Clock::now();
  const bool last =
      std::all_of(call_->posts.begin(), call_->posts.end(), [](const auto& post) { return post != nullptr; });
  if (last) group.calls.erase(number);
  wake_those([this](const Exchange& e) {
    return e.is_next(self_.rank) || (mine_->received && e.has_untaken_for(self_.rank));
  });
}

Exchange::~Exchange() {
  Lock lock(self_.world->mutex);
  if (ended_) return;
  mine_->withdrawn = true;
  const Time now = Clock::now();
  mine_->learn_until = std::uncaught_exceptions() > 0 ? now + kToLearnWhy : now;
  self_.world->wake(*self_.group);
  self_.state(self_.rank).changed.wait(lock, [&] { return mine_->readers == 0 && !busy_; });
  end();
}

// Wakes the ranks for whose side of this call `of` says that something has changed. Where many ranks share a core, one
// that wakes for nothing takes time from those that compute.
template <class F>
void Exchange::wake_those(const F& of) const {
  for (const Index member : self_.group->members) {
    World::Rank& rank = self_.world->ranks[at(member)];
    if (std::any_of(rank.in_flight.begin(), rank.in_flight.end(),
                    [&](const Exchange* e) { return e->call_ == call_ && of(*e); }))
      rank.changed.notify_all();
  }
}

// Whether the next message to take comes from that rank.
bool Exchange::is_next(Index peer) const { return !all_received() && receives_[next_].peer == peer; }

bool Exchange::has_untaken_for(Index peer) const {
  if (mine_->untaken == 0) return false;
  for (std::size_t send = 0; send < mine_->sends.size(); ++send)
    if (!mine_->taken[send] && mine_->sends[send].peer == peer) return true;
  return false;
}

// Which send of its peer the next receive would take; none if that has not come, or has no such send.
std::optional<std::size_t> Exchange::next_source() const {
  const Index peer = receives_[next_].peer;
  const Post* post = post_of(peer);
  if (post == nullptr) return {};
  for (std::size_t send = seen_[at(peer)]; send < post->sends.size(); ++send) {
    if (post->sends[send].peer == self_.rank) return send;
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
  if (aside) aside_.emplace_back(at(ceil_div(to.size(), Index{sizeof(float)})));
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
  if (to.peer != self_.rank) {
    from_others_ = true;
    bytes_ += to.size();
    posted_ = std::max(posted_, post.time);
  }
  seen_[at(to.peer)] = send + 1;
  ++taken_from_[at(to.peer)];
  ++next_;
  if (post.untaken == 0 || post.withdrawn) self_.state(to.peer).changed.notify_all();
}

// Writes what was buffered to its destination, before anything else is taken.
void Exchange::deliver_aside(Lock& lock) {
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

// Tells the others that this rank has nothing left to do until its sends are taken.
void Exchange::await_sends() {
  if (!all_received() || call_->awaited) return;
  call_->awaited = true;
  wake_those([](const Exchange& e) { return !e.direct() && !e.all_received(); });
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
    self_.state(self_.rank).changed.notify_all();  // another thread of this rank may wait for this call
  }
  return moved;
}

void Exchange::set_received() {
  mine_->received = true;
  // A sender of more than this rank receives can learn it now.
  wake_those([this](const Exchange& e) { return e.has_untaken_for(self_.rank); });
}

bool Exchange::advance_all(Lock& lock) {
  bool moved = false;
  std::vector<Exchange*>& in_flight = self_.state(self_.rank).in_flight;
  for (std::size_t i = 0; i < in_flight.size(); ++i) moved |= in_flight[i]->advance(lock);
  return moved;
}

void Exchange::end() {
  ended_ = true;
  std::vector<Exchange*>& in_flight = self_.state(self_.rank).in_flight;
  in_flight.erase(std::find(in_flight.begin(), in_flight.end(), this));
}

bool Exchange::agrees() const {
  if (!mine_->sign.given()) return true;
  return std::all_of(call_->posts.begin(), call_->posts.end(), [&](const std::shared_ptr<Post>& post) {
    return post == nullptr || !post->sign.given() || post->sign == mine_->sign;
  });
}

// Between this rank and those that have come to the call: all that it receives from have.
std::optional<std::string> Exchange::disagreement() const {
  if (!mine_->sign.given()) return std::nullopt;
  std::vector<detail::RankSign> known;
  {
    const Lock lock(self_.world->mutex);
    for (std::size_t peer = 0; peer < call_->posts.size(); ++peer) {
      const Post* post = call_->posts[peer].get();
      if (post != nullptr && post != mine_.get() && post->sign.given())
        known.emplace_back(static_cast<Index>(peer), post->sign);
    }
  }
  return detail::disagreement(self_.rank, mine_->sign, known);
}

void Exchange::wait() {
  try {
    Lock lock(self_.world->mutex);
    wait_for_all(lock);
    if (agrees()) return;
  } catch (const Error& e) {  // sizes that do not fit, or a rank that has left, are only the consequence
    auto found = disagreement();
    if (!found && mine_->sign.given())
      found = detail::disagreement_in_pass(self_.rank, mine_->sign, self_.shown_signs());
    if (found) throw detail::disagreement_error(*found, e.problem());
    throw;
  }
  if (const auto found = disagreement()) throw detail::disagreement_error(*found);
}

void Exchange::wait_for_all(Lock& lock) {
  self_.state(self_.rank).changed.wait(lock, [&] { return !busy_; });
  waiting_ = true;
  deliver_aside(lock);
  Time deadline = Clock::now() + self_.world->time_limit;
  while (!complete()) {
    if (advance_all(lock)) {
      deadline = Clock::now() + self_.world->time_limit;
    } else {
      await_sends();
      self_.state(self_.rank).changed.wait_until(lock, check(deadline));
    }
  }
  end();
  wait_for_link(lock);
}

// Models a link: calls share it one at a time, each from when all its senders and this rank have posted.
void Exchange::wait_for_link(Lock& lock) {
  const World& world = *self_.world;
  if (!from_others_ || (world.how.bandwidth == 0 && world.how.latency == 0)) return;
  World::Rank& state = self_.state(self_.rank);
  const double transfer = world.how.bandwidth == 0 ? 0 : static_cast<double>(bytes_) / world.how.bandwidth;
  const Time arrival = std::max(posted_, state.link_free) + seconds(world.how.latency + transfer);
  if (arrival - Clock::now() > world.time_limit)
    throw Error(text("call ", number_, ": ", self_.name(self_.rank), " receives ", bytes_, " bytes over a link of ",
                     world.how.bandwidth, " bytes per second and ", world.how.latency,
                     " seconds a call, which takes longer than the time limit of ", world.how.time_limit, " seconds"),
                "give a faster link, or a longer time limit");
  state.link_free = arrival;
  // Meanwhile other ranks may wait for this one to take what they sent.
  while (!world.failure && !world.how.stop.stop_requested() && Clock::now() < arrival) {
    if (!advance_all(lock)) state.changed.wait_until(lock, arrival);
  }
}

}  // namespace weft::threads
