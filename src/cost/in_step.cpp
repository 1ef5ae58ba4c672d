// Every call is collective and ranks make the same calls, so all of them can be taken through one call before the next.
#include <algorithm>

#include "cost/engine.h"
#include "index.h"
#include "weft/error.h"

namespace weft::cost {
namespace {

class InStep {
 public:
  InStep(const Outline& outline, const Machine& machine, std::size_t slots, Record& record)
      : o_(outline),
        machine_(machine),
        record_(record),
        time_(at(o_.ranks), 0.0),
        link_(time_),
        copied_(time_),
        taken_(time_),
        slots_(slots, {time_, time_, time_, time_}) {}

  void run(const Op& op) {
    switch (op.kind) {
      case Op::Kind::post:
        return post(op);
      case Op::Kind::wait:
        return wait(op);
      case Op::Kind::compute:
        return compute(op);
      case Op::Kind::rows:
        return rows(op);
    }
  }

  void finish() {
    for (Index r = 0; r < o_.ranks; ++r) record_.end(r, time_[at(r)]);
  }

 private:
  struct Slot {
    std::vector<double> posted, ready, begin, arrival;  // ready: by all that send to the rank
  };

  // For each rank the latest of the ranks it receives from, itself included.
  void latest(const Pattern& p, const std::vector<double>& of, std::vector<double>& to, bool senders) const {
    switch (p.peers) {
      case Pattern::Peers::block:
        for (Index first = 0; first < o_.ranks; first += p.size) {
          const auto begin = of.begin() + first, end = begin + p.size;
          std::fill(to.begin() + first, to.begin() + first + p.size, *std::max_element(begin, end));
        }
        return;
      case Pattern::Peers::same_place: {
        std::vector<double> most(at(p.size), 0.0);
        for (Index r = 0; r < o_.ranks; ++r) most[at(r % p.size)] = std::max(most[at(r % p.size)], of[at(r)]);
        for (Index r = 0; r < o_.ranks; ++r) to[at(r)] = most[at(r % p.size)];
        return;
      }
      case Pattern::Peers::listed: {
        const auto& begin = senders ? p.from_begin : p.to_begin;
        const auto& peers = senders ? p.from : p.to;
        for (Index r = 0; r < o_.ranks; ++r) {
          double most = of[at(r)];
          for (std::size_t i = begin[at(r)]; i < begin[at(r) + 1]; ++i) most = std::max(most, of[peers[i]]);
          to[at(r)] = most;
        }
        return;
      }
      case Pattern::Peers::spans:
        to = of;
        for_each_message(p, o_.ranks, [&](Index from, Index receiver, Index count, double) {
          const double* theirs = of.data() + (senders ? from : receiver);
          double* own = to.data() + (senders ? receiver : from);
          for (Index i = 0; i < count; ++i) own[i] = std::max(own[i], theirs[i]);
        });
        return;
    }
  }

  void post(const Op& op) {
    const Pattern& p = o_.pattern(op.pattern);
    Slot& slot = slots_[op.call];
    if (machine_.exchange_seconds > 0) {
      for (Index r = 0; r < o_.ranks; ++r) {
        record_.rows(r, op, time_[at(r)], time_[at(r)] + machine_.exchange_seconds);
        time_[at(r)] += machine_.exchange_seconds;
      }
    }
    slot.posted = time_;
    latest(p, slot.posted, slot.ready, true);
    for (Index r = 0; r < o_.ranks; ++r) {
      const Load& load = p.loads[at(r)];
      if (!load.any()) {
        slot.begin[at(r)] = slot.arrival[at(r)] = slot.posted[at(r)];
        continue;
      }
      const double begin = slot.begin[at(r)] = std::max(slot.ready[at(r)], link_[at(r)]);
      link_[at(r)] = slot.arrival[at(r)] = begin + p.seconds[at(r)];
    }
    if (p.uneven) p.peers == Pattern::Peers::spans ? late_spans(p, slot) : late_senders(p, slot);
    for (Index r = 0; r < o_.ranks; ++r) {
      if (!p.loads[at(r)].any()) continue;
      link_[at(r)] = slot.arrival[at(r)];
      record_.exchange(r, op, p.loads[at(r)], slot.begin[at(r)], slot.arrival[at(r)]);
      record_.start(r, slot.posted[at(r)], {slot.begin[at(r)], slot.arrival[at(r)], p.interference[at(r)]});
    }
  }

  // A sender with more to send than its receiver gets is what that one waits for: it shares its link among its
  // messages, so one of b bytes takes at most that of all of them, and at most b times their number.
  void late_senders(const Pattern& p, Slot& slot) const {
    const Topology topology(machine_);
    for (Index r = 0; r < o_.ranks; ++r) {
      for (std::size_t i = p.from_begin[at(r)]; i < p.from_begin[at(r) + 1]; ++i) {
        const Index s = p.from[i];
        const std::size_t l = topology.level(r, s);
        const Level& level = machine_.levels[l];
        if (!level.limits_sends || level.bandwidth == 0) continue;
        const double messages = static_cast<double>(p.to_begin[at(s) + 1] - p.to_begin[at(s)]);
        const double bytes = std::min(p.loads[at(s)].out[l], messages * p.from_bytes[i]);
        slot.arrival[at(r)] =
            std::max(slot.arrival[at(r)], slot.begin[at(s)] + level.latency + bytes / level.bandwidth);
      }
    }
  }

  // The same of messages that are alike.
  void late_spans(const Pattern& p, Slot& slot) const {
    const Topology topology(machine_);
    const std::size_t far = topology.levels() - 1;
    const Index reach = far > 0 ? machine_.levels[far - 1].ranks : 0;
    std::vector<double> messages(p.sent_messages.begin(), p.sent_messages.end()), out;
    for (const Load& load : p.loads) out.push_back(load.out[far]);
    for_each_message(p, o_.ranks, [&](Index from, Index to, Index count, double bytes) {
      if (from == to) return;
      const bool is_far = max_of(from, to) - min_of(from, to) >= reach;
      double* arrival = slot.arrival.data() + to;
      if (is_far) {
        const Level& level = machine_.levels[far];
        if (!level.limits_sends || level.bandwidth == 0) return;
        const double *begin = slot.begin.data() + from, *number = messages.data() + from, *all = out.data() + from;
        for (Index i = 0; i < count; ++i)
          arrival[i] =
              std::max(arrival[i], begin[i] + level.latency + std::min(all[i], number[i] * bytes) / level.bandwidth);
        return;
      }
      for (Index i = 0; i < count; ++i) {
        const std::size_t l = topology.level(to + i, from + i);
        const Level& level = machine_.levels[l];
        if (!level.limits_sends || level.bandwidth == 0) continue;
        const double most = std::min(p.loads[at(from + i)].out[l], messages[at(from + i)] * bytes);
        arrival[i] = std::max(arrival[i], slot.begin[at(from + i)] + level.latency + most / level.bandwidth);
      }
    });
  }

  void wait(const Op& op) {
    const Pattern& p = o_.pattern(op.pattern);
    const Slot& slot = slots_[op.call];
    for (Index r = 0; r < o_.ranks; ++r) {
      const double copying = copy_seconds(machine_, p.loads[at(r)]);
      const double start = copying > 0 ? std::max(time_[at(r)], slot.ready[at(r)]) : time_[at(r)];
      record_.wait(r, op, time_[at(r)], start);
      record_.rows(r, op, start, start + copying);
      copied_[at(r)] = start + copying;
    }
    if (machine_.progress)
      taken_ = copied_;
    else
      latest(p, copied_, taken_, false);
    for (Index r = 0; r < o_.ranks; ++r) {
      const double end = std::max(taken_[at(r)], slot.arrival[at(r)]);
      record_.wait(r, op, copied_[at(r)], end);
      time_[at(r)] = end;
    }
  }

  void compute(const Op& op) {
    for (const Work& w : o_.steps[at(op.step)].work) {
      Index r = w.rank;
      for (Index n = 0; n < o_.repeat && r < o_.ranks; ++n, r += o_.stride) {
        const double begin = time_[at(r)];
        const double end = record_.slowed(r, begin, w.seconds);
        record_.compute(r, op, begin, end, w.pairs);
        record_.rows(r, {.kind = op.kind, .name = "add", .step = op.step}, end, end + static_cast<double>(w.rows));
        time_[at(r)] = end + static_cast<double>(w.rows);
      }
    }
  }

  void rows(const Op& op) {
    for (Index r = 0; r < o_.ranks; ++r) {
      const double end = time_[at(r)] + static_cast<double>((*op.rows)[at(r)]);
      record_.rows(r, op, time_[at(r)], end);
      time_[at(r)] = end;
    }
  }

  const Outline& o_;
  const Machine& machine_;
  Record& record_;
  std::vector<double> time_, link_, copied_, taken_;
  std::vector<Slot> slots_;
};

}  // namespace

void run_in_step(const Outline& outline, const Machine& machine, Pass pass, const SimulateOptions& options,
                 Record& record) {
  const std::vector<Op> ops = ops_of(outline, pass);
  InStep engine(outline, machine, slots_of(ops), record);
  for (std::size_t n = 0; n < ops.size(); ++n) {
    engine.run(ops[n]);
    const double done = static_cast<double>(n + 1) / static_cast<double>(ops.size());
    if (options.progress != nullptr && !options.progress(done, options.context))
      throw Error("the simulation was stopped", "let it run, or ask for fewer ranks");
  }
  engine.finish();
}

}  // namespace weft::cost
