// Calls of the GPU kernels.
#include "cuda_faults/each_in_turn.h"
#include "cuda_faults/gpu_tensors.h"
#include "kernel/kernel_problem.h"
#include "weft/device_plan.h"
#include "weft/kernel.h"
#include "weft/plan.h"

namespace weft::test {
namespace {

struct Kind {
  const char* kernel;
  DType dtype;
  bool lasting;
};

class KernelFaults : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (const auto reason = absence(kernel(), GetParam().dtype)) GTEST_SKIP() << *reason;
  }
  static std::string kernel() { return GetParam().kernel; }
  static std::string label(const std::string& what) {
    return kernel() + " " + std::string(name(GetParam().dtype)) + (GetParam().lasting ? ", lasting, " : ", ") + what;
  }
  static long run(const Case& c) { return each_in_turn(c, GetParam().lasting); }
};
INSTANTIATE_TEST_SUITE_P(Each, KernelFaults,
                         testing::Values(Kind{"cuda.portable", DType::bf16, false},
                                         Kind{"cuda.portable", DType::f32, false},
                                         Kind{"cuda.portable", DType::bf16, true},
                                         Kind{"cuda.sm90", DType::bf16, false}, Kind{"cuda.sm90", DType::bf16, true}),
                         [](const auto& of) {
                           return std::string(of.param.kernel).substr(5) + "_" + std::string(name(of.param.dtype)) +
                                  (of.param.lasting ? "_lasting" : "");
                         });

// Several tiles of rows and keys; every row sees a key and is seen, for any `more`.
std::vector<Slice> slices_of(Index more) {
  return {{0, 90, 0, 130, -kUnlimited, 40}, {90, 150, 100, 200, -kUnlimited, 60 + more}};
}
KernelProblem problem_of(DType dtype, ViewKind view) {
  AttentionProblem p{.tq = 150, .tk = 200, .hq = 4, .hk = 2, .dqk = 64, .dv = 64, .dtype = dtype, .view = view};
  p.sink = Sink::Kind::learnable;
  return make_problem(p, slices_of(0), 5);
}

// A problem on the host with its answer, and on the GPU.
struct OnBoth {
  OnBoth(DType dtype, ViewKind view = ViewKind::thd) : problem(problem_of(dtype, view)), host(problem.p) {
    forward = gpu.bind(host.forward_args(problem));
    backward = gpu.bind(host.backward_args(problem), forward);
    backward.deterministic = true;
    forward.slices = backward.slices = slices;
  }
  // Computed on the CPU.
  std::vector<std::vector<double>> want() {
    problem.p.slices = slices;
    host.run(problem, "cpu", Pass::backward);
    return {host.forward.out.values(),   host.forward.lse.values(), host.forward.max_logit.values(),
            host.backward.dq.values(),   host.backward.dk.values(), host.backward.dv.values(),
            host.backward.dsink.values()};
  }
  // All outputs, or those of the places given: out, lse, max_logit, dq, dk, dv, dsink.
  bool is_right(const std::vector<std::vector<double>>& want,
                const std::vector<std::size_t>& places = {0, 1, 2, 3, 4, 5, 6}) const {
    const Results got = gpu.read();
    return std::all_of(places.begin(), places.end(),
                       [&](std::size_t i) { return is_close(values_of(got[i]), want[i]); });
  }
  void attend_both(const std::string& kernel) const {
    attend(forward, kernel);
    attend_backward(backward, kernel);
    device::synchronize(gpu.place());
  }
  // The right answer the first time, then the same bits.
  std::function<bool()> same_bits() {
    return [this] {
      if (first.empty()) {
        first = gpu.read();
        return is_right(want());
      }
      return same_bytes(gpu.read(), first);
    };
  }

  std::vector<Slice> slices = slices_of(0);
  KernelProblem problem;
  Outputs host;
  GpuTensors gpu;
  KernelForwardArgs forward;
  KernelBackwardArgs backward;
  Results first;
};

TEST_P(KernelFaults, ForwardAndBackward) {
  for (const ViewKind view : {ViewKind::thd, ViewKind::gaps}) {
    OnBoth t(GetParam().dtype, view);
    const std::string what = view == ViewKind::thd ? "forward and backward" : ".. of tensors with gaps";
    EXPECT_GT(run(poisoned(label(what), t.gpu, [&] { t.attend_both(kernel()); }, t.same_bits())), 20);
  }
}

// dQ summed by several blocks, and out and lse computed anew.
TEST_P(KernelFaults, BackwardAlone) {
  OnBoth t(GetParam().dtype);
  attend(t.forward, kernel());
  const auto want = t.want();
  KernelBackwardArgs args = t.backward;
  args.deterministic = false;
  args.out = args.lse = {};
  const auto call = [&] {
    attend_backward(args, kernel());
    device::synchronize(t.gpu.place());
  };
  const auto right = [&] { return t.is_right(want, {3, 4, 5, 6}); };
  EXPECT_GT(run(poisoned(label("backward alone"), t.gpu, call, right)), 20);
}

// Slices that no call had before: the lists of the last are kept, so each has to make its own.
TEST_P(KernelFaults, SlicesNeverSeenBefore) {
  OnBoth t(GetParam().dtype);
  const auto use = [&](Index more) {
    t.slices = slices_of(more);
    t.forward.slices = t.backward.slices = t.slices;
  };
  const auto call = [&] { t.attend_both(kernel()); };
  for (Index more = 1000; more < 1070; ++more) {  // as many as are kept: from here on one goes for each that comes
    use(more);
    call();
  }
  std::vector<std::vector<double>> want;
  Index last = -2;
  const auto reset = [&](long n) {
    if (n != last) {
      use(n + 1);
      want = t.want();
    }
    last = n;
    t.gpu.poison();
  };
  EXPECT_GT(run({label("slices never seen before"), reset, call, [&] { return t.is_right(want); }}), 20);
}

// Partial states, ended by finish_partial.
TEST_P(KernelFaults, PartialSteps) {
  OnBoth t(GetParam().dtype);
  const AttentionProblem& p = t.problem.p;
  const Buffer sums(DType::f32, p.tq, p.hq, p.dv);
  std::vector<RowState<float>> states(at(p.tq * p.hq));
  const DeviceBytes sums_there(t.forward.place, sums.view().data, spanned_bytes(sums.view())),
      states_there(t.forward.place, states.data(), states.size() * sizeof(RowState<float>));
  KernelForwardArgs end = t.forward;
  end.partial.sums = thd(sums_there.data(), DType::f32, p.tq, p.hq, p.dv);
  end.partial.states = static_cast<RowState<float>*>(states_there.data());
  KernelForwardArgs step = end;
  step.out = step.lse = step.max_logit = {};
  const auto want = t.want();
  const auto call = [&] {
    device::fill(step.place, step.partial.states, p.tq * p.hq);
    for (const Slice& s : t.slices) {
      step.slices = {&s, 1};
      attend(step, kernel());
    }
    finish_partial(finish_args(end));
    device::synchronize(t.gpu.place());
  };
  EXPECT_GT(run(poisoned(label("partial states"), t.gpu, call, [&] { return t.is_right(want, {0, 1, 2}); })), 20);
}

// What the kernel keeps between calls; after an error a caller begins anew.
TEST_P(KernelFaults, QuerySteps) {
  OnBoth t(GetParam().dtype);
  KernelForwardArgs f = t.forward;
  KernelBackwardArgs b = t.backward;
  f.max_logit = b.dsink = {};
  b.deterministic = false;
  const Kernel& k = find_kernel(kernel());
  if (k.takes_steps == nullptr || !k.takes_steps(f)) GTEST_SKIP() << "keeps nothing between calls";
  const Range rows[] = {{0, 90}, {90, 150}};
  const auto want = t.want();
  // Keys of the slices' own: dk and dv are written by the one call that sees them, and zeros by the other.
  const auto steps = [&](auto& args, auto&& attend_one) {
    weft::QuerySteps state{.rows = rows};
    args.steps = &state;
    for (std::size_t i = 0; i < 2; ++i) {
      args.slices = {&t.slices[i], 1};
      state.last = i == 1;
      attend_one(args);
    }
  };
  const auto call = [&] {
    steps(f, [](const KernelForwardArgs& args) { attend(args, kernel()); });
    steps(b, [](const KernelBackwardArgs& args) { attend_backward(args, kernel()); });
    device::synchronize(t.gpu.place());
  };
  EXPECT_GT(run(poisoned(label("QuerySteps"), t.gpu, call, [&] { return t.is_right(want, {0, 1, 3}); })), 20);
}

// Slices in device memory, uploaded; with the objects made and ended by the call, and with the same ones.
TEST_P(KernelFaults, DevicePlans) {
  OnBoth t(GetParam().dtype);
  Plan plan;
  plan.slices = t.slices;
  plan.q_rows = t.problem.p.tq;
  plan.k_rows = t.problem.p.tk;
  const auto attend_both = [&](DevicePlan& there) {
    there.upload(plan);
    KernelForwardArgs f = t.forward;
    KernelBackwardArgs b = t.backward;
    f.slices = b.slices = {};
    f.device_plan = b.device_plan = &there;
    attend(f, kernel());
    attend_backward(b, kernel());
    device::synchronize(t.gpu.place());
  };
  const auto made_anew = [&] {
    DeviceContext context(t.gpu.place());
    DevicePlan there(context, 10);
    attend_both(there);
    if (there.download() != t.slices) throw Error("another plan came back", "look at upload");
  };
  EXPECT_GT(run(poisoned(label("device plan, made anew"), t.gpu, made_anew, t.same_bits())), 30);
  DeviceContext context(t.gpu.place());
  DevicePlan there(context, 10);
  const auto the_same = [&] { attend_both(there); };
  EXPECT_GT(run(poisoned(label("device plan, the same one"), t.gpu, the_same, t.same_bits())), 20);
}

}  // namespace
}  // namespace weft::test
