// Brings K and V to the steps of a schedule; the move of a step overlaps the compute of the step before.
#pragma once

#include <array>

#include "index.h"
#include "run/rows.h"
#include "run/workspace.h"
#include "weft/communicator.h"
#include "weft/schedule.h"

namespace weft::run {

class KeyFeed {
 public:
  KeyFeed(const Schedule& schedule, Communicator& communicator, Workspace& workspace, const ConstKv& own)
      : schedule_(schedule), communicator_(communicator), workspace_(workspace), own_(own) {
    start(0);
  }

  // K and V of step n, which must be the next one; the move of step n + 1 is then in flight.
  ConstKv take(Index n) {
    arrivals_[odd(n)].wait();
    start(n + 1);
    return kv_of(n);
  }

 private:
  static std::size_t odd(Index n) { return at(n % 2); }

  ConstKv kv_of(Index n) const {
    const Step& step = schedule_.steps[at(n)];
    return step.move ? constant(buffers_[odd(n)]) : heads_of(own_, step.heads_k);
  }

  // The buffer is free: step n - 2 has been computed, and the rows that it sent on arrived with step n - 1.
  void start(Index n) {
    if (n >= static_cast<Index>(schedule_.steps.size())) return;
    const Step& step = schedule_.steps[at(n)];
    if (!step.move) return;
    buffers_[odd(n)] = take_kv(workspace_, n % 2 == 0 ? Slot::keys_0 : Slot::keys_1,
                               shape_like(own_, step.key_rows, step.heads_k.size()));
    const ConstKv from = step.move->kind == Move::Kind::shift ? kv_of(n - 1) : heads_of(own_, step.heads_k);
    arrivals_[odd(n)] = communicator_.exchange(messages(step.move->sends, from),
                                               messages(step.move->receives, constant(buffers_[odd(n)])));
  }

  const Schedule& schedule_;
  Communicator& communicator_;
  Workspace& workspace_;
  ConstKv own_;
  std::array<Kv, 2> buffers_;
  std::array<Request, 2> arrivals_;
};

}  // namespace weft::run
