// K and V that are made of a source: its rows move, and each step's K and V are expanded before they are attended.
#pragma once

#include <span>
#include <vector>

#include "run/executor_data.h"
#include "run/gradient_return.h"
#include "run/key_feed.h"
#include "run/step_list.h"
#include "run/workspace.h"
#include "weft/executor.h"
#include "weft/schedule.h"

namespace weft::run {

// What a schedule moves of a source, and which rows of each move are seen. Made once for an executor.
struct SourceMoves {
  explicit SourceMoves(const Schedule& attended);

  // Of one move's buffer.
  struct Rows {
    std::vector<Range> seen;
    std::vector<Index> tokens, positions;  // of the rows that are seen
    Index count = 0;                       // all slices lie before this row
    std::vector<Slice> slices;             // of the steps, where key rows are those that are seen
  };
  Schedule schedule;       // of the moves
  std::vector<Index> of;   // by step of the attended schedule: its move
  std::vector<Rows> rows;  // by move
};

// The source of one pass, or of one head group of a swap.
struct SourceCall {
  const Source& source;
  const SourceMoves& moves;
  StepList attended, steps;         // what is attended, and the moves for it
  ConstTensorView rows;             // of the source, that this rank has before the steps
  Index first_head = 0, heads = 0;  // K/V heads of the steps
  Index dim_qk = 0, dim_v = 0;
  Place place = {};

  Index move_of(Index n) const { return moves.of[at(attended.first() + n)] - steps.first(); }
  // K and V of step n, whose move brought `taken`: of the rows that are seen alone.
  ConstKv expand(Index n, const ConstTensorView& taken) const;
  // Views of all K and V before the steps. Only their shapes count: nothing reads them.
  ConstKv shapes() const;
  std::span<const Slice> slices(Index n) const { return seen(n).slices; }
  // Where the kernel writes their gradients, every element of them. One call makes all of a step's dK and dV, so
  // rounding them to the type of K and V loses no partial sums; the source's gradient is summed in f32.
  Kv gradients(Index n, Workspace& workspace) const;
  // What these are for the source is added to the rows of `sum`.
  void reduce(Index n, const ConstTensorView& taken, const Kv& gradients, const TensorView& sum) const;

 private:
  const SourceMoves::Rows& seen(Index n) const { return moves.rows[at(moves.of[at(attended.first() + n)])]; }
  SourceRows asked(Index n, const ConstTensorView& taken) const;
};

// The source in the place of K, and nothing in that of V.
template <class Void>
KvOf<BasicTensorView<Void>> as_keys(const BasicTensorView<Void>& source) {
  return {source, {.dtype = source.dtype, .rows = source.rows, .heads = source.heads, .dim = 0}};
}

// The same call with views of K and V as they will be made, which nothing reads, in the place of those left out. Error
// for a source that does not fit.
ExecutorForwardArgs with_keys(const Schedule& schedule, const ExecutorForwardArgs& args);
ExecutorBackwardArgs with_keys(const Schedule& schedule, const ExecutorBackwardArgs& args);

// Of a call whose schedule swaps no heads, and of a head group: what the swap has brought of the source.
template <class Args>
SourceCall source_of(const SourceMoves& moves, const Schedule& attended, const Args& args) {
  return {.source = *args.source,
          .moves = moves,
          .attended = attended,
          .steps = moves.schedule,
          .rows = args.source->rows,
          .heads = attended.heads_k,
          .dim_qk = args.q.dim,
          .dim_v = args.v.dim,
          .place = args.place};
}
template <class Args>
SourceCall source_of(const SourceMoves& moves, const Schedule& attended, const Args& args, Index n,
                     const ConstTensorView& rows) {
  SourceCall call = source_of(moves, attended, args);
  const Swap& swap = *attended.swap;
  const Range heads = swap.head_groups[at(n)].k[at(attended.rank - swap.group.begin)];
  call.attended = {attended, n};
  call.steps = {moves.schedule, n};
  call.rows = rows;
  call.first_head = heads.begin;
  call.heads = heads.size();
  return call;
}

// Brings the steps their K and V, or the rows of the source that they are expanded from.
class StepKeys {
 public:
  // `source`: null if K and V move as they are.
  StepKeys(const StepList& steps, Communicator& communicator, Workspace& workspace, const ConstKv& own,
           const SourceCall* source)
      : source_(source),
        feed_(source != nullptr ? source->steps : steps, communicator, workspace,
              source != nullptr ? as_keys(source->rows) : own) {}

  ConstKv take(Index n) {
    if (source_ == nullptr) return feed_.take(n);
    if (const Index move = source_->move_of(n); move != taken_) {
      rows_ = feed_.take(move);
      taken_ = move;
    }
    return rows_;
  }

 private:
  const SourceCall* source_;
  KeyFeed feed_;
  Index taken_ = -1;  // the move whose rows are at hand
  ConstKv rows_;
};

// Takes the dK and dV of the steps, and returns them, or what the source gets of them, to the owners of the rows.
class KeyGradients {
 public:
  // `own`: sums of the rank's own dK and dV, or of its dsource.
  KeyGradients(const StepList& steps, const Computed& computed, Communicator& communicator, Workspace& workspace,
               const Place& place, const Kv& own, bool deterministic, const SourceCall* source)
      : steps_(steps),
        computed_(computed),
        workspace_(workspace),
        place_(place),
        source_(source),
        home_(source != nullptr ? source->steps : steps, communicator, workspace, place, own, deterministic) {}

  // Where step n writes dK and dV, every element of them.
  StepGradients begin(Index n);
  // After step n, whose move brought `taken`.
  void reduce(Index n, const ConstKv& taken, const Kv& gradients) const {
    if (source_ != nullptr) source_->reduce(n, taken.k, gradients, sum_);
  }
  void end(Index n);
  void finish() { home_.finish(); }

 private:
  bool first_of_move(Index n) const { return n == 0 || source_->move_of(n - 1) != source_->move_of(n); }
  bool last_of_move(Index n) const { return n + 1 == steps_.size() || first_of_move(n + 1); }

  const StepList& steps_;
  const Computed& computed_;
  Workspace& workspace_;
  Place place_;
  const SourceCall* source_;
  GradientReturn home_;
  TensorView sum_;  // of dsource, for the rows of the move at hand
};

}  // namespace weft::run
