#include "run/source.h"

#include <algorithm>

#include "index.h"
#include "run/rows.h"
#include "schedule/source.h"
#include "text.h"
#include "weft/support.h"

namespace weft::run {
namespace {

Index position_of(const Stream& stream, Index token) {
  const std::span<const Index> offsets = stream.offsets();
  return token - *(std::upper_bound(offsets.begin(), offsets.end(), token) - 1);
}

// The same slice for a buffer that holds only the rows that some slice sees, one range after another. All keys that
// this one shows lie in one of these ranges, so its other keys are cut off. Kernels tile from the first key, so under a
// window the bits depend on which rows a rank sees.
Slice among_seen(Slice s, const std::vector<Range>& seen) {
  const Range touched = touched_keys(s);
  Index before = 0;
  auto r = seen.begin();
  for (; touched.begin >= r->end; ++r) before += r->size();
  const Index by = before - r->begin;
  s.k_begin = max_of(s.k_begin, r->begin) + by;
  s.k_end = min_of(s.k_end, r->end) + by;
  s.lo = shift_bound(s.lo, by);
  s.hi = shift_bound(s.hi, by);
  return s;
}

// Of the steps that attend a move's rows, which are the same slices for other heads.
SourceMoves::Rows rows_of(const Schedule& schedule, const Plan& plan, const std::vector<Index>& tokens) {
  SourceMoves::Rows rows{.seen = touched_keys(plan), .tokens = {}, .positions = {}, .slices = {}};
  for (const Slice& s : plan.slices) {
    rows.count = max_of(rows.count, s.k_end);
    if (touched_keys(s).size() > 0) rows.slices.push_back(among_seen(s, rows.seen));
  }
  for (const Range& r : rows.seen)
    for (Index row = r.begin; row < r.end; ++row) {
      rows.tokens.push_back(tokens[at(row)]);
      rows.positions.push_back(position_of(schedule.problem.packing().k(), tokens[at(row)]));
    }
  return rows;
}

void check_source(const Schedule& s, const Source& source, const ConstTensorView& q, bool keys_given,
                  bool device_plans) {
  require_support({.schedule = s.options.kind, .device_plan = false, .source = true});
  if (device_plans)
    throw Error("a source is given with device_plans, and which of its rows are seen is known to the GPU alone",
                "give lengths on the host, or K and V");
  if (keys_given) throw Error("k, v or their gradients are given together with a source", "leave them out");
  const DType dtypes[] = {q.dtype};
  check_tensor(source.rows, {.name = "source", .rows = s.k_rows, .heads = 1, .dtypes = dtypes});
  if (source.rows.rows > 1 && (source.rows.row_stride != source.rows.dim || source.rows.inner != 0))
    throw Error(text("rows of the source are ", source.rows.dim, " wide and lie ", source.rows.row_stride, " apart"),
                "make it contiguous");
  if (!source.expand) throw Error("the source has no function expand", "give one that makes K and V of its rows");
}

ConstTensorView like_keys(const Schedule& s, const ConstTensorView& source, Index dim) {
  return thd(source.data, source.dtype, s.k_rows, s.heads_k, dim);
}

void check_expanded(const ConstTensorView& view, std::string_view what, const SourceRows& asked, Index dim,
                    DType dtype) {
  const DType dtypes[] = {dtype};
  check_tensor(view, {.name = what,
                      .rows = static_cast<Index>(asked.tokens.size()),
                      .heads = asked.heads.size(),
                      .dim = dim,
                      .dtypes = dtypes});
}

}  // namespace

SourceMoves::SourceMoves(const Schedule& attended) : schedule(schedule::source_moves(attended)) {
  const std::vector<std::vector<Index>> tokens = schedule::tokens_of_moves(attended);
  for (Index n = 0; n < static_cast<Index>(attended.steps.size()); ++n) {
    if (!schedule::same_rows_as_before(attended, n))
      rows.push_back(rows_of(attended, attended.plans[at(attended.steps[at(n)].plan)], tokens[rows.size()]));
    of.push_back(static_cast<Index>(rows.size()) - 1);
  }
}

SourceRows SourceCall::asked(Index n, const ConstTensorView& taken) const {
  const SourceMoves::Rows& of_move = seen(n);
  const Range of_step = attended.heads_k(n);
  SourceRows asked{.rows = taken,
                   .seen = of_move.seen,
                   .tokens = of_move.tokens,
                   .positions = of_move.positions,
                   .heads = {first_head + of_step.begin, first_head + of_step.end},
                   .step = attended.first() + n,
                   .place = place};
  asked.rows.rows = of_move.count;
  return asked;
}

ConstKv SourceCall::expand(Index n, const ConstTensorView& taken) const {
  const SourceRows of_step = asked(n, taken);
  const KeyValueViews made = source.expand(of_step);
  check_expanded(made.k, "k of expand", of_step, dim_qk, taken.dtype);
  check_expanded(made.v, "v of expand", of_step, dim_v, taken.dtype);
  return {made.k, made.v};
}

ConstKv SourceCall::shapes() const {
  return {thd(rows.data, rows.dtype, rows.rows, heads, dim_qk), thd(rows.data, rows.dtype, rows.rows, heads, dim_v)};
}

Kv SourceCall::gradients(Index n, Workspace& workspace) const {
  return take_kv(workspace, Slot::expanded_gradients,
                 {static_cast<Index>(seen(n).tokens.size()), attended.heads_k(n).size(), dim_qk, dim_v, rows.dtype});
}

void SourceCall::reduce(Index n, const ConstTensorView& taken, const Kv& gradients, const TensorView& sum) const {
  const SourceRows of_step = asked(n, taken);
  TensorView to = sum;
  to.rows = of_step.rows.rows;
  source.reduce(of_step, {gradients.k, gradients.v}, to);
}

ExecutorForwardArgs with_keys(const Schedule& schedule, const ExecutorForwardArgs& args) {
  ExecutorForwardArgs all = args;
  if (args.source == nullptr) return all;
  check_source(schedule, *args.source, args.q, args.k.given() || args.v.given(), !args.device_plans.empty());
  all.k = like_keys(schedule, args.source->rows, args.q.dim);
  all.v = like_keys(schedule, args.source->rows, args.out.dim);
  return all;
}

ExecutorBackwardArgs with_keys(const Schedule& schedule, const ExecutorBackwardArgs& args) {
  ExecutorBackwardArgs all = args;
  if (args.source == nullptr) return all;
  const Source& source = *args.source;
  check_source(schedule, source, args.q, args.k.given() || args.v.given() || args.dk.given() || args.dv.given(),
               !args.device_plans.empty());
  if (!source.reduce) throw Error("the source has no function reduce", "give one for the backward");
  check_tensor(args.dsource,
               {.name = "dsource", .rows = schedule.k_rows, .heads = 1, .dim = source.rows.dim, .output = true});
  all.k = like_keys(schedule, source.rows, args.q.dim);
  all.v = like_keys(schedule, source.rows, args.dout.dim);
  // Only their shapes are looked at.
  all.dk = thd(args.dsource.data, args.dsource.dtype, all.k.rows, all.k.heads, all.k.dim);
  all.dv = thd(args.dsource.data, args.dsource.dtype, all.v.rows, all.v.heads, all.v.dim);
  return all;
}

StepGradients KeyGradients::begin(Index n) {
  if (source_ == nullptr) return home_.begin(n, !computed_(n));
  if (first_of_move(n)) {
    bool nothing = true;
    for (Index m = n; m < steps_.size() && source_->move_of(m) == source_->move_of(n); ++m)
      nothing = nothing && !computed_(m);
    sum_ = home_.begin(source_->move_of(n), nothing).to.k;
    // What travels with the rows is added at the end of the move.
    if (!nothing) clear(place_, sum_);
  }
  return {computed_(n) ? source_->gradients(n, workspace_) : Kv{}};
}

void KeyGradients::end(Index n) {
  if (source_ == nullptr) return home_.end(n);
  if (last_of_move(n)) home_.end(source_->move_of(n));
}

}  // namespace weft::run
