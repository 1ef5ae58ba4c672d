// Takes the dK and dV of each step, in f32 or of f64 inputs in f64, home to the ranks that own the keys: the moves of K
// and V, transposed.
#pragma once

#include <array>

#include "index.h"
#include "run/messages.h"
#include "run/rows.h"
#include "run/workspace.h"
#include "weft/communicator.h"
#include "weft/schedule.h"

namespace weft::run {

class GradientReturn {
 public:
  // `own`: sums of the rank's own keys; every element is written by the end of finish(), and none before the
  // first step's end() if keys_share(schedule).
  GradientReturn(const Schedule& schedule, Communicator& communicator, Workspace& workspace, const Place& place,
                 const Kv& own);

  // Where step n writes dK and dV: every element, unless `nothing` (no slices), which then means zeros.
  Kv begin(Index n, bool nothing);
  void end(Index n);
  void finish();

 private:
  const Step& step(Index n) const { return schedule_.steps[at(n)]; }
  bool shifts(Index n) const;  // gradients travel on with their keys
  bool alone(Index n) const;
  bool whole() const;
  void clear_once();
  Kv buffer(Index n);

  const Schedule& schedule_;
  Communicator& communicator_;
  Workspace& workspace_;
  Place place_;
  Kv own_;
  bool adds_ = true;                  // what comes is added to own_, the first of it too
  bool clear_ = false;                // .. which is not zeros yet
  std::array<Request, 2> under_way_;  // of even and odd steps
};

// Do the own sums lie where the step's keys lay? They are in use one after the other if there is one step.
inline bool keys_share(const Schedule& schedule) {
  return schedule.steps.size() == 1 && schedule.steps.front().move && !schedule.swap;
}

}  // namespace weft::run
