#include "draw/timelines.h"

#include "text.h"
#include "weft/error.h"

namespace weft::draw {
namespace {

std::vector<Index> drawn_ranks(Index ranks, Index steps, Index events) {
  constexpr Index kMost = 32, kLeast = 4, kOfAStep = 4;  // compute, exchange, wait, rows
  std::vector<Index> drawn;
  const Index room = events / (kOfAStep * max_of(steps, 1)), count = min_of(ranks, min_of(max_of(room, kLeast), kMost));
  for (Index i = 0; i < count; ++i) drawn.push_back(i * ranks / count);
  return drawn;
}

}  // namespace

Timelines make_timelines(const std::vector<Schedule>& all, const TensorShape& shape, const Machine& machine,
                         Index events) {
  const SimulateOptions options{
      .detail = drawn_ranks(static_cast<Index>(all.size()), static_cast<Index>(all.front().steps.size()), events)};
  Timelines times{.about = text("simulated on ", machine.name)};
  try {
    times.forward = simulate(all, shape, machine, Pass::forward, options);
    times.backward = simulate(all, shape, machine, Pass::backward, options);
  } catch (const Error& refused) {  // the machine has no rate for these tensors: everything else can still be drawn
    times = {.about = text("not simulated: ", refused.what())};
  }
  return times;
}

}  // namespace weft::draw
