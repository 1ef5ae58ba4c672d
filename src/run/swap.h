// Heads for sequence, and back: a call as its steps see it.
#pragma once

#include "index.h"
#include "run/workspace.h"
#include "weft/attention.h"
#include "weft/communicator.h"
#include "weft/schedule.h"

namespace weft::run {

class HeadSwap {
 public:
  // The schedule has a swap.
  HeadSwap(const Schedule& schedule, Communicator& communicator, Workspace& workspace)
      : schedule_(schedule), swap_(*schedule.swap), communicator_(communicator), workspace_(workspace) {}

  // All members' rows of this rank's heads; outputs are workspaces.
  ForwardArgs bring(const ForwardArgs& args);
  void give_back(const ForwardArgs& swapped, const ForwardArgs& args);

  BackwardArgs bring(const BackwardArgs& args);
  // `own`: sums of the rank's own dK and dV; all of them are written.
  void give_back(const BackwardArgs& swapped, const BackwardArgs& args, const Kv& own);

  Range heads_q() const { return swap_.heads_q[me()]; }

 private:
  struct Pair {
    ConstTensorView own, swapped;  // whichever is received is written
    const std::vector<Range>* heads;
  };

  std::size_t me() const { return at(schedule_.rank - swap_.group.begin); }
  Attention attention(const Attention& all) const;
  ConstTensorView buffer(Slot slot, const ConstTensorView& own, const std::vector<Range>& heads);
  std::vector<Message> of_own(const std::vector<Pair>& pairs, Message::Combine combine) const;
  std::vector<Message> of_swapped(const std::vector<Pair>& pairs) const;
  void to_swapped(const std::vector<Pair>& pairs);
  void to_own(const std::vector<Pair>& pairs, Message::Combine combine);

  const Schedule& schedule_;
  const Swap& swap_;
  Communicator& communicator_;
  Workspace& workspace_;
};

}  // namespace weft::run
