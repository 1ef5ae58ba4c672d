// When a wait is in vain: messages that do not match, peers that gave up, left or failed, and time limits.
#include <algorithm>

#include "comm/threads/exchange.h"

namespace weft::threads {

// Throws if the next receive has no send that fits it, and never will have.
void Exchange::check_next() const {
  if (all_received()) return;
  const Message& to = receives_[next_];
  const Post* post = post_of(to.peer);
  if (post == nullptr || post->withdrawn) return;
  const std::string self = self_.name(self_.rank), peer = self_.name(to.peer);
  const std::optional<std::size_t> send = next_source();
  if (!send) {
    throw Error(text("call ", number_, ": ", self, " receives more messages from ", peer, " than the ",
                     taken_from_[at(to.peer)], " that it sends; the next one has ", to.size(), " bytes"),
                "let all ranks make the same calls in the same order, and both sides name the same messages");
  }
  const Message& from = post->sends[*send];
  if (from.size() != to.size()) {
    throw Error(text("call ", number_, ": ", peer, " sends ", from.size(), " bytes to ", self, ", which receives ",
                     to.size(), " (message ", taken_from_[at(to.peer)], " between them)"),
                "let both sides name as many bytes, and all ranks make the same calls in the same order");
  }
  if (!can_take(*post, *send)) {
    throw Error(
        text("call ", number_, ": ", self, " adds what ", peer, " sends from blocks that are not cut and aligned to ",
             number_size(to.combine) == 8 ? "f64" : "f32"),
        text("align the blocks that are sent, their sizes and their strides to ", number_size(to.combine), " bytes"));
  }
}

// Throws if a send is left over whose receiver takes nothing more.
void Exchange::check_unwanted() const {
  for (std::size_t send = 0; send < mine_->sends.size(); ++send) {
    const Message& message = mine_->sends[send];
    const Post* post = post_of(message.peer);
    if (mine_->taken[send] || post == nullptr || !post->received) continue;
    throw Error(text("call ", number_, ": ", self_.name(self_.rank), " sends ", message.size(), " bytes to ",
                     self_.name(message.peer), ", which does not receive them"),
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
  std::erase(peers, self_.rank);
  return peers;
}

// Throws if the peer gave up this call or left. `until` is lowered to when the reason should be known.
void Exchange::check_peer(Index peer, Time now, Time& until) const {
  const Post* post = post_of(peer);
  const bool left = self_.state(peer).left;
  if (post != nullptr && post->withdrawn) {
    if (!left && now < post->learn_until) {
      until = std::min(until, post->learn_until);
      return;
    }
    throw PeerError(text(self_.name(peer), " gave up call ", number_, " that ", self_.name(self_.rank), " waits in"),
                    "wait() for every request before it goes, or see why that rank ended", true);
  }
  if (left) {
    throw PeerError(
        text(self_.name(peer), " has left, and ", self_.name(self_.rank), " waits for it in call ", number_),
        "let all ranks make the same calls in the same order", true);
  }
}

// Throws if waiting is in vain; otherwise returns when to look again.
Time Exchange::check(Time deadline) const {
  check_next();
  check_unwanted();
  const World& world = *self_.world;
  if (world.failure) {
    throw PeerError(text("rank ", world.failure->rank, " failed: ", world.failure->what),
                    text("see to rank ", world.failure->rank, "; the others end because of it"), true);
  }
  if (world.how.stop.stop_requested())
    throw PeerError(text("the ranks were told to stop, and ", self_.name(self_.rank), " waits in call ", number_),
                    "run them again", true);
  const Time now = Clock::now();
  Time until = deadline;
  for (const Index peer : waited_for()) check_peer(peer, now, until);
  if (now >= deadline) give_up();
  return until;
}

void Exchange::give_up() const {
  std::vector<Index> peers = waited_for();
  // Ranks that have posted may themselves wait for one that has not: name that one.
  const auto started = std::partition(peers.begin(), peers.end(), [&](Index peer) { return post_of(peer) == nullptr; });
  if (started != peers.begin()) peers.erase(started, peers.end());
  std::string names;
  for (const Index peer : peers) names += text(names.empty() ? "" : ", ", self_.name(peer));
  throw PeerError(text(self_.name(self_.rank), " waited ", self_.world->how.time_limit, " seconds in call ", number_,
                       " for ", names),
                  "see what those ranks do, or raise ThreadRanks::time_limit");
}

}  // namespace weft::threads
