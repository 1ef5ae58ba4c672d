#include "run/gradient_return.h"

#include "comm/flight.h"
#include "index.h"
#include "schedule/build.h"

namespace weft::run {

std::size_t GradientReturn::odd(Index n) const { return at(steps_.turn(n) % 2); }

GradientReturn::GradientReturn(const StepList& steps, Communicator& communicator, Workspace& workspace,
                               const Place& place, const Kv& own, bool deterministic)
    : steps_(steps),
      communicator_(communicator),
      workspace_(workspace),
      place_(place),
      own_(own),
      deterministic_(deterministic),
      written_(steps.size() > 0 && !steps[0].move) {
  // A first step on the own keys, or messages that replace, write every own row; otherwise own_ is cleared and added
  // to.
  adds_ = written_ || !whole();
  clear_ = !written_ && adds_;
}

// Whether no other step returns gradients to the own rows of this step's heads.
bool GradientReturn::alone(Index n) const {
  for (Index m = 0; m < steps_.size(); ++m) {
    const Range a = steps_.heads_k(m), b = steps_.heads_k(n);
    if (m != n && step(m).move && a.begin < b.end && b.begin < a.end) return false;
  }
  return true;
}

// Whether the first messages of all steps together have all own rows of all heads.
bool GradientReturn::whole() const {
  Index heads = 0;
  for (Index n = 0; n < steps_.size(); ++n) {
    if (!step(n).move || step(n).move->sends.empty() || !alone(n)) return false;
    Index rows = 0;
    for (const Range& r : step(n).move->sends.front().rows) rows += r.size();
    if (rows != own_.k.rows) return false;
    heads += this->heads(n);
  }
  return heads == own_.k.heads;
}

void GradientReturn::clear_once() {
  if (!clear_) return;
  clear(place_, own_.k);
  clear(place_, own_.v);
  clear_ = false;
}

bool GradientReturn::shifts(Index n) const { return step(n).move && step(n).move->kind == Move::Kind::shift; }

Kv GradientReturn::buffer(Index n) {
  return take_kv(workspace_, by_turn(Slot::key_gradients_0, steps_.turn(n)),
                 shape_like(own_, step(n).key_rows, heads(n)));
}

Kv GradientReturn::relay_buffer(Index n) {
  return take_kv(workspace_, by_turn(Slot::relay_gradients_0, steps_.turn(n)),
                 shape_like(own_, step(n).move->relay->rows, heads(n)));
}

// What the node has summed of step n goes home.
void GradientReturn::leave_node(Index n) {
  if (!relays(n)) return;
  in_flight_[odd(n)].wait();
  const Relay& relay = *step(n).move->relay;
  std::vector<Message> home = messages(relay.sends, constant(own_heads(n)), adding(own_.k.dtype));
  if (alone(n)) home = at_once(std::move(home), false);
  detail::label_step(steps_.first() + n);
  leaving_[odd(n)] = communicator_.exchange(messages(relay.receives, constant(relay_buffer(n))), std::move(home));
}

StepGradients GradientReturn::begin(Index n, bool nothing) {
  const Index source = steps_.source(n);
  if (source >= 0 && source < n) return {buffer(source), true};  // an earlier step has written it
  if (source < 0 && n > 0) return {own_heads(n), true};          // step 0 has
  // Of the last move but one: its buffer is used again.
  in_flight_[odd(n)].wait();
  const Kv to = source >= 0 ? buffer(n) : own_heads(n);
  // Sums of the last step go to the next rank while this one computes; those that arrive are added in end(). Sums of
  // the own keys stay here.
  if (shifts(n) && shifts(n - 1)) {
    const Message::Combine combine = nothing ? Message::Combine::replace : adding(own_.k.dtype);
    detail::label_step(steps_.first() + n);
    in_flight_[odd(n)] = communicator_.exchange(messages(step(n).move->sends, constant(buffer(n - 1))),
                                                messages(step(n).move->receives, constant(to), combine));
  } else if (nothing) {
    clear(place_, to.k);
    clear(place_, to.v);
  }
  return {to, false};
}

void GradientReturn::end(Index n) {
  leave_node(n - 1);
  if (!steps_.ends_keys(n)) return;
  n = steps_.source(n);
  if (n < 0) return;
  const Move& move = *step(n).move;
  if (shifts(n)) {
    in_flight_[odd(n)].wait();
    if (move.home.empty()) return;
    in_flight_[odd(n - 1)].wait();  // in order, so that sums are deterministic
    const ConstKv own = constant(own_heads(n));
    detail::label_step(steps_.first() + n);
    in_flight_[odd(n)] = communicator_.exchange(messages(move.home, constant(buffer(n))),
                                                at_once(messages(move.back, own, adding(own_.k.dtype)), false));
    return;
  }
  clear_once();
  std::vector<Message> home = messages(move.sends, constant(own_heads(n)), adding(own_.k.dtype));
  if (alone(n)) home = at_once(std::move(home), !adds_);
  if (relays(n)) {
    leaving_[odd(n)].wait();  // of the last move but one: its buffer is used again
    const Kv sums = relay_buffer(n);
    const Relay& relay = *move.relay;
    std::vector<Message> passed = at_once(messages(relay.passes, constant(sums), adding(own_.k.dtype)), true);
    // The first message has all rows, or they are cleared.
    if (passed.empty() || schedule::rows_in(relay.passes.front().rows) != relay.rows) {
      clear(place_, sums.k);
      clear(place_, sums.v);
      for (Message& m : passed) m.combine = adding(own_.k.dtype);
    }
    for (Message& m : passed) home.push_back(std::move(m));
  }
  detail::label_step(steps_.first() + n);
  std::vector<Message> away = messages(move.receives, constant(buffer(n)));
  const bool collective = move.collective && alone(n) && !written_ && !deterministic_;
  if (collective) home = at_once(std::move(home), true);
  in_flight_[odd(n)] = collective ? communicator_.reduce_scatter(std::move(away), std::move(home))
                                  : communicator_.exchange(std::move(away), std::move(home));
}

void GradientReturn::finish() {
  clear_once();  // if there was no step
  const Index steps = steps_.size();
  if (steps == 0) return;
  // In the order in which they were started, so that sums are deterministic.
  const std::size_t last = odd(steps - 1), before = 1 - last;
  in_flight_[before].wait();
  in_flight_[last].wait();
  leave_node(steps - 1);
  leaving_[before].wait();
  leaving_[last].wait();
}

}  // namespace weft::run
