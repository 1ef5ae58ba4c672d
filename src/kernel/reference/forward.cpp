#include "kernel/inputs.h"
#include "text.h"
#include "weft/error.h"

namespace weft {

namespace reference {
namespace {

void check_state(const ReferenceState& state) {
  const auto size = [](const auto& values) { return static_cast<Index>(values.size()); };
  if (size(state.states) != state.rows * state.heads ||
      size(state.accumulators) != state.rows * state.heads * state.dim || size(state.max_logit) != state.heads) {
    throw Error(text("the state's vectors do not have the sizes of ", state.rows, " rows, ", state.heads,
                     " heads, dim ", state.dim),
                "make a new ReferenceState");
  }
}

void check_state(const ReferenceState& state, const Inputs& in) {
  check_state(state);
  if (state.rows != in.q.rows || state.heads != in.q.heads || state.dim != in.v.dim) {
    throw Error(text("the state is of ", state.rows, " rows, ", state.heads, " heads, dim ", state.dim),
                text("make it ReferenceState(", in.q.rows, ", ", in.q.heads, ", ", in.v.dim, ") as q and v are"));
  }
}

// The state of one row over one range of keys; its accumulator is written.
RowState<double> attend_row(const Block& block, const Logits& logit, Index row, Index head,
                            std::vector<double>& accumulator, std::vector<double>& logits) {
  const Range keys = keys_of(block.seen, row);
  const Index kv_head = block.kv_head(head);
  logits.clear();
  RowState<double> state;
  for (Index key = keys.begin; key < keys.end; ++key) {
    logits.push_back(logit(block.q.at(row, head), block.k.at(key, kv_head)));
    state.max = max_or_nan(state.max, logits.back());
  }
  accumulator.assign(accumulator.size(), 0);
  if (is_empty(state)) return state;
  for (Index key = keys.begin; key < keys.end; ++key) {
    const double weight = std::exp(logits[static_cast<std::size_t>(key - keys.begin)] - state.max);
    state.sum += weight;
    add_scaled(accumulator.data(), weight, block.v.at(key, kv_head), block.v.dim());
  }
  return state;
}

void attend(const Inputs& in, const Slice& slice, ReferenceState& state) {
  const Block block(in, slice);
  const Logits logit(in);
  std::vector<double> accumulator(static_cast<std::size_t>(state.dim)), logits;
  for (Index row = block.rows().begin; row < block.rows().end; ++row) {
    for (Index head = 0; head < state.heads; ++head) {
      const RowState<double> part = attend_row(block, logit, row, head, accumulator, logits);
      const auto at = static_cast<std::size_t>(row * state.heads + head);
      const auto h = static_cast<std::size_t>(head);
      double* so_far = state.accumulators.data() + static_cast<Index>(at) * state.dim;
      merge_row(state.states[at], so_far, part, accumulator.data(), state.dim);
      state.max_logit[h] = max_or_nan(state.max_logit[h], part.max);
    }
  }
}

}  // namespace
}  // namespace reference

void reference_partial(const ForwardArgs& args, ReferenceState& state) {
  reference::refuse_device_plan(args.device_plan);
  const reference::Inputs in = reference::inputs_of(args);
  reference::check_inputs(in);
  reference::check_state(state, in);
  for (const Slice& slice : in.slices) reference::attend(in, slice, state);
}

void reference_finish(const ReferenceState& state, const ForwardArgs& args) {
  reference::check_state(state);
  reference::check_outputs(args, state.rows, state.heads, state.dim);
  std::vector<double> out(static_cast<std::size_t>(state.dim));
  for (Index head = 0; head < state.heads; ++head) {
    const double sink = reference::sink_logit(args.attention.sink, head);
    for (Index row = 0; row < state.rows; ++row) {
      const Index at = row * state.heads + head;
      const FinishedRow<double> finished = finish(state.states[static_cast<std::size_t>(at)], sink);
      out.assign(out.size(), 0);
      reference::add_scaled(out.data(), finished.weight, state.accumulators.data() + at * state.dim, state.dim);
      store_row(args.out, row, head, out.data());
      if (args.lse.given()) store_row(args.lse, row, head, &finished.lse);
    }
    if (args.max_logit.given()) {
      store_row(args.max_logit, 0, head, &state.max_logit[static_cast<std::size_t>(head)]);
    }
  }
}

void reference_forward(const ForwardArgs& args) {
  reference::refuse_device_plan(args.device_plan);
  reference::check_inputs(reference::inputs_of(args));
  reference::check_outputs(args, args.q.rows, args.q.heads, args.v.dim);
  ReferenceState state(args.q.rows, args.q.heads, args.v.dim);
  reference_partial(args, state);
  reference_finish(state, args);
}

}  // namespace weft
