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
  UnderWay keys[2], home[2];
  const auto start_keys = [&](Index n) {
    if (n < steps && step(n).kv >= 0) keys[odd(n)] = {w.post(step(n).kv, n, "K, V"), step(n).kv, n, "K, V"};
  };
  const auto wait_for = [&](UnderWay& call) {
    if (call.pattern >= 0) w.wait(call.call, call.pattern, call.step, call.name);
    call.pattern = -1;
  };
  constexpr std::string_view kGradients = "dK, dV", kHome = "dK, dV home";
  const auto start = [&](int pattern, Index n, std::string_view name) {
    home[odd(n)] = {w.post(pattern, n, name), pattern, n, name};
  };

  w.both(o.swap_in, "swap in");
  start_keys(0);
  w.ops.push_back({Op::Kind::rows_begin, "clear"});
  for (Index n = 0; n < steps; ++n) {
    wait_for(keys[odd(n)]);
    start_keys(n + 1);
    if (pass == Pass::backward) {
      wait_for(home[odd(n)]);
      if (step(n).shifts && step(n).gradients >= 0) start(step(n).gradients, n, kGradients);
    }
    w.ops.push_back({Op::Kind::compute, "attend", -1, 0, n});
    if (pass == Pass::forward) continue;
    if (step(n).shifts) {
      wait_for(home[odd(n)]);
      if (step(n).home < 0) continue;
      wait_for(home[odd(n - 1)]);
      start(step(n).home, n, kHome);
    } else if (step(n).gradients >= 0) {
      start(step(n).gradients, n, kGradients);
    }
  }
  if (pass == Pass::backward) {
    if (steps > 1) wait_for(home[odd(steps - 2)]);
    if (steps > 0) wait_for(home[odd(steps - 1)]);
  }
  if (pass == Pass::forward) w.ops.push_back({Op::Kind::rows_end, "end"});
  w.both(o.swap_out, "swap out");
  w.both(o.swap_home, kHome);
  if (pass == Pass::backward) w.ops.push_back({Op::Kind::rows_end, "end"});
  w.both(o.numbers, pass == Pass::forward ? "max_logit" : "dsink");
  return w.ops;
}

}  // namespace weft::cost
