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
  return {.ranks = s.ranks,
          .ulysses = s.ulysses(),
          .q_rows = s.q_rows,
          .k_rows = s.k_rows,
          .heads_q = s.heads_q,
          .heads_k = s.heads_k,
          .step_heads_q = s.step_heads_q(),
          .step_heads_k = s.step_heads_k(),
          .swaps = s.swap.has_value()};
}

Work Costs::work(Index rank, const Frame& frame, const StepFrame& step, const TileWork& tiles, bool partial,
                 bool first) const {
  double seconds = kernel_seconds(tiles, rate_, shape_), rows = 0;
  const double per_byte = machine_.row_bandwidth > 0 ? 1 / machine_.row_bandwidth : 0;
  if (pass_ == Pass::forward) {
    constexpr Index kThereAndBack = 2;
    const Index bytes = kThereAndBack * (shape_.dim_v * sum_size() + state_size());
    if (partial) seconds += tiles.rows * real(bytes) * per_byte;
  } else {
    seconds += real(step.key_rows * step.heads_k) * gradient_bytes() * per_byte;  // all of dK, dV is written
    const double dq = real(frame.step_q_rows() * step.heads_q * shape_.dim_qk * sum_size());
    if (partial) seconds += dq * per_byte;
    if (partial && !first) rows = pass_over(3 * dq);  // two are read, one is written
  }
  return {static_cast<std::uint32_t>(rank), static_cast<float>(seconds), static_cast<float>(rows), tiles.pairs};
}

double Costs::begin_rows(const Frame& f, bool first_moves) const {
  if (pass_ == Pass::forward || !first_moves) return 0;
  return pass_over(real(f.k_rows * f.ulysses * f.step_heads_k) * gradient_bytes());
}

double Costs::end_rows(const Frame& f, bool partial) const {
  const Index rows = f.step_q_rows() * f.step_heads_q;
  if (pass_ == Pass::forward) {
    if (!partial) return 0;
    const Index state = state_size();
    const Index lse = shape_.lse ? size_of(*shape_.lse) : 0;
    return pass_over(real(rows * state)) +
           pass_over(real(rows * (shape_.dim_v * (sum_size() + size(shape_.out)) + state + lse)));
  }
  double seconds = 0;
  if (partial && size(shape_.dq) != sum_size())
    seconds += pass_over(real(rows * shape_.dim_qk * (sum_size() + size(shape_.dq))));
  const double own = real(f.k_rows * f.heads_k * dims());
  if (f.swaps) seconds += pass_over(own * real(sum_size()));
  if (shape_.dtype != sums()) seconds += pass_over(own * real(sum_size() + size_of(shape_.dtype)));
  return seconds;
}

Costs::SwapBytes Costs::swap_in() const {
  const Index kv = dims() * size_of(shape_.dtype), q = shape_.dim_qk * size_of(shape_.dtype);
  if (pass_ == Pass::forward) return {q, kv};
  const Index lse = shape_.lse ? size_of(*shape_.lse) : 0;
  return {q + shape_.dim_v * (size(shape_.dout) + size(shape_.out)) + lse, kv};
}

Costs::SwapBytes Costs::swap_out() const {
  if (pass_ == Pass::backward) return {shape_.dim_qk * size(shape_.dq), 0};
  return {shape_.dim_v * size(shape_.out) + (shape_.lse ? size_of(*shape_.lse) : 0), 0};
}

std::vector<double> swapped_bytes(const Schedule& s, const Costs::SwapBytes& bytes) {
  std::vector<double> all;
  for (std::size_t i = 0; i < s.swap->heads_q.size(); ++i)
    all.push_back(
        real(s.q_rows * s.swap->heads_q[i].size() * bytes.q + s.k_rows * s.swap->heads_k[i].size() * bytes.k));
  return all;
}

RankMemory Costs::memory(const Frame& f, std::span<const StepFrame> steps, bool partial) const {
  const bool backward = pass_ == Pass::backward;
  const Index dqk = shape_.dim_qk, dv = shape_.dim_v, lse = shape_.lse ? size_of(*shape_.lse) : 0;
  RankMemory m;
  const Index rows = f.q_rows * f.heads_q;
  m.tensors = rows * (dqk * size({}) + dv * size(shape_.out) + lse) + f.k_rows * f.heads_k * dims() * size({});
  if (backward)
    m.tensors += rows * (dv * size(shape_.dout) + dqk * size(shape_.dq)) + f.k_rows * f.heads_k * dims() * size({});

  Index keys[2] = {0, 0}, gradients[2] = {0, 0}, relays[2] = {0, 0}, relay_gradients[2] = {0, 0};
  for (std::size_t n = 0; n < steps.size(); ++n) {
    const StepFrame& s = steps[n];
    if (s.moves) keys[n % 2] = max_of(keys[n % 2], kv_size(s.key_rows, s.heads_k, dqk, dv, shape_.dtype));
    if (backward && s.moves)
      gradients[n % 2] = max_of(gradients[n % 2], kv_size(s.key_rows, s.heads_k, dqk, dv, sums()));
    if (!s.relay_rows) continue;
    relays[n % 2] = max_of(relays[n % 2], kv_size(*s.relay_rows, s.heads_k, dqk, dv, shape_.dtype));
    if (backward)
      relay_gradients[n % 2] = max_of(relay_gradients[n % 2], kv_size(*s.relay_rows, s.heads_k, dqk, dv, sums()));
  }
  m.workspace = keys[0] + keys[1] + gradients[0] + gradients[1];
  m.workspace += relays[0] + relays[1] + relay_gradients[0] + relay_gradients[1];
  const Index step_rows = f.step_q_rows() * f.step_heads_q;
  if (backward) {
    const bool own = shape_.dtype != sums();
    const Index own_sums = kv_size(f.k_rows, f.heads_k, own ? dqk : 0, own ? dv : 0, sums());
    const bool shares = steps.size() == 1 && steps.front().moves && !f.swaps;  // they lie where the keys lay
    m.workspace += shares ? max_of(0, own_sums - keys[0]) : own_sums;
    if (partial) m.workspace += step_rows * dqk * sum_size() * (size(shape_.dq) == sum_size() ? 1 : 2);
  } else if (partial) {
    m.workspace += step_rows * (dv * sum_size() + state_size());
  }
  if (backward ? shape_.dsink : shape_.max_logit)
    m.workspace += (1 + f.ranks) * f.heads_q * static_cast<Index>(sizeof(double));
  if (f.swaps) {
    const Index key_rows = f.k_rows * f.ulysses;
    m.workspace += kv_size(key_rows, f.step_heads_k, dqk, dv, shape_.dtype);
    m.workspace += step_rows * (dqk * size({}) + dv * size(shape_.out)) + 2 * kLine;
    if (lse > 0 && (backward || f.q_rows > 0)) m.workspace += step_rows * lse + kLine;
    if (backward) {
      m.workspace += kv_size(key_rows, f.step_heads_k, dqk, dv, sums());
      m.workspace += step_rows * (dv * size(shape_.dout) + dqk * size(shape_.dq)) + 2 * kLine;
    }
  }
  return m;
}

}  // namespace weft::cost
