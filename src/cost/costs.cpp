#include "cost/costs.h"

namespace weft::cost {
namespace {

double real(Index n) { return static_cast<double>(n); }

constexpr Index kLine = 64;  // what the executor's workspaces are aligned to, and at least

// As run::take_kv.
Index kv_size(Index rows, Index heads, Index dim_qk, Index dim_v, DType dtype) {
  return (rows * heads * dim_qk * size_of(dtype) + kLine - 1) / kLine * kLine + rows * heads * dim_v * size_of(dtype) +
         kLine;
}

}  // namespace

Frame frame_of(const Schedule& s) {
  Frame f{.ranks = s.ranks,
          .ulysses = s.ulysses(),
          .q_rows = s.q_rows,
          .k_rows = s.k_rows,
          .heads_q = s.heads_q,
          .heads_k = s.heads_k,
          .step_heads_q = s.step_heads_q(),
          .step_heads_k = s.step_heads_k(),
          .swaps = s.swap.has_value(),
          .query_ranks = s.q_rows > 0 ? s.query_ranks : 1};
  f.group_heads_q = f.step_heads_q;
  f.group_heads_k = f.step_heads_k;
  if (!s.swap || s.swap->head_groups.size() < 2) return f;
  const Index me = s.rank - s.swap->group.begin;
  f.head_groups = static_cast<Index>(s.swap->head_groups.size());
  f.group_heads_q = f.group_heads_k = 0;
  for (Index n = 0; n < f.head_groups; ++n) {
    const HeadGroup& group = s.swap->head_groups[at(n)];
    f.group_heads_q = max_of(f.group_heads_q, group.q[at(me)].size());
    f.group_heads_k = max_of(f.group_heads_k, group.k[at(me)].size());
    const bool brings = s.swap->brings_keys(n, me);
    if (n > 0 && brings) f.key_buffers = 2;
    f.shares_keys = f.shares_keys || !brings;
  }
  return f;
}

Index Costs::moved_size(Index rows, Index heads_k, DType dtype) const {
  if (source()) return kv_size(rows, moved_heads(heads_k), shape_.source, 0, dtype);
  return kv_size(rows, heads_k, shape_.dim_qk, shape_.dim_v, dtype);
}

// One matrix product forward; in a backward one each for the rows and for what they are made with, and another one that
// makes K and V again, if they are not kept.
double Costs::expand_seconds(Index rows, Index heads_k) const {
  if (!source() || rate_.flops <= 0) return 0;
  const double flops = 2 * real(rows) * real(shape_.source) * real(heads_k * dims());
  const int products = pass_ == Pass::forward ? 1 : shape_.keeps_expanded ? 2 : 3;
  return products * flops / rate_.flops;
}

Work Costs::work(Index rank, const Frame& frame, const StepFrame& step, const TileWork& tiles, bool partial,
                 bool first) const {
  double seconds = kernel_seconds(tiles, rate_, shape_) + expand_seconds(step.key_rows, step.heads_k), rows = 0;
  const double per_byte = machine_.row_bandwidth > 0 ? 1 / machine_.row_bandwidth : 0;
  if (pass_ == Pass::forward) {
    constexpr Index kThereAndBack = 2;
    const Index bytes = kThereAndBack * (shape_.dim_v * sum_size() + state_size());
    if (partial) seconds += tiles.rows * real(bytes) * per_byte;
  } else {
    // All of dK, dV is written, or read and written.
    seconds += real(step.key_rows * step.heads_k * dims() * sum_size()) * per_byte * (step.adds_keys ? 2 : 1);
    const double dq = real(frame.step_q_rows() * step.queries.size() * step.heads_q * shape_.dim_qk * sum_size());
    if (partial) seconds += dq * per_byte;
    if (partial && !first) rows = pass_over(3 * dq);  // two are read, one is written
  }
  return {static_cast<std::uint32_t>(rank), static_cast<float>(seconds), static_cast<float>(rows), tiles.pairs};
}

double Costs::begin_rows(const Frame& f, Index heads_k, bool first_moves) const {
  if (pass_ == Pass::forward || !first_moves) return 0;
  return pass_over(real(f.k_rows * f.ulysses * moved_heads(heads_k)) * gradient_bytes());
}

double Costs::end_rows(const Frame& f, Index heads_q, Index heads_k, bool partial, bool shares) const {
  const Index rows = f.step_q_rows() * heads_q;
  if (pass_ == Pass::forward) {
    if (!partial) return 0;
    const Index state = state_size();
    const Index lse = shape_.lse ? size_of(*shape_.lse) : 0;
    return pass_over(real(rows * f.query_ranks * state)) +
           pass_over(real(rows * (shape_.dim_v * (sum_size() + size(shape_.out)) + state + lse)));
  }
  double seconds = 0;
  if (partial && size(shape_.dq) != sum_size())
    seconds += pass_over(real(rows * shape_.dim_qk * (sum_size() + size(shape_.dq))));
  if (shares) seconds += pass_over(3 * real(f.k_rows * f.ulysses * moved_heads(heads_k)) * gradient_bytes());
  return seconds;
}

double Costs::merge_rows(const Frame& f) const {
  if (pass_ == Pass::backward) return 0;  // added as it arrives
  return pass_over(3 *
                   real(f.q_rows * f.heads_q * (shape_.dim_v * sum_size() + state_size())));  // two read, one written
}

double Costs::last_rows(const Frame& f) const {
  if (pass_ == Pass::forward) return 0;
  double seconds = 0;
  const double own = real(f.k_rows * moved_heads(f.heads_k) * moved_dims());
  if (f.swaps) seconds += pass_over(own * real(sum_size()));
  if (shape_.dtype != sums()) seconds += pass_over(own * real(sum_size() + size_of(shape_.dtype)));
  return seconds;
}

schedule::SwapBytes Costs::swap_in() const {
  const Index kv = moved_dims() * size_of(shape_.dtype), q = shape_.dim_qk * size_of(shape_.dtype);
  if (pass_ == Pass::forward) return {q, kv};
  const Index lse = shape_.lse ? size_of(*shape_.lse) : 0;
  return {q + shape_.dim_v * (size(shape_.dout) + size(shape_.out)) + lse, kv};
}

schedule::SwapBytes Costs::swap_out() const {
  if (pass_ == Pass::backward) return {shape_.dim_qk * size(shape_.dq), 0};
  return {shape_.dim_v * size(shape_.out) + (shape_.lse ? size_of(*shape_.lse) : 0), 0};
}

// Of a mesh: queries of other ranks, and results of all, as in run/query_moves.cpp.
Index Costs::query_memory(const Frame& f, std::span<const StepFrame> steps) const {
  const Index part = f.q_rows * f.heads_q, others = (f.query_ranks - 1) * part;
  const Index dqk = shape_.dim_qk, dv = shape_.dim_v;
  if (pass_ == Pass::forward) {
    const Index result = dv * sum_size() + state_size();
    return others * dqk * size({}) + (part + others) * result + others * result + 3 * kLine;
  }
  const Index lse = shape_.lse ? size_of(*shape_.lse) : 0;
  Index bytes = others * (dqk * size({}) + dv * (size(shape_.dout) + size(shape_.out)) + lse) + 4 * kLine;
  bytes += others * dqk * sum_size() + kLine;
  if (size(shape_.dq) != sum_size()) bytes += part * dqk * sum_size() + kLine;
  WrittenParts written;
  Index most = 0;  // parts that a step adds to
  for (const StepFrame& s : steps)
    if (s.computed && written.adds(s.queries)) most = max_of(most, s.queries.size());
  return bytes + (most > 0 ? most * part * dqk * sum_size() + kLine : 0);
}

RankMemory Costs::memory(const Frame& f, std::span<const StepFrame> steps, bool partial, Index expanded) const {
  const bool backward = pass_ == Pass::backward;
  const Index dqk = shape_.dim_qk, dv = shape_.dim_v, lse = shape_.lse ? size_of(*shape_.lse) : 0;
  RankMemory m;
  const Index rows = f.q_rows * f.heads_q, own_keys = f.k_rows * moved_heads(f.heads_k) * moved_dims() * size({});
  m.tensors = rows * (dqk * size({}) + dv * size(shape_.out) + lse) + own_keys;
  if (backward) m.tensors += rows * (dv * size(shape_.dout) + dqk * size(shape_.dq)) + own_keys;

  Index keys[2] = {0, 0}, gradients[2] = {0, 0}, relays[2] = {0, 0}, relay_gradients[2] = {0, 0};
  for (const StepFrame& s : steps) {
    const std::size_t odd = at(s.turn % 2);
    const auto grow = [&](Index& slot, Index key_rows, DType dtype) {
      slot = max_of(slot, moved_size(key_rows, s.heads_k, dtype));
    };
    if (s.moves) grow(keys[odd], s.key_rows, shape_.dtype);
    if (backward && s.moves) grow(gradients[odd], s.key_rows, sums());
    if (!s.relay_rows) continue;
    grow(relays[odd], *s.relay_rows, shape_.dtype);
    if (backward) grow(relay_gradients[odd], *s.relay_rows, sums());
  }
  if (source()) {  // K and V of one step, or of all, and gradients of one
    Index made = shape_.keeps_expanded ? expanded * dims() * size({}) : 0, made_gradients = 0;
    for (const StepFrame& s : steps) {
      made = max_of(made, s.key_rows * s.heads_k * dims() * size({}));
      made_gradients = max_of(made_gradients, kv_size(s.key_rows, s.heads_k, dqk, dv, shape_.dtype));
    }
    m.tensors += made;
    if (backward) m.workspace += made_gradients;
  }
  m.workspace += keys[0] + keys[1] + gradients[0] + gradients[1];
  m.workspace += relays[0] + relays[1] + relay_gradients[0] + relay_gradients[1];
  const Index step_rows = f.step_q_rows() * f.group_heads_q;
  if (backward) {
    const bool own = shape_.dtype != sums();
    Index own_sums = kv_size(f.k_rows, f.heads_k, own ? dqk : 0, own ? dv : 0, sums());
    if (source()) own_sums = own ? moved_size(f.k_rows, f.heads_k, sums()) : 0;
    const bool shares =
        steps.size() == 1 && steps.front().moves && !f.swaps && !source();  // they lie where the keys lay
    m.workspace += shares ? max_of(0, own_sums - keys[0]) : own_sums;
    if (partial && f.query_ranks == 1)
      m.workspace += step_rows * dqk * sum_size() * (size(shape_.dq) == sum_size() ? 1 : 2);
  } else if (partial && f.query_ranks == 1) {
    m.workspace += step_rows * (dv * sum_size() + state_size());
  }
  if (f.query_ranks > 1) m.workspace += query_memory(f, steps);
  if (backward ? shape_.dsink : shape_.max_logit)
    m.workspace += (1 + f.ranks) * f.heads_q * static_cast<Index>(sizeof(double));
  if (f.swaps) {
    const Index key_rows = f.k_rows * f.ulysses, turns = min_of(2, f.head_groups);
    const Index key_buffers = source() ? 1 : f.key_buffers;
    const bool shares_keys = source() ? f.head_groups > 1 : f.shares_keys;
    m.workspace += key_buffers * moved_size(key_rows, f.group_heads_k, shape_.dtype);
    m.workspace += turns * (step_rows * (dqk * size({}) + dv * size(shape_.out)) + 2 * kLine);
    if (lse > 0 && (backward || f.q_rows > 0)) m.workspace += turns * (step_rows * lse + kLine);
    if (backward) {
      m.workspace += (key_buffers + (shares_keys ? 1 : 0)) * moved_size(key_rows, f.group_heads_k, sums());
      m.workspace += turns * (step_rows * (dv * size(shape_.dout) + dqk * size(shape_.dq)) + 2 * kLine);
    }
  }
  return m;
}

}  // namespace weft::cost
