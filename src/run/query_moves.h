// Queries of other ranks on their way to the steps that attend them, and what comes of them on its way home
// (Schedule::query_moves): partial states, which the owner merges, or dQ, which it adds.
#pragma once

#include <vector>

#include "index.h"
#include "run/step_list.h"
#include "run/workspace.h"
#include "weft/communicator.h"
#include "weft/executor.h"
#include "weft/kernel.h"
#include "weft/schedule.h"

namespace weft::run {

PartialView rows_of(const PartialView& partial, Range rows);
// Merges partial states of the same rows into those of `to`.
void merge(const Place& place, const PartialView& to, const PartialView& from);

// What both passes share.
class QueryMoves {
 public:
  QueryMoves(const QueryMoves&) = delete;
  QueryMoves& operator=(const QueryMoves&) = delete;

  // Around KeyFeed::take() of a step: whichever is needed first is first on its way.
  void before_keys(Index n) {
    if (n == 0 && before_keys_) start();
  }
  void after_keys(Index n) {
    if (n == 0 && !before_keys_) start();
    if (steps_.about_others(n)) arrive(steps_[n].queries);
  }
  // After step n: what no later step adds to goes home.
  void end(Index n);

 protected:
  // `schedule` must have query moves.
  QueryMoves(const Schedule& schedule, Communicator& communicator, Workspace& workspace, const Place& place);
  ~QueryMoves() = default;

  // The same rows of a tensor of the rank's own, and those of other ranks in a buffer.
  struct Pair {
    ConstTensorView own;
    TensorView others;
  };
  // A buffer for the rows of others.
  Pair pair(const ConstTensorView& own, Slot slot) { return {own, buffer(slot, own, own.dtype, others_)}; }
  TensorView buffer(Slot slot, const ConstTensorView& like, DType dtype, Index rows);
  // The rows of a step: of the own tensor, or of the buffer.
  ConstTensorView at_step(const Pair& pair, Index n) const;
  Range among_others(Range rows) const { return {rows.begin - schedule_.q_rows, rows.end - schedule_.q_rows}; }
  Index rows_sent(std::size_t move) const;  // own rows that come back with it
  void finish_home(std::size_t move) { home_[move].wait(); }

  const Schedule& schedule_;
  StepList steps_;
  Communicator& communicator_;
  Workspace& workspace_;
  Place place_;
  std::vector<Pair> pairs_;  // that move, set by the derived class
  Index others_ = 0;         // rows of other ranks

 private:
  virtual void go_home(std::size_t move, std::vector<Message>& sends, std::vector<Message>& receives) = 0;
  void start();
  void arrive(Range rows);

  bool before_keys_ = false;
  std::vector<Index> last_;  // by move: the last step about its rows
  std::vector<Request> there_, home_;
};

class ForwardQueries final : public QueryMoves {
 public:
  // `states`: of all rows of the query buffer, empty.
  ForwardQueries(const Schedule& schedule, Communicator& communicator, Workspace& workspace,
                 const ExecutorForwardArgs& args, const PartialView& states);

  // The queries of a step and their states.
  ConstTensorView q(Index n) const { return at_step(pairs_[0], n); }
  PartialView states(Index n) const { return rows_of(states_, steps_[n].queries); }
  // Merges what comes home into the own states.
  PartialView finish();

 private:
  void go_home(std::size_t move, std::vector<Message>& sends, std::vector<Message>& receives) override;

  PartialView states_, arrived_;
};

class BackwardQueries final : public QueryMoves {
 public:
  BackwardQueries(const Schedule& schedule, Communicator& communicator, Workspace& workspace,
                  const ExecutorBackwardArgs& args);

  // Sets q, dout, out, lse and dq of a step's call.
  void set(KernelBackwardArgs& call, Index n);
  void computed(Index n);  // once the kernel has written that dq
  void finish();           // dq is complete

 private:
  void go_home(std::size_t move, std::vector<Message>& sends, std::vector<Message>& receives) override;
  TensorView sums_of(Range rows) const;
  // Those that a step is about: 0 the own, n those of move n - 1.
  std::vector<std::size_t> parts(Index n) const;
  Range rows_of_part(std::size_t part) const;
  void clear_unwritten(std::size_t part);

  TensorView dq_, own_sums_, other_sums_, step_;
  std::vector<bool> written_;  // by part
  bool adds_ = false;
};

}  // namespace weft::run
