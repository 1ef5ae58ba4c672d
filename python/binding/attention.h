// What a call of attention is given, and what runs it: a plan on one rank, or an executor.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "communicator.h"
#include "held.h"
#include "tensor.h"
#include "text.h"
#include "weft/attention.h"
#include "weft/error.h"
#include "weft/executor.h"
#include "weft/plan.h"

namespace weft::python {

// What a model sets. Keeps the sink's memory alive.
struct Settings {
  std::optional<double> scale;
  double softcap = 0;
  std::optional<Array> sink;
  bool off_by_one = false;
  std::vector<Index> head_map;

  Attention attention() const {
    Attention out{.scale = scale, .softcap = softcap, .head_map = head_map};
    if (sink) out.sink = Sink::learnable(per_head_view(*sink, "sink"));
    if (off_by_one) out.sink = Sink::off_by_one();
    return out;
  }
};

// Arguments of attend or of an executor, checked as far as views of arrays can be.
template <class Args>
Args forward_args(const Array& q, const Array& k, const Array& v, Format format, const Settings& settings,
                  const Array& out, const std::optional<Array>& lse, const std::optional<Array>& max_logit,
                  std::uintptr_t stream) {
  Args args{
      .q = view(q, "q", format),
      .k = view(k, "k", format),
      .v = view(v, "v", format),
      .attention = settings.attention(),
      .out = view(out, "out", format, Use::write),
      .place = place_of(
          {{"q", q}, {"k", k}, {"v", v}, {"sink", settings.sink}, {"out", out}, {"lse", lse}, {"max_logit", max_logit}},
          stream)};
  if (lse) args.lse = token_heads_view(*lse, "lse", format, Use::write);
  if (max_logit) args.max_logit = per_head_view(*max_logit, "max_logit", Use::write);
  return args;
}

struct Gradients {
  const Array &dq, &dk, &dv;
  const std::optional<Array>& dsink;
};

template <class Args>
Args backward_args(const Array& q, const Array& k, const Array& v, Format format, const Settings& settings,
                   const Array& out, const Array& lse, const Array& dout, const Gradients& to, std::uintptr_t stream) {
  Args args{.q = view(q, "q", format),
            .k = view(k, "k", format),
            .v = view(v, "v", format),
            .attention = settings.attention(),
            .dout = view(dout, "dout", format),
            .out = view(out, "out", format),
            .lse = token_heads_view(lse, "lse", format),
            .dq = view(to.dq, "dq", format, Use::write),
            .dk = view(to.dk, "dk", format, Use::write),
            .dv = view(to.dv, "dv", format, Use::write),
            .place = place_of({{"q", q},
                               {"k", k},
                               {"v", v},
                               {"sink", settings.sink},
                               {"out", out},
                               {"lse", lse},
                               {"dout", dout},
                               {"dq", to.dq},
                               {"dk", to.dk},
                               {"dv", to.dv},
                               {"dsink", to.dsink}},
                              stream)};
  if (to.dsink) args.dsink = per_head_view(*to.dsink, "dsink", Use::write);
  return args;
}

// The whole problem, on the one rank there is.
struct OneRank {
  using Forward = ForwardArgs;
  using Backward = BackwardArgs;

  void check_rows(const ConstTensorView& q, const ConstTensorView& k) const {
    if (q.rows != plan.q_rows || k.rows != plan.k_rows)
      throw Error(text("q has ", q.rows, " rows and k has ", k.rows, ", but the packing has ", plan.q_rows, " and ",
                       plan.k_rows, " tokens"),
                  "make cu_seqlens end with the rows of the tensors, or cut the tensors");
  }
  void forward(ForwardArgs& args, Index) const {
    check_rows(args.q, args.k);
    args.slices = plan.slices;
    attend(args, kernel);
  }
  void backward(BackwardArgs& args, Index) const {
    check_rows(args.q, args.k);
    args.slices = plan.slices;
    args.deterministic = deterministic;
    attend_backward(args, kernel);
  }

  Plan plan;
  std::string kernel;
  bool deterministic;
};

// An executor with the communicator it needs.
struct HeldExecutor {
  using Forward = ExecutorForwardArgs;
  using Backward = ExecutorBackwardArgs;

  // observe: `events` are those of the last pass.
  HeldExecutor(Comm& comm, Schedule schedule, ExecutorOptions options, bool observe)
      : comm(comm),
        last(options.place),
        executor(comm.get(), std::move(schedule), observed(std::move(options), observe ? events.get() : nullptr)) {}

  void forward(ExecutorForwardArgs& args, Index layer) {
    const InTurn turn(comm);
    events->clear();
    args.layer = layer;
    last.use(args.place);
    executor.forward(args);
  }
  void backward(ExecutorBackwardArgs& args, Index layer) {
    const InTurn turn(comm);
    events->clear();
    args.layer = layer;
    last.use(args.place);
    executor.backward(args);
  }

  static ExecutorOptions observed(ExecutorOptions options, std::vector<StepEvent>* events) {
    if (events != nullptr) options.observer = [events](const StepEvent& event) { events->push_back(event); };
    return options;
  }

  Comm& comm;  // kept alive by Python
  LastStream last;
  std::unique_ptr<std::vector<StepEvent>> events = std::make_unique<std::vector<StepEvent>>();
  Executor executor;
};

}  // namespace weft::python
