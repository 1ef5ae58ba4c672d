// Takes the f32 dK and dV of each step home to the ranks that own the keys: the moves of K and V, transposed.
#pragma once

#include <array>

#include "run/messages.h"
#include "run/rows.h"
#include "run/workspace.h"
#include "weft/communicator.h"
#include "weft/schedule.h"

namespace weft::run {

class GradientReturn {
 public:
  // `own`: f32 sums of the rank's own keys; every element is written by the end of finish().
  GradientReturn(const Schedule& schedule, Communicator& communicator, Workspace& workspace, const Place& place,
                 const Kv& own);

  // Where step n writes dK and dV: every element, unless `nothing` (no slices), which then means zeros.
  Kv begin(Index n, bool nothing);
  void end(Index n);
  void finish();

 private:
  const Step& step(Index n) const { return schedule_.steps[static_cast<std::size_t>(n)]; }
  bool travels(Index n) const;
  Kv buffer(Index n);

  const Schedule& schedule_;
  Communicator& communicator_;
  Workspace& workspace_;
  Place place_;
  Kv own_;
  std::array<Request, 2> under_way_;  // of even and odd steps
};

}  // namespace weft::run
