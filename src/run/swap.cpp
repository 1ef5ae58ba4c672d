#include "run/swap.h"

#include "comm/flight.h"
#include "index.h"
#include "run/rows.h"
#include "run/step_list.h"
#include "schedule/build.h"

namespace weft::run {

HeadSwap::HeadSwap(const Schedule& moves, const Schedule& attended, Communicator& communicator, Workspace& workspace,
                   const Place& place)
    : schedule_(moves),
      swap_(*moves.swap),
      attended_(*attended.swap),
      communicator_(communicator),
      workspace_(workspace),
      place_(place),
      me_(moves.rank - moves.swap->group.begin) {
  Index turn = 0;
  for (Index n = 0; n < head_groups(); ++n) {
    most_q_ = max_of(most_q_, heads_q(n).size());
    most_k_ = max_of(most_k_, heads_k(n));
    if (n > 0 && brings_keys(n)) ++turn;
    turns_.push_back(turn);
  }
}

Attention HeadSwap::attention(const Attention& all, Index n) {
  Attention mine = all;
  const auto me = at(me_);
  if (all.sink.kind == Sink::Kind::learnable) mine.sink.logits = some_heads(all.sink.logits, heads_q(n));
  head_map_.clear();
  for (Index h = heads_q(n).begin; h < heads_q(n).end; ++h)
    head_map_.push_back(attended_.head_map[at(h - attended_.heads_q[me].begin)] + attended_.heads_k[me].begin -
                        attended_.head_groups[at(n)].k[me].begin);
  mine.head_map = head_map_;
  return mine;
}

TensorView HeadSwap::buffer(Slot even, Index n, const ConstTensorView& own) {
  const Index rows = own.rows * swap_.group.size();
  constexpr Index kNeverNull = 64;
  const Index bytes = checked_product("a workspace of swapped heads", {rows, most_q_, own.dim, size_of(own.dtype)});
  void* data = workspace_.bytes(by_turn(even, n), bytes + kNeverNull);
  return thd(data, own.dtype, rows, heads_q(n).size(), own.dim);
}

Kv HeadSwap::keys(Slot slot, Index n, const ConstKv& own, DType dtype) {
  KvShape shape = shape_like(own, own.k.rows * swap_.group.size(), most_k_);
  shape.dtype = dtype;
  take_kv(workspace_, slot, shape);  // as large as it will ever be
  shape.heads = heads_k(n);
  return take_kv(workspace_, slot, shape);
}

HeadSwap::Pair HeadSwap::moved_keys(Index n, const ConstTensorView& own, ConstTensorView swapped, bool home) const {
  std::vector<Range> heads = group(n).k;
  for (Index i = 0; i < swap_.group.size(); ++i)
    if (!(home ? swap_.ends_keys(n, i) : swap_.brings_keys(n, i))) heads[at(i)] = {};
  if (heads[at(me_)].size() == 0) swapped.heads = 0;
  return {own, swapped, std::move(heads)};
}

// One message per member: this rank's rows of the member's heads, tensor by tensor.
std::vector<Message> HeadSwap::of_own(const std::vector<Pair>& pairs, Message::Combine combine) const {
  std::vector<Message> messages;
  for (Index i = 0; i < swap_.group.size(); ++i) {
    Message m{.peer = swap_.group.begin + i, .blocks = {}, .combine = combine};
    for (const Pair& p : pairs) {
      const Range heads = p.heads[at(i)];
      if (heads.size() > 0) append_blocks(some_heads(p.own, heads), {0, p.own.rows}, m.blocks);
    }
    messages.push_back(std::move(m));
  }
  return messages;
}

// One message per member: the member's rows of this rank's heads.
std::vector<Message> HeadSwap::of_swapped(const std::vector<Pair>& pairs) const {
  std::vector<Message> messages;
  for (Index i = 0; i < swap_.group.size(); ++i) {
    Message m{.peer = swap_.group.begin + i};
    for (const Pair& p : pairs)
      if (p.swapped.heads > 0) append_blocks(p.swapped, {i * p.own.rows, (i + 1) * p.own.rows}, m.blocks);
    messages.push_back(std::move(m));
  }
  return messages;
}

void HeadSwap::label(Index n) const { detail::label_step(StepList(schedule_, n).first()); }

Request HeadSwap::to_swapped(Index n, const std::vector<Pair>& pairs) {
  label(n);
  return communicator_.exchange(of_own(pairs, Message::Combine::replace), of_swapped(pairs));
}

Request HeadSwap::to_own(Index n, const std::vector<Pair>& pairs, Message::Combine combine) {
  label(n);
  std::vector<Message> home = of_own(pairs, combine);
  if (adds(combine)) home = at_once(std::move(home), false);
  return communicator_.exchange(of_swapped(pairs), std::move(home));
}

ExecutorForwardArgs ForwardSwap::part(Index n) {
  const Kv kv = keys(turn(Slot::swap_kv_0, n), n, {args_.k, args_.v}, args_.k.dtype);
  ExecutorForwardArgs swapped{.q = buffer(Slot::swap_q_0, n, args_.q),
                              .k = kv.k,
                              .v = kv.v,
                              .attention = args_.attention,
                              .out = buffer(Slot::swap_out_0, n, args_.out),
                              .keys_per_split = args_.keys_per_split,
                              .place = args_.place,
                              .device_plans = args_.device_plans};
  if (args_.lse.given()) swapped.lse = buffer(Slot::swap_lse_0, n, args_.lse);
  return swapped;
}

void ForwardSwap::start(Index n) {
  const ExecutorForwardArgs to = part(n);
  arrivals_[at(n % 2)] = to_swapped(
      n, {queries(n, args_.q, to.q), moved_keys(n, args_.k, to.k, false), moved_keys(n, args_.v, to.v, false)});
}

void ForwardSwap::give_back(Index n) {
  const ExecutorForwardArgs swapped = part(n);
  std::vector<Pair> pairs = {queries(n, args_.out, swapped.out)};
  if (args_.lse.given()) pairs.push_back(queries(n, args_.lse, swapped.lse));
  leaving_.wait();  // so that the buffers of the next head group are free
  leaving_ = to_own(n, pairs, Message::Combine::replace);
}

Kv BackwardSwap::gradients(Index n) {
  return keys(turn(Slot::swap_key_gradients_0, n), n, {args_.k, args_.v}, own_.k.dtype);
}

Kv BackwardSwap::more_gradients(Index n) {
  return keys(Slot::swap_more_gradients, n, {args_.k, args_.v}, own_.k.dtype);
}

ExecutorBackwardArgs BackwardSwap::part(Index n) {
  const Kv kv = keys(turn(Slot::swap_kv_0, n), n, {args_.k, args_.v}, args_.k.dtype);
  const Kv to = brings_keys(n) ? gradients(n) : more_gradients(n);
  return {.q = buffer(Slot::swap_q_0, n, args_.q),
          .k = kv.k,
          .v = kv.v,
          .attention = args_.attention,
          .dout = buffer(Slot::swap_dout_0, n, args_.dout),
          .out = buffer(Slot::swap_out_0, n, args_.out),
          .lse = buffer(Slot::swap_lse_0, n, args_.lse),
          .dq = buffer(Slot::swap_dq_0, n, args_.dq),
          .dk = to.k,
          .dv = to.v,
          .place = args_.place,
          .device_plans = args_.device_plans};
}

void BackwardSwap::start(Index n) {
  const ExecutorBackwardArgs to = part(n);
  arrivals_[at(n % 2)] = to_swapped(
      n, {queries(n, args_.q, to.q), moved_keys(n, args_.k, to.k, false), moved_keys(n, args_.v, to.v, false),
          queries(n, args_.dout, to.dout), queries(n, args_.out, to.out), queries(n, args_.lse, to.lse)});
}

void BackwardSwap::give_back(Index n) {
  const ExecutorBackwardArgs swapped = part(n);
  const Kv sums = gradients(n);
  if (!brings_keys(n) && heads_k(n) > 0) {
    add(place_, sums.k, swapped.dk);
    add(place_, sums.v, swapped.dv);
  }
  leaving_.wait();
  home_.wait();  // in order, so that sums are deterministic
  leaving_ = to_own(n, {queries(n, args_.dq, swapped.dq)}, Message::Combine::replace);
  if (!schedule::keys_end(swap_, n)) return;
  if (!cleared_) {
    clear(place_, own_.k);
    clear(place_, own_.v);
    cleared_ = true;
  }
  // Replicated K/V heads return from every rank that had them, summed in the order of the group.
  home_ = to_own(n, {moved_keys(n, own_.k, sums.k, true), moved_keys(n, own_.v, sums.v, true)}, adding(own_.k.dtype));
}

}  // namespace weft::run
