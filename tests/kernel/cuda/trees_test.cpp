// Trees on GPUs: a slice a node, and joined as a Problem does; more branches than one in a tile of rows, shorter nodes
// than a tile of keys, NaN around them.
#include "kernel/cuda/gpu_problem.h"

namespace weft::test {
namespace {

using GpuTrees = GpuTest;
WEFT_FOR_EACH_GPU_KERNEL(GpuTrees);

std::vector<KernelProblem> tree_problems(DType dtype) {
  std::vector<KernelProblem> problems;
  Random random(61);
  const auto add = [&](const std::string& name, const check::TreeShape& tree, Index heads, Index dim) {
    constexpr Index kFirst = 5, kPadding = 7;  // rows before and after the tree
    AttentionProblem p{.hq = heads, .hk = 1, .dqk = dim, .dv = dim, .dtype = dtype};
    p.tq = p.tk = kFirst + tree.rows() + kPadding;
    p.slices = check::tree_slices(tree, kFirst);
    problems.push_back({name, p});
  };
  add("nodes of 64", check::even_tree(4, 2, 64), 2, 128);
  add("nodes of 13", check::even_tree(5, 2, 13), 4, 64);
  add("answers", check::answers_tree(90, 4, 110), 2, 128);
  add("long prompt", check::answers_tree(300, 2, 41), 1, 128);
  add("history", check::history_tree(8, 50, 9, false), 1, 256);
  add("any", check::random_tree(40, 30, [&](Index low, Index high) { return random.index(low, high); }), 4, 128);
  // So many rows see the prompt's keys that several blocks of cuda.sm90 share them in the backward.
  add("short prompt", check::answers_tree(40, 60, 30), 4, 128);
  add("short prompt, narrow", check::answers_tree(40, 60, 30), 4, 64);
  for (KernelProblem& problem : problems) problem.p.fill(random);
  return problems;
}

// Outputs of the problem's tensors with other slices.
void run_slices(const Outputs& to, const KernelProblem& problem, std::span<const Slice> slices, bool deterministic) {
  KernelForwardArgs forward = to.forward_args(problem);
  forward.slices = slices;
  gpu_attend(forward);
  KernelBackwardArgs backward = to.backward_args(problem);
  backward.slices = slices;
  backward.deterministic = deterministic;
  gpu_attend_backward(backward);
}

std::vector<Slice> joined_by_problem(const AttentionProblem& p) {
  return Problem(lengths({p.tq}), {.slices = p.slices}).global_slices();
}

TEST_P(GpuTrees, AreAsTheDenseFormulaSays) {
  Judge judge(dtype(), false);
  for (const Judged& j : judged(dtype(), Pass::backward, tree_problems)) {
    const std::vector<Slice> joined = joined_by_problem(j.problem.p);
    EXPECT_EQ(joined == j.problem.p.slices, j.problem.name.find(" prompt") != std::string::npos);  // of short answers
    for (const bool deterministic : {false, true}) {
      for (const std::vector<Slice>& slices : {j.problem.p.slices, joined}) {
        SCOPED_TRACE(testing::Message() << j.problem.name << ", " << slices.size() << " slices, " << deterministic);
        const Outputs got(j.problem.p);
        run_slices(got, j.problem, slices, deterministic);
        judge.forward(got.forward, j.want, j.problem.p);
        judge.backward(got.backward, j.want, j.problem.p);
      }
    }
  }
}

// Too many nodes for the dense formula: a slice a node and joined slices give the same to rounding.
TEST_P(GpuTrees, OfAThousandNodes) {
  const check::TreeShape tree = check::even_tree(10, 2, 17);
  KernelProblem nodes{"", {.hq = 4, .hk = 1, .dqk = 64, .dv = 64, .dtype = dtype()}};
  nodes.p.tq = nodes.p.tk = tree.rows();
  nodes.p.slices = check::tree_slices(tree);
  Random random(62);
  nodes.p.q_used.assign(at(nodes.p.tq), true);
  nodes.p.k_used = nodes.p.q_used;
  const auto filled_buffer = [&](Index heads) {
    Buffer b(dtype(), nodes.p.tq, heads, 64);
    b.set(random.values(nodes.p.tq * heads * 64));
    return b;
  };
  nodes.p.q = filled_buffer(4), nodes.p.k = filled_buffer(1), nodes.p.v = filled_buffer(1);
  nodes.p.dout = filled_buffer(4);
  const Outputs by_node(nodes.p), by_chain(nodes.p);
  run_slices(by_node, nodes, nodes.p.slices, true);
  run_slices(by_chain, nodes, joined_by_problem(nodes.p), false);
  const auto expect_close = [&](const Buffer& got, const Buffer& want, const char* tensor) {
    const std::vector<double> a = got.values(), b = want.values();
    double most = 0;
    for (const double x : b) most = std::max(most, std::abs(x));
    ASSERT_GT(most, 0) << tensor;
    for (std::size_t i = 0; i < a.size(); ++i)
      ASSERT_NEAR(a[i], b[i], 4 * check::rounding(want.view().dtype).of(most) + 1e-4 * most) << tensor << " " << i;
  };
  expect_close(by_chain.forward.out, by_node.forward.out, "out");
  expect_close(by_chain.forward.lse, by_node.forward.lse, "lse");
  expect_close(by_chain.backward.dq, by_node.backward.dq, "dq");
  expect_close(by_chain.backward.dk, by_node.backward.dk, "dk");
  expect_close(by_chain.backward.dv, by_node.backward.dv, "dv");
}

}  // namespace
}  // namespace weft::test
