#include "check/cases/tree_case.h"

#include <numeric>
#include <utility>

#include "index.h"

namespace weft::check {

TreeCase tree_case(const Tree& tree) {
  TreeCase c{.parents = std::vector<Index>(tree.nodes().size()), .lengths = std::vector<Index>(tree.nodes().size())};
  for (const Tree::Node& node : tree.nodes()) {
    c.parents[at(node.number)] = node.parent == kNoNode ? kNoNode : tree.nodes()[at(node.parent)].number;
    c.lengths[at(node.number)] = node.size();
  }
  c.multiple = tree.multiple();
  c.rows = tree.rows();
  return c;
}

Tree tree_of(const TreeCase& given) {
  return Tree::from_nodes({.parents = given.parents, .lengths = given.lengths}).padded_to(given.multiple, given.rows);
}

void set_tree(Case& to, TreeCase given) {
  const Tree tree = tree_of(given);
  const Packing packing = tree.packing();
  const Stream& stream = packing.q();
  to.k.reset();
  to.q = {};
  for (const Index used : stream.used_lengths()) to.q.cu_seqlens.push_back(to.q.cu_seqlens.back() + used);
  to.q.cu_seqlens_padded.assign(stream.offsets().begin(), stream.offsets().end());
  to.q.tokens = stream.tokens();
  to.mask = {};
  to.mask.slices = tree.slices({.causal = true, .left = given.left, .chunk = given.chunk});
  to.tree = std::move(given);
}

void choose_tree(Choices& c, Case& to, const TreeSizes& sizes) {
  TreeCase tree;
  const Index nodes = c.pick(0, sizes.nodes);
  for (Index i = 0; i < nodes; ++i) {
    tree.parents.push_back(i == 0 || c.one_in(5) ? kNoNode : c.pick(c.one_in(2) ? i - 1 : 0, i - 1));
    tree.lengths.push_back(c.one_in(3) ? c.pick(0, min_of(2, sizes.length)) : c.pick(1, sizes.length));
  }
  const Index sum = std::accumulate(tree.lengths.begin(), tree.lengths.end(), Index{0});
  if (sum < sizes.least) {
    tree.parents.push_back(nodes > 0 ? nodes - 1 : kNoNode);
    tree.lengths.push_back(sizes.least - sum);
  }
  if (c.one_in(2)) tree.left = c.pick(0, sizes.reach);
  if (c.one_in(3)) tree.chunk = c.pick(1, sizes.reach);
  tree.multiple = to.layout == LayoutKind::dual_chunk ? 2 * to.ranks : c.one_in(3) ? c.pick(2, 7) : 1;
  if (c.one_in(3)) tree.rows = tree_of(tree).rows() + c.pick(0, 5);
  set_tree(to, std::move(tree));
}

Case random_tree_case(Choices& c, std::optional<LayoutKind> layout) {
  Case to;
  to.layout = layout ? *layout : static_cast<LayoutKind>(c.pick(0, 5));
  to.ranks = c.pick(2, 8);
  choose_tree(c, to, kSmallTree);
  choose_runs(c, to, 12);
  choose_attention(c, to, 3);
  to.seed = static_cast<unsigned long long>(c.pick(0, 999));
  return to;
}

}  // namespace weft::check
