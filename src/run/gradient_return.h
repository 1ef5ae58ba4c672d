// Returns the dK and dV of each step, in f32 or, of f64 inputs, in f64, to the ranks that own the keys: the moves of K
// and V transposed, all-gather to reduce-scatter and send to return-and-add. Those that came in two hops are added up
// inside the node first; the hop that leaves it is started when the next step ends.
#pragma once

#include <array>

#include "index.h"
#include "run/rows.h"
#include "run/step_list.h"
#include "run/workspace.h"
#include "weft/communicator.h"
#include "weft/schedule.h"

namespace weft::run {

// dK and dV of a step: every element is written, or they are added to.
struct StepGradients {
  Kv to;
  bool add = false;
};

class GradientReturn {
 public:
  // `own`: sums of the rank's own keys. Every element is written when finish() returns, and none before the first
  // step's end() if keys_share(schedule).
  GradientReturn(const StepList& steps, Communicator& communicator, Workspace& workspace, const Place& place,
                 const Kv& own, bool deterministic);

  // Where step n writes dK and dV, or adds to what is there. `nothing`: the step has no slices, and they are zeros.
  StepGradients begin(Index n, bool nothing);
  void end(Index n);
  void finish();

 private:
  const Step& step(Index n) const { return steps_[n]; }
  std::size_t odd(Index n) const;  // of the two buffers and requests, those of step n
  Index heads(Index n) const { return steps_.heads_k(n).size(); }
  Kv own_heads(Index n) const { return heads_of(own_, steps_.heads_k(n)); }
  bool shifts(Index n) const;  // a ring step: gradients travel on with their keys
  bool alone(Index n) const;
  bool whole() const;
  void clear_once();
  Kv buffer(Index n);
  bool relays(Index n) const { return n >= 0 && step(n).move && step(n).move->relay; }
  Kv relay_buffer(Index n);
  void leave_node(Index n);

  StepList steps_;
  Communicator& communicator_;
  Workspace& workspace_;
  Place place_;
  Kv own_;
  bool deterministic_;                // sums over ranks are made in the order of ranks
  bool written_;                      // the first step writes own_
  bool adds_ = true;                  // the first message too is added to own_, which must be zeros or a step's sums
  bool clear_ = false;                // own_ must still be cleared
  std::array<Request, 2> in_flight_;  // by turns
  std::array<Request, 2> leaving_;    // their second hop: from the node to the owners
};

// Whether the own sums reuse the memory of the step's keys: with one step, the keys are done before sums arrive.
inline bool keys_share(const Schedule& schedule) {
  return schedule.steps.size() == 1 && schedule.steps.front().move && !schedule.swap;
}

}  // namespace weft::run
