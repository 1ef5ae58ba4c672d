// Bytes of a schedule, counted from the same moves that the executor makes.
#include "weft/schedule.h"

namespace weft {
namespace {

Index rows_in(const std::vector<Range>& ranges) {
  Index rows = 0;
  for (const Range& r : ranges) rows += r.size();
  return rows;
}

// K and V of a row are one message.
void count(const Schedule& s, const std::vector<PeerRows>& to, const std::vector<PeerRows>& from, Index row_bytes,
           Traffic& traffic) {
  for (const PeerRows& p : to) {
    if (p.peer == s.rank) continue;
    traffic.bytes_sent += rows_in(p.rows) * row_bytes;
    ++traffic.messages_sent;
  }
  for (const PeerRows& p : from) {
    if (p.peer == s.rank) continue;
    traffic.bytes_received += rows_in(p.rows) * row_bytes;
    ++traffic.messages_received;
  }
}

}  // namespace

Traffic traffic(const Schedule& s, const TensorShape& shape, Pass pass) {
  Traffic total;
  const Index dims = shape.dim_qk + shape.dim_v;
  const Move* shift = nullptr;
  for (const Step& step : s.steps) {
    if (!step.move) continue;
    const Move& move = *step.move;
    const Index width = step.heads_k.size() * dims;
    count(s, move.sends, move.receives, width * size_of(shape.dtype), total);
    if (pass == Pass::forward) continue;
    const Index f32 = width * size_of(DType::f32);
    if (move.kind == Move::Kind::gather) {
      count(s, move.receives, move.sends, f32, total);
    } else {
      count(s, move.sends, move.receives, f32, total);
      shift = &move;
    }
  }
  if (shift != nullptr)  // home
    count(s, shift->sends, shift->receives, s.heads_k * dims * size_of(DType::f32), total);
  if (pass == Pass::forward ? shape.max_logit : shape.dsink) {
    const Index others = s.ranks - 1, bytes = others * s.heads_q * size_of(DType::f64);
    total += {bytes, bytes, others, others};
  }
  return total;
}

}  // namespace weft
