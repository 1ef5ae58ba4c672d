// The all-to-all that swaps heads for sequence, before and after the steps of a call. Of several head groups the next
// one is on its way in, and the last one on its way back, while one is computed.
#pragma once

#include <array>

#include "index.h"
#include "run/workspace.h"
#include "weft/communicator.h"
#include "weft/executor.h"
#include "weft/schedule.h"

namespace weft::run {

// What both passes share. Workspaces are as large as the largest head group needs, from the first one on, so that none
// grows while messages read it.
class HeadSwap {
 public:
  Index head_groups() const { return static_cast<Index>(swap_.head_groups.size()); }
  Range heads_q(Index n) const { return group(n).q[at(me_)]; }  // this rank's, of head group n

 protected:
  // What moves, which must have a swap, and what is attended: the same, but where K and V are made of a source.
  HeadSwap(const Schedule& moves, const Schedule& attended, Communicator& communicator, Workspace& workspace,
           const Place& place);
  ~HeadSwap() = default;
  HeadSwap(const HeadSwap&) = delete;
  HeadSwap& operator=(const HeadSwap&) = delete;

  struct Pair {
    ConstTensorView own, swapped;  // whichever is received is written
    std::vector<Range> heads;      // that move, by rank of the group
  };

  const HeadGroup& group(Index n) const { return swap_.head_groups[at(n)]; }
  Index heads_k(Index n) const { return group(n).k[at(me_)].size(); }
  bool brings_keys(Index n) const { return swap_.brings_keys(n, me_); }
  // The attention of the head group's heads; its head map lives until the next call.
  Attention attention(const Attention& all, Index n);
  TensorView buffer(Slot even, Index n, const ConstTensorView& own);
  // K and V of a head group, or their gradients.
  Kv keys(Slot slot, Index n, const ConstKv& own, DType dtype);
  Slot turn(Slot even, Index n) const { return by_turn(even, turns_[at(n)]); }
  Pair queries(Index n, const ConstTensorView& own, const ConstTensorView& swapped) const {
    return {own, swapped, group(n).q};
  }
  // K or V, as far as they move with the head group.
  Pair moved_keys(Index n, const ConstTensorView& own, ConstTensorView swapped, bool home) const;
  // The call of a head group, once it has arrived; the one after it is then on its way. Its buffers are free: the head
  // group before this one has been computed.
  template <class Pass>
  auto next(Pass& pass, Index n) {
    if (n == 0) pass.start(0);
    arrivals_[at(n % 2)].wait();
    if (n + 1 < head_groups()) pass.start(n + 1);
    auto swapped = pass.part(n);
    swapped.attention = attention(pass.args_.attention, n);
    return swapped;
  }
  Request to_swapped(Index n, const std::vector<Pair>& pairs);
  Request to_own(Index n, const std::vector<Pair>& pairs, Message::Combine combine);

  const Schedule& schedule_;
  const Swap& swap_;
  const Swap& attended_;  // with the K/V heads that are attended
  Communicator& communicator_;
  Workspace& workspace_;
  Place place_;
  std::array<Request, 2> arrivals_;  // of even and odd head groups
  Request leaving_;                  // results of the last head group

 private:
  std::vector<Message> of_own(const std::vector<Pair>& pairs, Message::Combine combine) const;
  std::vector<Message> of_swapped(const std::vector<Pair>& pairs) const;
  void label(Index n) const;  // of the next message: by the first step of the head group

  Index me_;                       // in the group of ranks
  Index most_q_ = 0, most_k_ = 0;  // heads of the largest head group
  std::vector<Index> turns_;       // of the buffers of K and V, by head group
  std::vector<Index> head_map_;    // of the head group at hand
};

class ForwardSwap : public HeadSwap {
 public:
  ForwardSwap(const Schedule& moves, const Schedule& attended, Communicator& communicator, Workspace& workspace,
              const ExecutorForwardArgs& args)
      : HeadSwap(moves, attended, communicator, workspace, args.place), args_(args) {}

  // The call with the rows of all members and this rank's heads of a head group, which must be the next one; its
  // outputs lie in the workspace.
  ExecutorForwardArgs bring(Index n) { return next(*this, n); }
  void give_back(Index n);
  void finish() { leaving_.wait(); }

 private:
  friend class HeadSwap;
  void start(Index n);
  ExecutorForwardArgs part(Index n);

  const ExecutorForwardArgs& args_;
};

class BackwardSwap : public HeadSwap {
 public:
  // `own`: sums of the rank's own dK and dV; all of them are written when finish() returns.
  BackwardSwap(const Schedule& moves, const Schedule& attended, Communicator& communicator, Workspace& workspace,
               const ExecutorBackwardArgs& args, const Kv& own)
      : HeadSwap(moves, attended, communicator, workspace, args.place), args_(args), own_(own) {}

  ExecutorBackwardArgs bring(Index n) { return next(*this, n); }
  void give_back(Index n);
  void finish() {
    leaving_.wait();
    home_.wait();
  }

 private:
  friend class HeadSwap;
  void start(Index n);
  ExecutorBackwardArgs part(Index n);
  Kv gradients(Index n);
  Kv more_gradients(Index n);  // of a head group that shares the keys of the one before

  const ExecutorBackwardArgs& args_;
  Kv own_;
  bool cleared_ = false;
  Request home_;  // dK and dV of the last keys
};

}  // namespace weft::run
