// Prefix trees as slices, for tests and timings: one slice a node, straight from the meaning of a tree.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "index.h"
#include "weft/slice.h"

namespace weft::check {

// Nodes by number; parents come before their children, -1 is a root.
struct TreeShape {
  std::vector<Index> parents, lengths;

  Index add(Index parent, Index length) {
    parents.push_back(parent);
    lengths.push_back(length);
    return static_cast<Index>(parents.size()) - 1;
  }
  Index rows() const {
    Index sum = 0;
    for (const Index n : lengths) sum += n;
    return sum;
  }
};

// A prompt and its answers.
inline TreeShape answers_tree(Index prompt, Index answers, Index length) {
  TreeShape tree;
  const Index root = tree.add(-1, prompt);
  for (Index n = 0; n < answers; ++n) tree.add(root, length);
  return tree;
}

// Every node but those of the last level has `children` children.
inline TreeShape even_tree(Index levels, Index children, Index length) {
  TreeShape tree;
  std::vector<Index> level = {tree.add(-1, length)};
  for (Index n = 1; n < levels; ++n) {
    std::vector<Index> next;
    for (const Index parent : level)
      for (Index c = 0; c < children; ++c) next.push_back(tree.add(parent, length));
    level = std::move(next);
  }
  return tree;
}

// A history that goes on from node to node, each with one more branch, after or before the one that goes on.
inline TreeShape history_tree(Index turns, Index length, Index branch, bool branch_first) {
  TreeShape tree;
  Index last = -1;
  for (Index n = 0; n < turns; ++n) {
    if (n > 0 && branch_first) tree.add(last, branch);
    const Index next = tree.add(last, length);
    if (n > 0 && !branch_first) tree.add(last, branch);
    last = next;
  }
  return tree;
}

// pick(low, high) draws a number, both ends included. Some nodes are empty, some roots are further trees.
template <class Pick>
TreeShape random_tree(Index nodes, Index longest, Pick&& pick) {
  TreeShape tree;
  for (Index n = 0; n < nodes; ++n) {
    const Index depth = pick(1, 4);  // 1: any earlier node, otherwise one of the last
    const Index parent = n == 0 || pick(0, 19) == 0 ? -1 : depth == 1 ? pick(0, n - 1) : max_of(0, n - depth + 1);
    tree.add(parent, pick(0, 9) == 0 ? 0 : pick(1, longest));
  }
  return tree;
}

// Where a node's rows lie in the stream, which is in depth-first order, and where those of all nodes below it end.
struct NodeRows {
  Index begin = 0, end = 0, subtree_end = 0;
};
inline std::vector<NodeRows> tree_nodes(const TreeShape& tree, Index first = 0) {
  std::vector<NodeRows> nodes(tree.parents.size());
  std::vector<Index> below = tree.lengths;  // rows of each subtree
  for (std::size_t n = nodes.size(); n-- > 0;)
    if (tree.parents[n] >= 0) below[at(tree.parents[n])] += below[n];
  std::vector<Index> next(nodes.size());  // where a node's next child begins
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    Index& begin = tree.parents[n] < 0 ? first : next[at(tree.parents[n])];
    nodes[n] = {begin, begin + tree.lengths[n], begin + below[n]};
    next[n] = nodes[n].end;
    begin += below[n];
  }
  return nodes;
}

// Rows of a node and of those below it see the node's rows, none before itself. In the order of the stream.
inline std::vector<Slice> tree_slices(const TreeShape& tree, Index first = 0) {
  std::vector<Slice> slices;
  for (const NodeRows& n : tree_nodes(tree, first))
    if (n.begin < n.end) slices.push_back({n.begin, n.subtree_end, n.begin, n.end, -kUnlimited, 0});
  std::sort(slices.begin(), slices.end(), [](const Slice& a, const Slice& b) { return a.k_begin < b.k_begin; });
  return slices;
}

// The lengths of its paths from root to leaf: the sequences that the tree stands for.
inline std::vector<Index> path_lengths(const TreeShape& tree) {
  std::vector<Index> path = tree.lengths, leaves;
  std::vector<bool> parent(path.size(), false);
  for (std::size_t n = 0; n < path.size(); ++n) {
    if (tree.parents[n] < 0) continue;
    path[n] += path[at(tree.parents[n])];
    parent[at(tree.parents[n])] = true;
  }
  for (std::size_t n = 0; n < path.size(); ++n)
    if (!parent[n]) leaves.push_back(path[n]);
  return leaves;
}

}  // namespace weft::check
