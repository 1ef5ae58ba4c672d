#include "run/swap.h"

#include "index.h"
#include "run/rows.h"

namespace weft::run {

Attention HeadSwap::attention(const Attention& all) const {
  Attention mine = all;
  if (all.sink.kind == Sink::Kind::learnable) mine.sink.logits = some_heads(all.sink.logits, heads_q());
  mine.head_map = swap_.head_map;
  return mine;
}

TensorView HeadSwap::buffer(Slot slot, const ConstTensorView& own, const std::vector<Range>& heads) {
  const Index rows = own.rows * swap_.group.size(), count = heads[me()].size();
  constexpr Index kNeverNull = 64;
  const Index bytes = checked_product("a workspace of swapped heads", {rows, count, own.dim, size_of(own.dtype)});
  void* data = workspace_.bytes(slot, bytes + kNeverNull);
  return thd(data, own.dtype, rows, count, own.dim);
}

// One message per member: this rank's rows of the member's heads, tensor by tensor.
std::vector<Message> HeadSwap::of_own(const std::vector<Pair>& pairs, Message::Combine combine) const {
  std::vector<Message> messages;
  for (Index i = 0; i < swap_.group.size(); ++i) {
    Message m{.peer = swap_.group.begin + i, .blocks = {}, .combine = combine};
    for (const Pair& p : pairs) {
      const Range heads = (*p.heads)[at(i)];
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

void HeadSwap::to_swapped(const std::vector<Pair>& pairs) {
  communicator_.exchange(of_own(pairs, Message::Combine::replace), of_swapped(pairs)).wait();
}

void HeadSwap::to_own(const std::vector<Pair>& pairs, Message::Combine combine) {
  std::vector<Message> home = of_own(pairs, combine);
  if (adds(combine)) home = at_once(std::move(home), false);
  communicator_.exchange(of_swapped(pairs), std::move(home)).wait();
}

ExecutorForwardArgs HeadSwap::bring(const ExecutorForwardArgs& args) {
  const Kv kv = take_kv(workspace_, Slot::swap_kv, shape({args.k, args.v}));
  ExecutorForwardArgs swapped{.q = buffer(Slot::swap_q, args.q, swap_.heads_q),
                              .k = kv.k,
                              .v = kv.v,
                              .attention = attention(args.attention),
                              .out = buffer(Slot::swap_out, args.out, swap_.heads_q),
                              .keys_per_split = args.keys_per_split,
                              .place = args.place,
                              .device_plans = args.device_plans};
  if (args.lse.given()) swapped.lse = buffer(Slot::swap_lse, args.lse, swap_.heads_q);
  to_swapped({{args.q, swapped.q, &swap_.heads_q}, {args.k, kv.k, &swap_.heads_k}, {args.v, kv.v, &swap_.heads_k}});
  return swapped;
}

void HeadSwap::give_back(const ExecutorForwardArgs& swapped, const ExecutorForwardArgs& args) {
  std::vector<Pair> pairs = {{args.out, swapped.out, &swap_.heads_q}};
  if (args.lse.given()) pairs.push_back({args.lse, swapped.lse, &swap_.heads_q});
  to_own(pairs, Message::Combine::replace);
}

ExecutorBackwardArgs HeadSwap::bring(const ExecutorBackwardArgs& args) {
  KvShape sums = shape({args.k, args.v});
  const Kv kv = take_kv(workspace_, Slot::swap_kv, sums);
  sums.dtype = sum_type(sums.dtype);
  const Kv gradients = take_kv(workspace_, Slot::swap_key_gradients, sums);
  const ExecutorBackwardArgs swapped{.q = buffer(Slot::swap_q, args.q, swap_.heads_q),
                                     .k = kv.k,
                                     .v = kv.v,
                                     .attention = attention(args.attention),
                                     .dout = buffer(Slot::swap_dout, args.dout, swap_.heads_q),
                                     .out = buffer(Slot::swap_out, args.out, swap_.heads_q),
                                     .lse = buffer(Slot::swap_lse, args.lse, swap_.heads_q),
                                     .dq = buffer(Slot::swap_dq, args.dq, swap_.heads_q),
                                     .dk = gradients.k,
                                     .dv = gradients.v,
                                     .place = args.place,
                                     .device_plans = args.device_plans};
  to_swapped({{args.q, swapped.q, &swap_.heads_q},
              {args.k, kv.k, &swap_.heads_k},
              {args.v, kv.v, &swap_.heads_k},
              {args.dout, swapped.dout, &swap_.heads_q},
              {args.out, swapped.out, &swap_.heads_q},
              {args.lse, swapped.lse, &swap_.heads_q}});
  return swapped;
}

void HeadSwap::give_back(const ExecutorBackwardArgs& swapped, const ExecutorBackwardArgs& args, const Kv& own) {
  to_own({{args.dq, swapped.dq, &swap_.heads_q}}, Message::Combine::replace);
  // Replicated K/V heads return from every rank that had them, summed in the order of the group.
  clear(args.place, own.k);
  clear(args.place, own.v);
  to_own({{own.k, swapped.dk, &swap_.heads_k}, {own.v, swapped.dv, &swap_.heads_k}}, adding(own.k.dtype));
}

}  // namespace weft::run
