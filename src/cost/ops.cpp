// The order of the executor's calls (run/forward.cpp, run/backward.cpp, run/swap.cpp, run/key_feed.h,
// run/query_moves.h, run/gradient_return.cpp).
#include <algorithm>

#include "cost/outline.h"
#include "index.h"

namespace weft::cost {
namespace {

class Writer {
 public:
  struct UnderWay {
    std::size_t call = 0;
    int pattern = -1;
    Index step = -1;
    std::string_view name = {};
  };

  // Of no pattern: nothing.
  UnderWay post(int pattern, Index step, std::string_view name) {
    if (pattern < 0) return {};
    const std::size_t call = at(std::find(taken_.begin(), taken_.end(), false) - taken_.begin());
    if (call == taken_.size()) taken_.push_back(false);
    taken_[call] = true;
    ops.push_back({Op::Kind::post, name, pattern, call, step});
    return {call, pattern, step, name};
  }
  void wait_for(UnderWay& call) {
    if (call.pattern >= 0) {
      ops.push_back({Op::Kind::wait, call.name, call.pattern, call.call, call.step});
      taken_.at(call.call) = false;
    }
    call.pattern = -1;
  }
  void rows(const std::vector<float>& seconds, std::string_view name) {
    ops.push_back({.kind = Op::Kind::rows, .name = name, .rows = &seconds});
  }

  std::vector<Op> ops;

 private:
  std::vector<bool> taken_;
};

using UnderWay = Writer::UnderWay;

// Queries of other ranks and what comes of them: run/query_moves.h.
class Queries {
 public:
  Queries(Writer& w, const Outline& o)
      : w_(w), o_(o), last_(o.query_moves.size(), -1), there_(last_.size()), home_(last_.size()) {
    Index first_use = -1, first_move = -1;
    for (Index n = 0; n < static_cast<Index>(o.steps.size()); ++n) {
      const StepOutline& step = o.steps[at(n)];
      if (step.kv >= 0 && first_move < 0) first_move = n;
      if (step.queries.begin == 0) continue;
      if (first_use < 0) first_use = n;
      for (Index m = step.queries.begin; m < step.queries.end; ++m) last_[at(m - 1)] = n;
    }
    before_keys_ = first_move < 0 || first_use < first_move;
  }
  void before_keys(Index n) {
    if (n == 0 && before_keys_) start();
  }
  void after_keys(Index n) {
    if (n == 0 && !before_keys_) start();
    const Range used = o_.steps[at(n)].queries;
    for (Index m = used.begin; m < used.end; ++m)
      if (m > 0) w_.wait_for(there_[at(m - 1)]);
  }
  void end(Index n) {
    for (std::size_t m = 0; m < last_.size(); ++m)
      if (last_[m] == n) home_[m] = w_.post(o_.query_moves[m].back, n, "results home");
  }
  void finish() {
    for (UnderWay& each : home_) {
      w_.wait_for(each);
      w_.rows(o_.merge_rows, "merge");
    }
  }

 private:
  void start() {
    for (std::size_t m = 0; m < there_.size(); ++m) there_[m] = w_.post(o_.query_moves[m].there, 0, "queries");
  }

  Writer& w_;
  const Outline& o_;
  std::vector<Index> last_;  // by move: the last step about it
  std::vector<UnderWay> there_, home_;
  bool before_keys_ = false;
};

// Moves of keys before each step (run/step_list.h).
std::vector<Index> turns_of(const Outline& o, Range steps) {
  std::vector<Index> turns;
  Index moves = 0;
  for (Index n = steps.begin; n < steps.end; ++n) {
    turns.push_back(o.steps[at(n)].again ? moves - 1 : moves);
    moves += o.steps[at(n)].kv >= 0 ? 1 : 0;
  }
  return turns;
}

// The steps of a head group: run/forward.cpp and run/backward.cpp, attend_steps.
void write_steps(Writer& w, const Outline& o, const HeadGroupOutline& group, Pass pass) {
  const Index steps = group.steps.size(), first = group.steps.begin;
  const auto step = [&](Index n) -> const StepOutline& { return o.steps[at(first + n)]; };
  const auto moves = [&](Index n) { return n < steps && step(n).kv >= 0; };
  const std::vector<Index> turns = turns_of(o, group.steps);
  const auto odd = [&](Index n) { return at(turns[at(n)] % 2); };
  const auto next_move = [&](Index n) {
    for (++n; n < steps && !moves(n);) ++n;
    return n;
  };
  const auto source = [&](Index n) {  // of keys that a step reads again
    while (step(n).again) --n;
    return n;
  };
  Queries queries(w, o);
  UnderWay keys[2], home[2], entering[2], leaving[2];
  Index next = 0;  // the first step whose keys have not been started
  constexpr std::string_view kKeys = "K, V", kEnter = "K, V to nodes", kGradients = "dK, dV", kHome = "dK, dV home";
  const auto enter_nodes = [&](Index n) {
    if (n < steps && step(n).enter >= 0) entering[odd(n)] = w.post(step(n).enter, first + n, kEnter);
  };
  const auto start_keys = [&](Index n, bool relayed) {
    if (n < next || n >= steps || step(n).kv < 0 || (step(n).enter >= 0 && !relayed)) return;
    next = n + 1;
    w.wait_for(entering[odd(n)]);
    keys[odd(n)] = w.post(step(n).kv, first + n, kKeys);
  };
  const auto leave_node = [&](Index n) {
    if (n < 0 || step(n).leave < 0) return;
    w.wait_for(home[odd(n)]);
    leaving[odd(n)] = w.post(step(n).leave, first + n, kHome);
  };
  const auto start = [&](int pattern, Index n, std::string_view name) {
    home[odd(n)] = w.post(pattern, first + n, name);
  };

  enter_nodes(0);
  start_keys(0, false);
  enter_nodes(1);
  w.rows(group.begin_rows, "clear");
  for (Index n = 0; n < steps; ++n) {
    queries.before_keys(first + n);
    start_keys(n, true);
    if (moves(n)) w.wait_for(keys[odd(n)]);
    start_keys(next_move(n), step(n).enter >= 0);
    enter_nodes(n + 2);
    queries.after_keys(first + n);
    if (pass == Pass::backward && moves(n)) {
      w.wait_for(home[odd(n)]);
      if (step(n).shifts && step(n).gradients >= 0) start(step(n).gradients, n, kGradients);
    }
    w.ops.push_back({Op::Kind::compute, "attend", -1, 0, first + n});
    queries.end(first + n);
    if (pass == Pass::forward) continue;
    leave_node(n - 1);
    if (n + 1 < steps && step(n + 1).again) continue;
    if (const Index from = source(n); from < n) {
      start(step(from).gradients, n, kGradients);
    } else if (step(n).shifts) {
      w.wait_for(home[odd(n)]);
      if (step(n).home < 0) continue;
      w.wait_for(home[odd(n - 1)]);
      start(step(n).home, n, kHome);
    } else if (step(n).gradients >= 0) {
      w.wait_for(leaving[odd(n)]);
      start(step(n).gradients, n, kGradients);
    }
  }
  if (pass == Pass::backward && steps > 0) {
    const std::size_t last = odd(steps - 1), before = 1 - last;
    w.wait_for(home[before]);
    w.wait_for(home[last]);
    leave_node(steps - 1);
    w.wait_for(leaving[before]);
    w.wait_for(leaving[last]);
  }
  queries.finish();
  w.rows(group.end_rows, "end");
}

}  // namespace

std::size_t slots_of(const std::vector<Op>& ops) {
  std::size_t slots = 1;  // ops that are no calls have slot 0
  for (const Op& op : ops)
    if (op.kind == Op::Kind::post) slots = std::max(slots, op.call + 1);
  return slots;
}

void Outline::set_head_groups(Index count) {
  const auto each = static_cast<Index>(steps.size()) / count;
  for (Index n = 0; n < count; ++n) {
    HeadGroupOutline& group = head_groups.emplace_back();
    group.steps = {n * each, (n + 1) * each};
    group.begin_rows.assign(at(ranks), 0);
    group.end_rows.assign(at(ranks), 0);
  }
  merge_rows.assign(at(ranks), 0);
  last_rows.assign(at(ranks), 0);
}

// Swaps as in run/swap.cpp.
std::vector<Op> ops_of(const Outline& o, Pass pass) {
  Writer w;
  UnderWay arriving, leaving, home;
  const auto bring = [&](std::size_t n) {
    if (n < o.head_groups.size())
      arriving = w.post(o.head_groups[n].swap_in, n == 0 ? -1 : o.head_groups[n].steps.begin, "swap in");
  };
  bring(0);
  for (std::size_t n = 0; n < o.head_groups.size(); ++n) {
    const HeadGroupOutline& group = o.head_groups[n];
    w.wait_for(arriving);
    bring(n + 1);
    write_steps(w, o, group, pass);
    w.wait_for(leaving);
    w.wait_for(home);
    const Index step = n + 1 == o.head_groups.size() ? -1 : group.steps.end - 1;
    leaving = w.post(group.swap_out, step, "swap out");
    home = w.post(group.swap_home, step, "dK, dV home");
  }
  w.wait_for(leaving);
  w.wait_for(home);
  w.rows(o.last_rows, "end");
  UnderWay numbers = w.post(o.numbers, -1, pass == Pass::forward ? "max_logit" : "dsink");
  w.wait_for(numbers);
  return w.ops;
}

}  // namespace weft::cost
