// The order of the executor's calls (run/forward.cpp, run/backward.cpp, run/key_feed.h, run/gradient_return.cpp).
#include "cost/outline.h"
#include "index.h"

namespace weft::cost {
namespace {

class Writer {
 public:
  std::size_t post(int pattern, Index step, std::string_view name) {
    const std::size_t call = next_++ % kSlots;
    ops.push_back({Op::Kind::post, name, pattern, call, step});
    return call;
  }
  void wait(std::size_t call, int pattern, Index step, std::string_view name) {
    ops.push_back({Op::Kind::wait, name, pattern, call, step});
  }
  void both(int pattern, std::string_view name) {
    if (pattern >= 0) wait(post(pattern, -1, name), pattern, -1, name);
  }

  std::vector<Op> ops;

 private:
  std::size_t next_ = 0;
};

struct UnderWay {
  std::size_t call = 0;
  int pattern = -1;
  Index step = -1;
  std::string_view name = {};
};

}  // namespace

std::vector<Op> ops_of(const Outline& o, Pass pass) {
  Writer w;
  const auto steps = static_cast<Index>(o.steps.size());
  const auto step = [&](Index n) -> const StepOutline& { return o.steps[at(n)]; };
  const auto odd = [](Index n) { return at(n % 2); };
  UnderWay keys[2], home[2], entering[2], leaving[2];
  Index next = 0;  // the first step whose keys have not been started
  const auto wait_for = [&](UnderWay& call) {
    if (call.pattern >= 0) w.wait(call.call, call.pattern, call.step, call.name);
    call.pattern = -1;
  };
  constexpr std::string_view kKeys = "K, V", kEnter = "K, V to nodes", kGradients = "dK, dV", kHome = "dK, dV home";
  const auto enter_nodes = [&](Index n) {
    if (n < steps && step(n).enter >= 0)
      entering[odd(n)] = {w.post(step(n).enter, n, kEnter), step(n).enter, n, kEnter};
  };
  const auto start_keys = [&](Index n, bool relayed) {
    if (n < next || n >= steps || step(n).kv < 0 || (step(n).enter >= 0 && !relayed)) return;
    next = n + 1;
    wait_for(entering[odd(n)]);
    keys[odd(n)] = {w.post(step(n).kv, n, kKeys), step(n).kv, n, kKeys};
  };
  const auto leave_node = [&](Index n) {
    if (n < 0 || step(n).leave < 0) return;
    wait_for(home[odd(n)]);
    leaving[odd(n)] = {w.post(step(n).leave, n, kHome), step(n).leave, n, kHome};
  };
  const auto start = [&](int pattern, Index n, std::string_view name) {
    home[odd(n)] = {w.post(pattern, n, name), pattern, n, name};
  };

  w.both(o.swap_in, "swap in");
  enter_nodes(0);
  start_keys(0, false);
  enter_nodes(1);
  w.ops.push_back({Op::Kind::rows_begin, "clear"});
  for (Index n = 0; n < steps; ++n) {
    start_keys(n, true);
    wait_for(keys[odd(n)]);
    start_keys(n + 1, step(n).kv >= 0);
    enter_nodes(n + 2);
    if (pass == Pass::backward) {
      wait_for(home[odd(n)]);
      if (step(n).shifts && step(n).gradients >= 0) start(step(n).gradients, n, kGradients);
    }
    w.ops.push_back({Op::Kind::compute, "attend", -1, 0, n});
    if (pass == Pass::forward) continue;
    leave_node(n - 1);
    if (step(n).shifts) {
      wait_for(home[odd(n)]);
      if (step(n).home < 0) continue;
      wait_for(home[odd(n - 1)]);
      start(step(n).home, n, kHome);
    } else if (step(n).gradients >= 0) {
      wait_for(leaving[odd(n)]);
      start(step(n).gradients, n, kGradients);
    }
  }
  if (pass == Pass::backward) {
    if (steps > 1) wait_for(home[odd(steps - 2)]);
    if (steps > 0) wait_for(home[odd(steps - 1)]);
    leave_node(steps - 1);
    if (steps > 1) wait_for(leaving[odd(steps - 2)]);
    if (steps > 0) wait_for(leaving[odd(steps - 1)]);
  }
  if (pass == Pass::forward) w.ops.push_back({Op::Kind::rows_end, "end"});
  w.both(o.swap_out, "swap out");
  w.both(o.swap_home, kHome);
  if (pass == Pass::backward) w.ops.push_back({Op::Kind::rows_end, "end"});
  w.both(o.numbers, pass == Pass::forward ? "max_logit" : "dsink");
  return w.ops;
}

}  // namespace weft::cost
