// The all-to-all that swaps heads for sequence, before and after the steps of a call.
#pragma once

#include "index.h"
#include "run/workspace.h"
#include "weft/communicator.h"
#include "weft/executor.h"
#include "weft/schedule.h"

namespace weft::run {

class HeadSwap {
 public:
  // `schedule` must have a swap.
  HeadSwap(const Schedule& schedule, Communicator& communicator, Workspace& workspace)
      : schedule_(schedule), swap_(*schedule.swap), communicator_(communicator), workspace_(workspace) {}

  // The call with the rows of all members and this rank's heads; its outputs lie in the workspace.
  ExecutorForwardArgs bring(const ExecutorForwardArgs& args);
  void give_back(const ExecutorForwardArgs& swapped, const ExecutorForwardArgs& args);

  ExecutorBackwardArgs bring(const ExecutorBackwardArgs& args);
  // `own`: sums of the rank's own dK and dV; all of them are written.
  void give_back(const ExecutorBackwardArgs& swapped, const ExecutorBackwardArgs& args, const Kv& own);

  Range heads_q() const { return swap_.heads_q[me()]; }

 private:
  struct Pair {
    ConstTensorView own, swapped;  // whichever is received is written
    const std::vector<Range>* heads;
  };

  std::size_t me() const { return at(schedule_.rank - swap_.group.begin); }
  Attention attention(const Attention& all) const;
  KvShape shape(const ConstKv& own) const {
    return shape_like(own, own.k.rows * swap_.group.size(), swap_.heads_k[me()].size());
  }
  TensorView buffer(Slot slot, const ConstTensorView& own, const std::vector<Range>& heads);
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
