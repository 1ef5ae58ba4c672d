#include "run/query_moves.h"

#include <algorithm>

#include "comm/flight.h"
#include "device/device.h"
#include "kernel/each_row.h"
#include "run/rows.h"
#include "schedule/build.h"

namespace weft::run {
namespace {

template <class Void>
BasicTensorView<Void> some_rows(BasicTensorView<Void> view, Range rows) {
  view.data = detail::advanced(view.data, view.dtype, rows.begin * view.row_stride);
  view.rows = rows.size();
  return view;
}

// States as a tensor, so that they move as one.
TensorView as_tensor(const PartialView& p) {
  void* data = p.states != nullptr ? static_cast<void*>(p.states) : static_cast<void*>(p.states_f64);
  return thd(data, p.sums.dtype, p.sums.rows, p.sums.heads, 2);  // max, sum
}

template <class T>
void merge_rows(const TensorView& to, RowState<T>* states, const TensorView& from, const RowState<T>* more) {
  each_row(to, [&](Index row) {
    for (Index h = 0; h < to.heads; ++h) {
      const Index n = row * to.heads + h;
      merge_row(states[n], to.at<T>(row, h), more[n], from.at<T>(row, h), to.dim);
    }
  });
}

Message message(Index peer, Message::Combine combine = Message::Combine::replace) {
  return {.peer = peer, .blocks = {}, .combine = combine};
}

}  // namespace

PartialView rows_of(const PartialView& partial, Range rows) {
  PartialView part = partial;
  part.sums = some_rows(partial.sums, rows);
  if (part.states != nullptr) part.states += rows.begin * partial.sums.heads;
  if (part.states_f64 != nullptr) part.states_f64 += rows.begin * partial.sums.heads;
  return part;
}

void merge(const Place& place, const PartialView& to, const PartialView& from) {
  if (place.kind != DeviceKind::cpu) return device::merge(place, to.sums, to.states, from.sums, from.states);
  if (to.states_f64 != nullptr)
    merge_rows(to.sums, to.states_f64, from.sums, from.states_f64);
  else
    merge_rows(to.sums, to.states, from.sums, from.states);
}

QueryMoves::QueryMoves(const Schedule& schedule, Communicator& communicator, Workspace& workspace, const Place& place)
    : schedule_(schedule),
      steps_(schedule),
      communicator_(communicator),
      workspace_(workspace),
      place_(place),
      others_(schedule.query_rows() - schedule.q_rows),
      last_(schedule.query_moves.size(), -1),
      there_(schedule.query_moves.size()),
      home_(schedule.query_moves.size()) {
  Index first = steps_.size();
  for (Index n = steps_.size() - 1; n >= 0; --n) {
    if (!steps_.about_others(n)) continue;
    first = n;
    for (std::size_t m = 0; m < last_.size(); ++m)
      for (const PeerRows& p : schedule.query_moves[m].receives)
        for (const Range& r : p.rows)
          if (r.begin < steps_[n].queries.end && steps_[n].queries.begin < r.end) last_[m] = max_of(last_[m], n);
  }
  before_keys_ = first < steps_.next_move(-1);
}

TensorView QueryMoves::buffer(Slot slot, const ConstTensorView& like, DType dtype, Index rows) {
  constexpr Index kNeverNull = 64;
  const Index bytes = checked_product("a workspace of queries", {rows, like.heads, like.dim, size_of(dtype)});
  return thd(workspace_.bytes(slot, bytes + kNeverNull), dtype, rows, like.heads, like.dim);
}

ConstTensorView QueryMoves::at_step(const Pair& pair, Index n) const {
  if (!steps_.about_others(n)) return pair.own;
  return some_rows(ConstTensorView(pair.others), among_others(steps_[n].queries));
}

Index QueryMoves::rows_sent(std::size_t move) const {
  Index rows = 0;
  for (const PeerRows& p : schedule_.query_moves[move].sends) rows += schedule::rows_in(p.rows);
  return rows;
}

void QueryMoves::start() {
  detail::label_step(0);
  for (std::size_t m = 0; m < there_.size(); ++m) {
    std::vector<Message> sends, receives;
    for (const PeerRows& p : schedule_.query_moves[m].sends) {
      sends.push_back(message(p.peer));
      for (const Pair& pair : pairs_)
        for (const Range& rows : p.rows) append_blocks(pair.own, rows, sends.back().blocks);
    }
    for (const PeerRows& p : schedule_.query_moves[m].receives) {
      receives.push_back(message(p.peer));
      for (const Pair& pair : pairs_)
        for (const Range& rows : p.rows) append_blocks(pair.others, among_others(rows), receives.back().blocks);
    }
    there_[m] = communicator_.exchange(std::move(sends), std::move(receives));
  }
}

void QueryMoves::arrive(Range rows) {
  for (std::size_t m = 0; m < there_.size(); ++m)
    for (const PeerRows& p : schedule_.query_moves[m].receives)
      for (const Range& r : p.rows)
        if (r.begin < rows.end && rows.begin < r.end) there_[m].wait();
}

void QueryMoves::end(Index n) {
  for (std::size_t m = 0; m < last_.size(); ++m) {
    if (last_[m] != n) continue;
    std::vector<Message> sends, receives;
    go_home(m, sends, receives);
    detail::label_step(n);
    home_[m] = communicator_.exchange(std::move(sends), std::move(receives));
  }
}

ForwardQueries::ForwardQueries(const Schedule& schedule, Communicator& communicator, Workspace& workspace,
                               const ExecutorForwardArgs& args, const PartialView& states)
    : QueryMoves(schedule, communicator, workspace, args.place), states_(states), arrived_(states) {
  pairs_ = {pair(args.q, Slot::other_q)};
  Index rows = 0;
  for (std::size_t m = 0; m < schedule.query_moves.size(); ++m) rows += rows_sent(m);
  const TensorView as_states = as_tensor(states);
  arrived_.sums = buffer(Slot::arrived_sums, states.sums, states.sums.dtype, rows);
  const TensorView room = buffer(Slot::arrived_states, as_states, as_states.dtype, rows);
  if (states.states != nullptr) arrived_.states = static_cast<RowState<float>*>(room.data);
  if (states.states_f64 != nullptr) arrived_.states_f64 = static_cast<RowState<double>*>(room.data);
}

void ForwardQueries::go_home(std::size_t move, std::vector<Message>& sends, std::vector<Message>& receives) {
  for (const PeerRows& p : schedule_.query_moves[move].receives) {
    sends.push_back(message(p.peer));
    for (const TensorView& view : {states_.sums, as_tensor(states_)})
      for (const Range& rows : p.rows) append_blocks(view, rows, sends.back().blocks);
  }
  Index first = 0;
  for (std::size_t m = 0; m < move; ++m) first += rows_sent(m);
  for (const PeerRows& p : schedule_.query_moves[move].sends) {
    const Range rows{first, first + schedule::rows_in(p.rows)};
    receives.push_back(message(p.peer));
    for (const TensorView& view : {arrived_.sums, as_tensor(arrived_)})
      append_blocks(view, rows, receives.back().blocks);
    first = rows.end;
  }
}

PartialView ForwardQueries::finish() {
  Index first = 0;
  for (std::size_t m = 0; m < schedule_.query_moves.size(); ++m) {
    finish_home(m);
    for (const PeerRows& p : schedule_.query_moves[m].sends) {
      for (const Range& rows : p.rows) {
        merge(place_, rows_of(states_, rows), rows_of(arrived_, {first, first + rows.size()}));
        first += rows.size();
      }
    }
  }
  return rows_of(states_, {0, schedule_.q_rows});
}

BackwardQueries::BackwardQueries(const Schedule& schedule, Communicator& communicator, Workspace& workspace,
                                 const ExecutorBackwardArgs& args)
    : QueryMoves(schedule, communicator, workspace, args.place),
      dq_(args.dq),
      own_sums_(args.dq),
      written_(1 + schedule.query_moves.size(), false) {
  pairs_ = {pair(args.q, Slot::other_q), pair(args.dout, Slot::other_dout), pair(args.out, Slot::other_out),
            pair(args.lse, Slot::other_lse)};
  const DType type = sum_type(args.q.dtype);
  if (args.dq.dtype != type) own_sums_ = buffer(Slot::sums, args.q, type, args.q.rows);
  other_sums_ = buffer(Slot::other_dq, args.q, type, others_);
}

TensorView BackwardQueries::sums_of(Range rows) const {
  return rows.begin < schedule_.q_rows ? own_sums_ : some_rows(other_sums_, among_others(rows));
}

Range BackwardQueries::rows_of_part(std::size_t part) const {
  if (part == 0) return {0, schedule_.q_rows};
  const std::vector<PeerRows>& from = schedule_.query_moves[part - 1].receives;
  return {from.front().rows.front().begin, from.back().rows.back().end};
}

std::vector<std::size_t> BackwardQueries::parts(Index n) const {
  if (!steps_.about_others(n)) return {0};
  std::vector<std::size_t> all;
  for (std::size_t part = 1; part < written_.size(); ++part) {
    const Range rows = rows_of_part(part), step = steps_[n].queries;
    if (rows.begin < step.end && step.begin < rows.end) all.push_back(part);
  }
  return all;
}

void BackwardQueries::clear_unwritten(std::size_t part) {
  if (!written_[part]) clear(place_, sums_of(rows_of_part(part)));
  written_[part] = true;
}

void BackwardQueries::set(KernelBackwardArgs& call, Index n) {
  call.q = at_step(pairs_[0], n);
  call.dout = at_step(pairs_[1], n);
  call.out = at_step(pairs_[2], n);
  call.lse = at_step(pairs_[3], n);
  const std::vector<std::size_t> mine = parts(n);
  adds_ = std::any_of(mine.begin(), mine.end(), [&](std::size_t part) { return written_[part]; });
  for (const std::size_t part : mine) {
    if (adds_) clear_unwritten(part);
    written_[part] = true;
  }
  step_ = adds_ ? buffer(Slot::step_dq, call.q, own_sums_.dtype, call.q.rows) : sums_of(steps_[n].queries);
  call.dq = step_;
}

void BackwardQueries::computed(Index n) {
  if (adds_) add(place_, sums_of(steps_[n].queries), step_);
}

void BackwardQueries::go_home(std::size_t move, std::vector<Message>& sends, std::vector<Message>& receives) {
  clear_unwritten(move + 1);
  for (const PeerRows& p : schedule_.query_moves[move].receives) {
    sends.push_back(message(p.peer));
    for (const Range& rows : p.rows) append_blocks(other_sums_, among_others(rows), sends.back().blocks);
  }
  for (const PeerRows& p : schedule_.query_moves[move].sends) {
    receives.push_back(message(p.peer, adding(own_sums_.dtype)));
    for (const Range& rows : p.rows) append_blocks(own_sums_, rows, receives.back().blocks);
  }
}

void BackwardQueries::finish() {
  clear_unwritten(0);
  for (std::size_t m = 0; m < schedule_.query_moves.size(); ++m) finish_home(m);
  if (own_sums_.data != dq_.data) round_to(place_, dq_, own_sums_);
}

}  // namespace weft::run
