// Attention in CUDA graphs: captured once, replayed on other cu_seqlens. Each replay against the dense formula and, bit
// for bit, against the same kernel with the host's slices.
#include <algorithm>
#include <tuple>

#include "refusal.h"
#include "run/cuda/graph_rank.h"

namespace weft::test {
namespace {

using GpuGraph = GpuTest;
WEFT_FOR_EACH_GPU_KERNEL(GpuGraph);

// --- Replays are right, and bit for bit what the host's slices give ---

std::vector<Setting> settings() {
  constexpr std::pair<Index, Index> kDims[] = {{64, 64}, {128, 128}, {40, 24}, {192, 128}, {256, 256}};
  const Mask masks[] = {{.causal = true}, {.left = 40, .right = 9}, {.causal = true, .chunk = 50}};
  std::vector<Setting> all;
  for (const Mask& mask : masks)
    for (const LayoutKind kind :
         {LayoutKind::dual_chunk, LayoutKind::zigzag, LayoutKind::contiguous, LayoutKind::striped})
      for (const bool sequence_order : {false, true}) {
        if (sequence_order && kind == LayoutKind::striped) continue;
        Setting s{kind, sequence_order, mask};
        const std::size_t n = all.size();
        s.ranks = 2 + static_cast<Index>(n % 3);
        s.rank = static_cast<Index>(n / 2) % s.ranks;
        std::tie(s.dqk, s.dv) = kDims[n % 5];
        s.sink = n % 2 == 0 ? Sink::Kind::learnable : n % 3 == 0 ? Sink::Kind::off_by_one : Sink::Kind::none;
        if (n % 4 == 1) s.head_map = {1, 0};
        all.push_back(s);
      }
  all.resize(std::min<std::size_t>(all.size(), random_problems(all.size())));
  return all;
}

TEST_P(GpuGraph, ReplaysOnOtherOffsets) {
  Judge judge(dtype(), false);
  unsigned seed = 100;
  for (const Setting& setting : settings()) {
    SCOPED_TRACE(setting.name());
    Rank rank(setting, dtype(), seed % 2 == 0);
    const auto forward = rank.plan_and([&] { attend(rank.forward(), gpu_kernel); });
    const auto same_bits = rank.plan_and([&] { attend_backward(rank.backward(true), gpu_kernel); });
    const auto backward = rank.plan_and([&] { attend_backward(rank.backward(false), gpu_kernel); });
    for (const Lengths& lengths : all_lengths()) {
      SCOPED_TRACE(lengths.name);
      const KernelProblem problem = rank.problem(lengths, ++seed);
      const Outputs got(problem.p), again(problem.p), want(problem.p);
      rank.set_offsets(lengths);
      rank.set(problem, got);
      rank.launch(*forward);
      rank.launch(*same_bits);
      rank.read(got);
      rank.set(problem, again, true);
      rank.launch(*backward);
      rank.read(again);
      ASSERT_NO_THROW(rank.context().check());
      gpu_run(want, problem, Pass::backward, true);
      expect_same_by_plan(got, want);
      // dq's last bits may differ without `deterministic`; those of the keys may not.
      EXPECT_EQ(bits(again.backward.dk), bits(got.backward.dk));
      EXPECT_EQ(bits(again.backward.dv), bits(got.backward.dv));
      expect_same_sums(again.backward.dk, want.backward.dk);
      expect_same_sums(again.backward.dv, want.backward.dv);
      EXPECT_EQ(bits(again.backward.dsink), bits(got.backward.dsink));
      const check::Expected exact = expected_of(problem, Pass::backward);
      judge.forward(got.forward, exact, problem.p);
      judge.backward(got.backward, exact, problem.p);
      judge.backward(again.backward, exact, problem.p);
      if (HasFailure()) return;
    }
  }
}

// More rows than one tile has; too many for the dense formula.
TEST_P(GpuGraph, ManyTiles) {
  const Setting settings[] = {{LayoutKind::dual_chunk, false, {.causal = true, .chunk = 300}, 2, 1},
                              {LayoutKind::zigzag, true, {.left = 200, .right = 30}, 3, 0},
                              {LayoutKind::striped, false, {.causal = true}, 2, 0},
                              {LayoutKind::contiguous, false, {.causal = true}, 4, 3},
                              {LayoutKind::zigzag, false, {.causal = true}, 2, 1, 576, 512}};
  for (Setting setting : settings) {
    if (refusal({.pass = Pass::backward, .dim_qk = setting.dqk, .dim_v = setting.dv})) continue;
    setting.scale = 7;
    if (setting.dqk < 256) setting.dqk = setting.dv = 128;
    SCOPED_TRACE(setting.name());
    Rank rank(setting, dtype(), false);
    const auto graph = rank.plan_and([&] {
      attend(rank.forward(), gpu_kernel);
      attend_backward(rank.backward(true), gpu_kernel);
    });
    for (const Lengths& lengths : all_lengths()) {
      SCOPED_TRACE(lengths.name);
      const KernelProblem problem = rank.problem(lengths, 3);
      const Outputs got(problem.p), want(problem.p);
      rank.replay(*graph, lengths, problem, got);
      ASSERT_NO_THROW(rank.context().check());
      gpu_run(want, problem, Pass::backward, true);
      expect_same_by_plan(got, want);
      if (HasFailure()) return;
    }
  }
}

// Called without a graph, and with out and lse left to the backward: the same.
TEST_P(GpuGraph, AlsoWithoutAGraph) {
  const Setting setting{LayoutKind::zigzag, true, {.causal = true}, 3, 1, 128, 128, Sink::Kind::learnable};
  Rank rank(setting, dtype(), false);
  KernelBackwardArgs alone = rank.backward(true);
  alone.out = alone.lse = {};
  const auto graph = rank.plan_and([&] { attend_backward(alone, gpu_kernel); });
  for (const Lengths& lengths : all_lengths()) {
    SCOPED_TRACE(lengths.name);
    const KernelProblem problem = rank.problem(lengths, 7);
    const Outputs got(problem.p), by_graph(problem.p), want(problem.p);
    rank.set_offsets(lengths);
    rank.set(problem, got);
    rank.plan().plan(rank.plan_args());
    attend(rank.forward());  // the best kernel that can
    attend_backward(alone, gpu_kernel);
    expect_ok(cudaStreamSynchronize(rank.stream()));
    rank.read(got);
    KernelBackwardArgs host = want.backward_args(problem);
    host.out = host.lse = {};
    host.deterministic = true;
    gpu_attend_backward(host);
    expect_same_sums(got.backward.dq, want.backward.dq);
    expect_same_sums(got.backward.dk, want.backward.dk);
    expect_same_sums(got.backward.dv, want.backward.dv);
    rank.set(problem, by_graph);
    rank.launch(*graph);
    rank.read(by_graph);
    EXPECT_EQ(bits(by_graph.backward.dq), bits(got.backward.dq));
    expect_same_sums(by_graph.backward.dk, want.backward.dk);
    Judge judge(dtype(), false);
    judge.forward(got.forward, expected_of(problem, Pass::forward), problem.p);
  }
}

// Sums of f32 on the device, and where they are read to.
struct DeviceSums {
  DeviceSums(Index rows, Index heads, Index dim) : host(DType::f32, rows, heads, dim), device(host.view()) {}
  TensorView view() const { return device.like(host.view()); }
  // All zeros, or NaN where they are written before they are read.
  void clear(bool zeros) {
    Buffer fresh(DType::f32, host.view().rows, host.view().heads, host.view().dim);
    if (zeros) fresh.set(std::vector<double>(fresh.values().size()));
    device.set(fresh.view());
  }
  std::vector<double> read() const {
    device.read(host.view());
    return host.values();
  }
  Buffer host;
  Mirror device;
};

// Steps over parts of the keys, as in a ring: partial states, and gradients that are added up.
TEST_P(GpuGraph, PartsOfTheKeys) {
  const Index rows = rows_for(LayoutKind::zigzag, kTokens, 2);
  const Setting setting{LayoutKind::zigzag, false, {.causal = true}, 2, 1, 64, 64, Sink::Kind::learnable};
  Rank rank(setting, dtype(), false);
  const auto args_of = [&](Index keys) {
    DevicePlanArgs args = rank.plan_args();
    args.k_runs = DeviceLayout{setting.kind, 2}.runs(keys);
    return args;
  };
  DevicePlan plans[] = {{rank.context(), device_plan_capacity(args_of(0))},
                        {rank.context(), device_plan_capacity(args_of(1))}};
  const auto part = [&](auto view, Index keys) {  // rows of one rank's keys
    view.data =
        const_cast<char*>(static_cast<const char*>(view.data)) + keys * rows * view.row_stride * size_of(view.dtype);
    view.rows = rows;
    return view;
  };
  const KernelProblem shape = rank.problem({"", 0, {}, {}}, 1);
  const AttentionProblem& s = shape.p;
  DeviceSums sums(s.tq, s.hq, s.dv), dq(2 * s.tq, s.hq, s.dqk), dk(s.tk, s.hk, s.dqk), dv(s.tk, s.hk, s.dv);
  const std::vector<RowState<float>> empty(at(s.tq * s.hq));
  DeviceArray<RowState<float>> states(empty);
  const auto graph = rank.plan_and([&] {
    KernelForwardArgs forward = rank.forward();
    const KernelForwardArgs whole = forward;
    forward.out = forward.lse = forward.max_logit = {};
    forward.partial = {sums.view(), states.get()};
    for (const Index keys : {0, 1}) {
      plans[keys].plan(args_of(keys));
      forward.device_plan = &plans[keys];
      read_from(forward, whole.q, part(whole.k, keys), part(whole.v, keys));
      attend(forward, gpu_kernel);
    }
    KernelForwardArgs finish = whole;
    finish.partial = forward.partial;
    finish_partial(finish_args(finish));
    KernelBackwardArgs backward = rank.backward(true);
    for (const Index keys : {0, 1}) {
      KernelBackwardArgs step = backward;
      step.device_plan = &plans[keys];
      read_from(step, backward.q, part(backward.k, keys), part(backward.v, keys));
      float* const own_dq = static_cast<float*>(dq.view().data) + keys * s.tq * s.hq * s.dqk;
      write_to(step, thd(own_dq, DType::f32, s.tq, s.hq, s.dqk), part(dk.view(), keys), part(dv.view(), keys));
      step.dsink = {};
      step.add_keys = true;
      attend_backward(step, gpu_kernel);
    }
  });
  Judge judge(dtype(), false);
  for (const Lengths& lengths : all_lengths()) {
    SCOPED_TRACE(lengths.name);
    const KernelProblem problem = rank.problem(lengths, 9);
    const Outputs got(problem.p);
    rank.set_offsets(lengths);
    rank.set(problem, got);
    states.set(empty);
    for (DeviceSums* written : {&sums, &dq}) written->clear(false);
    for (DeviceSums* added : {&dk, &dv}) added->clear(true);
    rank.launch(*graph);
    rank.read(got);
    ASSERT_NO_THROW(rank.context().check());
    std::vector<double> sum = dq.read();
    const std::size_t half = sum.size() / 2;
    for (std::size_t i = 0; i < half; ++i) sum[i] += sum[half + i];
    sum.resize(half);
    const check::Expected exact =
        check::expected(problem.dense(), problem.dout(), check::kernel_arithmetic(dtype(), DType::f32));
    judge.forward(got.forward, expected_of(problem, Pass::forward), problem.p);
    judge.close("dq", sum, exact.dq, s.hq, s.dqk);
    judge.close("dk", dk.read(), exact.dk, s.hk, s.dqk);
    judge.close("dv", dv.read(), exact.dv, s.hk, s.dv);
  }
}

// --- Wrong offsets ---

void expect_all(const Buffer& buffer, double value, const char* name) {
  for (const double x : buffer.values()) ASSERT_EQ(x, value) << name;
}
void expect_nothing(const Outputs& got) {
  expect_all(got.forward.out, 0, "out");
  expect_all(got.forward.lse, kMinusInfinity<double>, "lse");
  expect_all(got.forward.max_logit, kMinusInfinity<double>, "max_logit");
  expect_all(got.backward.dq, 0, "dq");
  expect_all(got.backward.dk, 0, "dk");
  expect_all(got.backward.dv, 0, "dv");
}

TEST_P(GpuGraph, WrongOffsetsGiveZerosAndAnErrorOnce) {
  const Setting setting{LayoutKind::dual_chunk, false, {.causal = true}, 2, 1};
  Rank rank(setting, dtype(), false);
  const Lengths good = all_lengths()[0];
  const std::vector<Index> falling = {0, 40, 36, 80, 80, 80, 80, 80, 80, 80};
  for (const bool deterministic : {false, true}) {
    const auto forward = rank.plan_and([&] { attend(rank.forward(), gpu_kernel); });
    const auto backward = rank.plan_and([&] { attend_backward(rank.backward(deterministic), gpu_kernel); });
    const KernelProblem problem = rank.problem(good, 5);
    const Outputs want(problem.p);
    gpu_run(want, problem, Pass::backward, true);
    const auto replayed = [&] {
      Outputs got(problem.p);
      rank.set(problem, got);
      rank.launch(*forward);
      rank.launch(*backward);
      rank.read(got);
      return got;
    };
    const auto expect_good = [&] {
      rank.set_offsets(good);
      const Outputs got = replayed();
      EXPECT_EQ(bits(got.forward.out), bits(want.forward.out));
      expect_same_sums(got.backward.dk, want.backward.dk);
    };
    const auto expect_bad = [&] {
      rank.set_offsets(falling, falling);
      expect_nothing(replayed());
    };
    const std::initializer_list<std::string> says = {"sequence 1: cu_seqlens[2] = 36 is less than cu_seqlens[1] = 40"};
    expect_good();
    expect_bad();
    expect_refusal([&] { attend(rank.forward(), gpu_kernel); }, says);
    EXPECT_NO_THROW(rank.context().check());
    expect_good();
    EXPECT_NO_THROW(rank.context().check());
    // A good replay before anybody asked: right, and the fault is not forgotten. In a capture it is thrown and stays.
    expect_bad();
    expect_good();
    cudaGraphDestroy(captured(rank.stream(), [&] {
      expect_refusal([&] { attend_backward(rank.backward(deterministic), gpu_kernel); }, says);
      expect_refusal([&] { rank.plan().plan(rank.plan_args()); }, says);
    }));
    expect_refusal([&] { attend_backward(rank.backward(deterministic), gpu_kernel); }, says);
    EXPECT_NO_THROW(rank.context().check());
    expect_bad();
    expect_refusal([&] { rank.context().check(); }, says);
    expect_good();
    EXPECT_NO_THROW(rank.context().check());
  }
}

// --- What is refused ---

TEST_P(GpuGraph, Refusals) {
  const Setting setting{LayoutKind::zigzag, false, {.causal = true}, 2, 1};
  Rank rank(setting, dtype(), false);
  expect_refusal([&] { attend(rank.forward()); }, {"0 query rows", "plan"});  // before there is a plan
  rank.plan().plan(rank.plan_args());
  const Slice some[] = {{0, 1, 0, 1}};
  const TestStream other;
  const auto each = [&](const auto& change, std::initializer_list<std::string> says) {
    KernelForwardArgs forward = rank.forward();
    KernelBackwardArgs backward = rank.backward(false);
    change(forward);
    change(backward);
    expect_refusal([&] { attend(forward, gpu_kernel); }, says);
    expect_refusal([&] { attend_backward(backward, gpu_kernel); }, says);
  };
  each([&](auto& args) { args.slices = some; }, {"1 slices and a device_plan"});
  each([&](auto& args) { args.place = {}; }, {"device_plan", "memory of the CPU"});
  each([&](auto& args) { args.place.stream = other.stream; }, {"another stream of GPU 0"});
  DevicePlan wide(rank.context(), 100);
  DevicePlanArgs more = rank.plan_args();
  more.q.tokens += 4;
  wide.plan(more);
  each([&](auto& args) { args.device_plan = &wide; }, {"device_plan is for 122 query rows and 244 key rows"});
  for (const char* kernel : {"reference", "cpu"})
    expect_refusal([&] { attend(rank.forward(), kernel); }, {"tensors lie on a GPU"});
  expect_refusal([&] { reference_forward(rank.forward()); }, {"device_plan", "host"});
  expect_ok(cudaStreamSynchronize(rank.stream()));
}

// --- What a graph holds ---

struct Nodes {
  int kernels = 0, memsets = 0, others = 0, given = 0, taken = 0;

  explicit Nodes(cudaGraph_t graph) {
    std::size_t count = 0;
    expect_ok(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    expect_ok(cudaGraphGetNodes(graph, nodes.data(), &count));
    for (const cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type{};
      expect_ok(cudaGraphNodeGetType(node, &type));
      ++(type == cudaGraphNodeTypeKernel     ? kernels
         : type == cudaGraphNodeTypeMemset   ? memsets
         : type == cudaGraphNodeTypeMemAlloc ? given
         : type == cudaGraphNodeTypeMemFree  ? taken
                                             : others);
    }
    cudaGraphDestroy(graph);
  }
};

// Also written down in docs/performance.md.
TEST_P(GpuGraph, FewLaunches) {
  const Setting setting{LayoutKind::zigzag, true, {.causal = true}, 2, 1, 128, 128};
  Rank rank(setting, dtype(), false);
  KernelForwardArgs forward = rank.forward();
  forward.max_logit = {};
  const auto nodes = [&](const std::function<void()>& work) { return Nodes(captured(rank.stream(), work)); };
  expect_ok(cudaStreamSynchronize(rank.stream()));
  const Nodes plan = nodes([&] { rank.plan().plan(rank.plan_args()); });
  EXPECT_EQ(plan.kernels, 1);
  EXPECT_EQ(plan.memsets + plan.others + plan.given, 0);
  const Nodes f = nodes([&] { attend(forward, gpu_kernel); });
  const int lists = gpu_kernel == kSm90 ? 3 : 2;
  EXPECT_EQ(f.kernels, lists + 1);
  EXPECT_EQ(f.memsets, 1);
  for (const bool deterministic : {false, true}) {
    const Nodes b = nodes([&] { attend_backward(rank.backward(deterministic), gpu_kernel); });
    EXPECT_EQ(b.kernels, lists + 3);  // the rows' statistics, dK and dV, dQ
    EXPECT_EQ(b.memsets, gpu_kernel == kSm90 ? 1 : deterministic ? 2 : 3);
    EXPECT_EQ(b.others, 0);
    EXPECT_EQ(b.given, b.taken);  // all memory is the graph's own, and given back in it
  }
  EXPECT_EQ(f.others, 0);
  EXPECT_EQ(f.given, f.taken);
}

}  // namespace
}  // namespace weft::test
