// One call of one rank, from its post to the end of its wait.
#pragma once

#include <optional>
#include <vector>

#include "comm/threads/world.h"

namespace weft::threads {

class Exchange final : public Request::Pending {
 public:
  // `sign`: the fingerprint of the pass if one travels with this call, which then compares it with those of the others.
  Exchange(Member self, Index number, std::vector<Message> sends, std::vector<Message> receives,
           const detail::CallSign& sign = {});
  ~Exchange() override;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  void wait() override;
  // Takes what has been posted for this call, in the order of its receives. Returns false if there was nothing to take.
  bool advance(Lock& lock);

 private:
  void wait_for_all(Lock& lock);
  bool agrees() const;  // with the lock held: with all that have come
  std::optional<std::string> disagreement() const;
  bool all_received() const { return next_ == receives_.size(); }
  // Whether a receive is written to its destination; if not, it is buffered.
  bool direct() const { return waiting_ || !adds_; }
  bool complete() const { return all_received() && !busy_ && mine_->untaken == 0; }
  Post* post_of(Index peer) const { return call_->posts[at(peer)].get(); }
  template <class F>
  void wake_those(const F& of) const;
  bool is_next(Index peer) const;
  bool has_untaken_for(Index peer) const;
  std::optional<std::size_t> next_source() const;
  bool can_take(const Post& post, std::size_t send) const;
  void take(Lock& lock, Post& post, std::size_t send);
  void deliver_aside(Lock& lock);
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

  Member self_;
  Index number_;
  std::shared_ptr<Call> call_;
  std::shared_ptr<Post> mine_;
  std::vector<Message> receives_;
  std::size_t next_ = 0;                   // the first receive that is still to come
  std::vector<std::size_t> seen_;          // how many sends of each peer were looked at
  std::vector<Index> taken_from_;          // how many messages were taken of each peer
  bool adds_;                              // whether some receive adds
  bool waiting_ = false;                   // this rank is in wait() of this call
  std::vector<std::vector<float>> aside_;  // buffers of the first receives, in order, until wait() adds them
  bool busy_ = false;                      // some thread of this rank is copying
  bool ended_ = false;
  Time posted_;      // when this rank and all peers that it received from had posted
  Index bytes_ = 0;  // received from other ranks
  bool from_others_ = false;
};

}  // namespace weft::threads
