// Bytes of a schedule, counted from the same moves that the executor makes.
#include "index.h"
#include "schedule/build.h"
#include "schedule/source.h"
#include "text.h"
#include "weft/error.h"
#include "weft/support.h"

namespace weft {
namespace {

using schedule::rows_in;

class Counter {
 public:
  Counter(const Schedule& s, const TensorShape& shape, Index node) : s_(s), shape_(shape), node_(node) {}

  void sent(Index peer, Index bytes) {
    if (peer != s_.rank) total += {bytes, 0, 1, 0, between(peer) * bytes, 0};
  }
  void received(Index peer, Index bytes) {
    if (peer != s_.rank) total += {0, bytes, 0, 1, 0, between(peer) * bytes};
  }

  // K and V of a row are one message.
  void move(const std::vector<PeerRows>& to, const std::vector<PeerRows>& from, Index row_bytes) {
    for (const PeerRows& p : to) sent(p.peer, rows_in(p.rows) * row_bytes);
    for (const PeerRows& p : from) received(p.peer, rows_in(p.rows) * row_bytes);
  }
  // Both hops, one way or the other.
  void relayed(const Relay& relay, Index row_bytes, bool back) {
    move(back ? relay.receives : relay.sends, back ? relay.sends : relay.receives, row_bytes);
    for (const PeerRows& p : relay.passes)
      back ? received(p.peer, rows_in(p.rows) * row_bytes) : sent(p.peer, rows_in(p.rows) * row_bytes);
  }

  // Each member's heads of the own rows one way, the own heads of each member's rows the other way.
  void swap(Index head_group, schedule::SwapBytes each, bool home) {
    const std::vector<Index> bytes = schedule::swapped_bytes(s_, head_group, each, home);
    const Index first = s_.swap->group.begin, mine = bytes[at(s_.rank - first)];
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      const Index peer = first + static_cast<Index>(i);
      sent(peer, home ? mine : bytes[i]);
      received(peer, home ? bytes[i] : mine);
    }
  }

  void swaps(Pass pass, Index head_group) {
    const auto size = [&](std::optional<DType> dtype) { return size_of(dtype.value_or(shape_.dtype)); };
    const Index kv = key_width() * size({}), q = shape_.dim_qk * size({});
    const Index out = shape_.dim_v * size(shape_.out), lse = shape_.lse ? size_of(*shape_.lse) : 0;
    if (pass == Pass::forward) {
      swap(head_group, {q, kv}, false);
      swap(head_group, {out + lse, 0}, true);
    } else {
      swap(head_group, {q + shape_.dim_v * size(shape_.dout) + out + lse, kv}, false);
      swap(head_group, {shape_.dim_qk * size(shape_.dq), 0}, true);
      if (schedule::keys_end(*s_.swap, head_group))
        swap(head_group, {0, key_width() * size_of(sum_type(shape_.dtype))}, true);
    }
  }

  // Numbers of a row and head: of K and V, or of the source, which is one head.
  Index key_width() const { return shape_.source > 0 ? shape_.source : shape_.dim_qk + shape_.dim_v; }
  // Queries there, what comes of them back.
  void queries(Pass pass) {
    const schedule::QueryBytes row = schedule::query_bytes(shape_, pass);
    for (const QueryMove& m : s_.query_moves) {
      move(m.sends, m.receives, row.there * s_.heads_q);
      move(m.receives, m.sends, row.back * s_.heads_q);
    }
  }

  Traffic total;

 private:
  // 1: the peer is in another node.
  Index between(Index peer) const { return node_ > 1 && peer / node_ != s_.rank / node_ ? 1 : 0; }

  const Schedule& s_;
  const TensorShape& shape_;
  Index node_;
};

}  // namespace

schedule::QueryBytes schedule::query_bytes(const TensorShape& shape, Pass pass) {
  const auto size = [&](std::optional<DType> dtype) { return size_of(dtype.value_or(shape.dtype)); };
  const DType sums = sum_type(shape.dtype);
  const Index q = shape.dim_qk * size({}), state = 2 * size_of(sums);  // max and sum
  if (pass == Pass::forward) return {q, shape.dim_v * size_of(sums) + state};
  const Index lse = shape.lse ? size_of(*shape.lse) : 0;
  return {q + shape.dim_v * (size(shape.dout) + size(shape.out)) + lse, shape.dim_qk * size_of(sums)};
}

namespace {

Traffic traffic_of_moves(const Schedule& s, const TensorShape& shape, Pass pass, Index node) {
  if (node < 0 || (node > 0 && s.ranks % node != 0))
    throw Error(text("nodes of ", node, " ranks do not divide ", s.ranks, " ranks"),
                "give a number of ranks that divides them");
  Counter count(s, shape, node > 0 ? node : uses(s.options, "node") ? s.options.node : 1);
  bool shifted = false;  // gradients of what came in the step before travel on
  for (Index n = 0; s.swap && n < static_cast<Index>(s.swap->head_groups.size()); ++n) count.swaps(pass, n);
  count.queries(pass);
  for (const Step& step : s.steps) {
    if (!step.move) {
      shifted = false;
      continue;
    }
    const Move& move = *step.move;
    const Index width = step.heads_k.size() * count.key_width(), sums = width * size_of(sum_type(shape.dtype));
    count.move(move.sends, move.receives, width * size_of(shape.dtype));
    if (move.relay) count.relayed(*move.relay, width * size_of(shape.dtype), false);
    if (pass == Pass::forward) continue;
    if (move.kind == Move::Kind::shift) {
      if (shifted) count.move(move.sends, move.receives, sums);
      count.move(move.home, move.back, sums);
      shifted = true;
    } else {
      count.move(move.receives, move.sends, sums);
      if (move.relay) count.relayed(*move.relay, sums, true);
    }
  }
  if (pass == Pass::forward ? shape.max_logit : shape.dsink) {
    for (Index peer = 0; peer < s.ranks; ++peer) {  // everyone sends to everyone
      count.sent(peer, s.heads_q * size_of(DType::f64));
      count.received(peer, s.heads_q * size_of(DType::f64));
    }
  }
  return count.total;
}

}  // namespace

Traffic traffic(const Schedule& s, const TensorShape& shape, Pass pass, Index node) {
  schedule::check_shape(s.layouts, s.heads_q, s.heads_k, shape);
  if (shape.source == 0) return traffic_of_moves(s, shape, pass, node);
  require_support({.schedule = s.options.kind, .source = true});
  return traffic_of_moves(schedule::source_moves(s), shape, pass, node);
}

}  // namespace weft
