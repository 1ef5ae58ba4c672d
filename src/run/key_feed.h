// Brings K and V to the steps of a schedule; the move of a step overlaps the compute of the step before.
#pragma once

#include <array>

#include "comm/flight.h"
#include "index.h"
#include "run/rows.h"
#include "run/step_list.h"
#include "run/workspace.h"
#include "weft/communicator.h"
#include "weft/schedule.h"

namespace weft::run {

// Of a move in two hops, the first is started two steps ahead: while a step is computed, the next one's second hop and
// the first hop of the one after it are in flight.
class KeyFeed {
 public:
  KeyFeed(const StepList& steps, Communicator& communicator, Workspace& workspace, const ConstKv& own)
      : steps_(steps), communicator_(communicator), workspace_(workspace), own_(own) {
    enter_nodes(0);
    start(0, false);
    enter_nodes(1);
  }

  // K and V of step n, which must be the next one; the next move, that of step n + 1 if it has one, is then in flight.
  ConstKv take(Index n) {
    start(n, true);  // if its rows have only entered the node so far
    if (steps_.source(n) >= 0) arrivals_[odd(n)].wait();
    // The first hop of step n + 1 had this step's second hop to hide under; without that it has this step's compute.
    start(steps_.next_move(n), steps_[n].move && steps_[n].move->relay);
    enter_nodes(n + 2);
    return kv_of(n);
  }

 private:
  std::size_t odd(Index n) const { return at(steps_.turn(n) % 2); }
  bool moves(Index n) const { return n < steps_.size() && steps_[n].move.has_value(); }

  ConstKv kv_of(Index n) const {
    return steps_.source(n) >= 0 ? constant(buffers_[odd(n)]) : heads_of(own_, steps_.heads_k(n));
  }

  // The first hop of step n. The relay buffer is free: the second hop of step n - 2 is over.
  void enter_nodes(Index n) {
    if (!moves(n) || !steps_[n].move->relay) return;
    const Range heads = steps_.heads_k(n);
    const Relay& relay = *steps_[n].move->relay;
    relays_[odd(n)] =
        take_kv(workspace_, by_turn(Slot::relay_0, steps_.turn(n)), shape_like(own_, relay.rows, heads.size()));
    detail::label_step(steps_.first() + n);
    entered_[odd(n)] = communicator_.exchange(messages(relay.sends, heads_of(own_, heads)),
                                              messages(relay.receives, constant(relays_[odd(n)])));
  }

  // Starts the move of step n unless that was done. The buffer is free: the steps of the last move but one have been
  // computed, and the rows that they sent on arrived with the last one. `relayed`: a second hop too, for which this
  // waits for the first.
  void start(Index n, bool relayed) {
    if (n < next_ || !moves(n)) return;
    const Range heads = steps_.heads_k(n);
    const Move& move = *steps_[n].move;
    if (move.relay && !relayed) return;
    next_ = n + 1;
    buffers_[odd(n)] =
        take_kv(workspace_, by_turn(Slot::keys_0, steps_.turn(n)), shape_like(own_, steps_[n].key_rows, heads.size()));
    const ConstKv from = move.kind == Move::Kind::shift ? kv_of(n - 1) : heads_of(own_, heads);
    std::vector<Message> sends = messages(move.sends, from);
    if (move.relay) {
      entered_[odd(n)].wait();
      for (Message& m : messages(move.relay->passes, constant(relays_[odd(n)]))) sends.push_back(std::move(m));
    }
    detail::label_step(steps_.first() + n);
    std::vector<Message> receives = messages(move.receives, constant(buffers_[odd(n)]));
    arrivals_[odd(n)] = move.collective ? communicator_.all_gather(std::move(sends), std::move(receives))
                                        : communicator_.exchange(std::move(sends), std::move(receives));
  }

  StepList steps_;
  Communicator& communicator_;
  Workspace& workspace_;
  ConstKv own_;
  Index next_ = 0;  // the first step whose move has not been started
  std::array<Kv, 2> buffers_, relays_;
  std::array<Request, 2> arrivals_, entered_;
};

}  // namespace weft::run
