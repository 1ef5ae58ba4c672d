#include <algorithm>

#include "kernel/check_args.h"
#include "kernel/reference/block.h"
#include "text.h"
#include "weft/reference.h"

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
    const double weight = std::exp(logits[at(key - keys.begin)] - state.max);
    state.sum += weight;
    add_scaled(accumulator.data(), weight, block.v.at(key, kv_head), block.v.dim());
  }
  return state;
}

void attend(const Inputs& in, const Slice& slice, ReferenceState& state) {
  const Block block(in, slice);
  const Logits logit(in);
  std::vector<double> accumulator(at(state.dim)), logits;
  for (Index row = block.rows().begin; row < block.rows().end; ++row) {
    for (Index head = 0; head < state.heads; ++head) {
      const RowState<double> part = attend_row(block, logit, row, head, accumulator, logits);
      const Index item = row * state.heads + head;
      merge_row(state.states[at(item)], state.accumulators.data() + item * state.dim, part, accumulator.data(),
                state.dim);
      state.max_logit[at(head)] = max_or_nan(state.max_logit[at(head)], part.max);
    }
  }
}

// Calls f(item of [tq, hq], row, head) for the rows that a slice holds.
template <class F>
void for_rows_in_slices(const KernelForwardArgs& args, const F& f) {
  std::vector<char> held(at(args.q.rows), 0);
  for (const Slice& s : args.slices) {
    const Slice t = trimmed(s, false);
    std::fill(held.begin() + t.q_begin, held.begin() + t.q_end, 1);
  }
  for (Index row = 0; row < args.q.rows; ++row)
    for (Index head = 0; held[at(row)] && head < args.q.heads; ++head) f(row * args.q.heads + head, row, head);
}

// Adds to partial states of the caller, which are widened to f64 and rounded back.
template <class T>
void add_to_partial(const KernelForwardArgs& args, RowState<T>* states) {
  const TensorView& sums = args.partial.sums;
  ReferenceState state(sums.rows, sums.heads, sums.dim);
  for_rows_in_slices(args, [&](Index item, Index row, Index head) {
    if (is_empty(states[item])) return;
    state.states[at(item)] = {static_cast<double>(states[item].max), static_cast<double>(states[item].sum)};
    load_row(sums, row, head, state.accumulators.data() + item * sums.dim);
  });
  reference_partial(args, state);
  for_rows_in_slices(args, [&](Index item, Index row, Index head) {
    const RowState<double>& now = state.states[at(item)];
    states[item] = {static_cast<T>(now.max), static_cast<T>(now.sum)};
    store_row(sums, row, head, state.accumulators.data() + item * sums.dim);
  });
}

}  // namespace
}  // namespace reference

void reference_partial(const ForwardArgs& args, ReferenceState& state) {
  refuse_device_plan(args.device_plan);
  const Inputs in = inputs_of(args);
  check_inputs(in);
  reference::check_state(state, in);
  for (const Slice& slice : in.slices) reference::attend(in, slice, state);
}

void reference_finish(const ReferenceState& state, const ForwardArgs& args) {
  reference::check_state(state);
  check_outputs(finish_args({args}), state.rows, state.heads, state.dim);
  std::vector<double> out(at(state.dim));
  for (Index head = 0; head < state.heads; ++head) {
    const double sink = sink_logit(args.attention.sink, head);
    for (Index row = 0; row < state.rows; ++row) {
      const Index item = row * state.heads + head;
      const FinishedRow<double> finished = finish(state.states[at(item)], sink);
      out.assign(out.size(), 0);
      reference::add_scaled(out.data(), finished.weight, state.accumulators.data() + item * state.dim, state.dim);
      store_row(args.out, row, head, out.data());
      if (args.lse.given()) store_row(args.lse, row, head, &finished.lse);
    }
    if (args.max_logit.given()) store_row(args.max_logit, 0, head, &state.max_logit[at(head)]);
  }
}

void reference_forward(const ForwardArgs& args) {
  refuse_device_plan(args.device_plan);
  check_forward({args});
  ReferenceState state(args.q.rows, args.q.heads, args.v.dim);
  reference_partial(args, state);
  reference_finish(state, args);
}

void reference_forward(const KernelForwardArgs& args) {
  if (!args.partial.given())
    reference_forward(static_cast<const ForwardArgs&>(args));
  else if (args.partial.states_f64 != nullptr)
    reference::add_to_partial(args, args.partial.states_f64);
  else
    reference::add_to_partial(args, args.partial.states);
}

}  // namespace weft
