#include "weft/tree.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "index.h"
#include "text.h"

namespace weft {
namespace {

void check_nodes(const TreeNodes& given) {
  const Index n = static_cast<Index>(given.parents.size());
  if (given.lengths.size() != given.parents.size())
    throw Error(text("a tree of ", n, " parents and ", given.lengths.size(), " lengths"), "give one of each a node");
  Index rows = 0;
  for (Index i = 0; i < n; ++i) {
    const Index parent = given.parents[at(i)], length = given.lengths[at(i)];
    if (parent < kNoNode || parent >= n)
      throw Error(text("node ", i, " has parent ", parent, " of ", n, " nodes"),
                  text("give a node from 0 to ", n - 1, ", or -1 for a root"));
    if (length < 0 || length > kMaxTokens)
      throw Error(text("node ", i, " has length ", length), text("use lengths from 0 to ", kMaxTokens));
    rows += length;
    if (rows > kMaxTokens)
      throw Error(text("the first ", i + 1, " nodes of a tree have ", rows, " rows"),
                  text("make several trees: up to ", kMaxTokens, " rows each"));
  }
  if (!given.tokens.empty() && static_cast<Index>(given.tokens.size()) != rows)
    throw Error(text("a tree of ", rows, " rows and ", given.tokens.size(), " ids of tokens"), "give one id a row");
  if (!given.sequence_end) return;
  for (std::size_t i = 0; i < given.sequence_end->size(); ++i) {
    const Index end = (*given.sequence_end)[i];
    if (end < kNoNode || end >= n)
      throw Error(text("sequence ", i, " ends in node ", end, " of ", n),
                  text("give a node from 0 to ", n - 1, ", or -1 for a sequence without tokens"));
  }
}

// The nodes, parents before their children and each with all below it before its next sibling.
std::vector<Index> depth_first(std::span<const Index> parents) {
  const Index n = static_cast<Index>(parents.size());
  std::vector<Index> first(at(n + 2), 0), children(at(n));  // of parent p at first[p + 1]
  for (const Index parent : parents) ++first[at(parent + 2)];
  std::partial_sum(first.begin(), first.end(), first.begin());
  std::vector<Index> next(first.begin(), first.end() - 1);
  for (Index i = 0; i < n; ++i) children[at(next[at(parents[at(i)] + 1)]++)] = i;
  std::vector<Index> order, open;
  order.reserve(at(n));
  const auto add_children = [&](Index parent) {
    for (Index c = first[at(parent + 2)]; c-- > first[at(parent + 1)];) open.push_back(children[at(c)]);
  };
  add_children(kNoNode);
  while (!open.empty()) {
    const Index node = open.back();
    open.pop_back();
    order.push_back(node);
    add_children(node);
  }
  if (static_cast<Index>(order.size()) == n) return order;
  std::vector<bool> reached(at(n), false);
  for (const Index node : order) reached[at(node)] = true;
  const Index lost = std::find(reached.begin(), reached.end(), false) - reached.begin();
  throw Error(
      text("node ", lost, " has no root above it: its parents, from ", parents[at(lost)], " on, go in a circle"),
      "give every tree a root, whose parent is -1");
}

Index padded_rows(Index rows, Index multiple) { return ceil_div(rows, multiple) * multiple; }

// For each node the last row before its first one in the sequences that pass it, or kNoRow.
std::vector<Index> rows_before(std::span<const Tree::Node> nodes) {
  constexpr Index kNone = -1;
  std::vector<Index> before(nodes.size(), kNone);
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].parent == kNoNode) continue;
    const Tree::Node& parent = nodes[at(nodes[i].parent)];
    before[i] = parent.size() > 0 ? parent.end - 1 : before[at(nodes[i].parent)];
  }
  return before;
}

}  // namespace

struct Tree::Given {
  std::vector<Index> parents, lengths, tokens, sequence_end;

  Tree tree() const { return from_nodes({parents, lengths, tokens, std::span<const Index>(sequence_end)}); }
};

Tree::Given Tree::given() const {
  Given all{std::vector<Index>(nodes_.size()), std::vector<Index>(nodes_.size()), {}, {}};
  std::vector<const Node*> by_number(nodes_.size());
  for (const Node& node : nodes_) {
    by_number[at(node.number)] = &node;
    all.parents[at(node.number)] = node.parent == kNoNode ? kNoNode : nodes_[at(node.parent)].number;
    all.lengths[at(node.number)] = node.size();
  }
  if (!tokens_.empty())
    for (const Node* node : by_number)
      all.tokens.insert(all.tokens.end(), tokens_.begin() + node->begin, tokens_.begin() + node->end);
  for (const Index end : sequence_end_) all.sequence_end.push_back(end == kNoNode ? kNoNode : nodes_[at(end)].number);
  return all;
}

Tree Tree::from_nodes(const TreeNodes& given) {
  check_nodes(given);
  const std::vector<Index> order = depth_first(given.parents);
  Tree tree;
  std::vector<Index> placed(order.size());  // of each number its place in the stream
  std::vector<bool> leaf(order.size(), true);
  tree.nodes_.reserve(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    const Index number = order[i], above = given.parents[at(number)];
    placed[at(number)] = static_cast<Index>(i);
    Node node{.parent = above == kNoNode ? kNoNode : placed[at(above)], .number = number};
    node.end = given.lengths[at(number)];
    if (node.parent != kNoNode) {
      const Node& parent = tree.nodes_[at(node.parent)];
      node.position = parent.position + parent.size();
      leaf[at(node.parent)] = false;
    }
    tree.nodes_.push_back(node);
  }
  if (given.sequence_end) {
    for (const Index end : *given.sequence_end)
      tree.sequence_end_.push_back(end == kNoNode ? kNoNode : placed[at(end)]);
  } else {
    for (std::size_t i = 0; i < leaf.size(); ++i)
      if (leaf[i]) tree.sequence_end_.push_back(static_cast<Index>(i));
  }
  tree.count_sequences();
  tree.place(1, {});
  if (!given.tokens.empty()) {
    std::vector<Index> begin(order.size() + 1, 0);
    std::partial_sum(given.lengths.begin(), given.lengths.end(), begin.begin() + 1);
    tree.tokens_.reserve(at(tree.rows_));
    for (const Index number : order)
      tree.tokens_.insert(tree.tokens_.end(), given.tokens.begin() + begin[at(number)],
                          given.tokens.begin() + begin[at(number) + 1]);
  }
  return tree;
}

void Tree::count_sequences() {
  for (const Index end : sequence_end_)
    if (end != kNoNode) ++nodes_[at(end)].sequences;
  for (std::size_t i = nodes_.size(); i-- > 0;) {
    const Node& node = nodes_[i];
    if (node.sequences == 0)
      throw Error(text("node ", node.number, " is in no sequence"),
                  "end a sequence in it or below it, or leave it out");
    if (node.parent != kNoNode) nodes_[at(node.parent)].sequences += node.sequences;
  }
}

// Gives every node its rows.
void Tree::place(Index multiple, std::optional<Index> rows) {
  Index row = 0;
  used_rows_ = 0;
  for (Node& node : nodes_) {
    if (node.parent == kNoNode) row = padded_rows(row, multiple);
    const Index size = node.size();
    node.begin = row;
    node.end = node.subtree_end = row += size;
    used_rows_ += size;
  }
  for (std::size_t i = nodes_.size(); i-- > 0;)
    if (nodes_[i].parent != kNoNode) {
      Node& parent = nodes_[at(nodes_[i].parent)];
      parent.subtree_end = max_of(parent.subtree_end, nodes_[i].subtree_end);
    }
  multiple_ = multiple;
  row = padded_rows(row, multiple);
  rows_ = rows.value_or(row);
  if (row > kMaxTokens || rows_ > kMaxTokens)
    throw Error(text("a tree of ", max_of(row, rows_), " rows, padding included"), text("use at most ", kMaxTokens));
  if (rows_ < row)
    throw Error(text("a tree of ", row, " rows, padded to multiples of ", multiple, ", in ", rows_, " rows"),
                text("give ", row, " rows or more"));
}

Tree Tree::padded_to(Index multiple, std::optional<Index> rows) const {
  if (multiple < 1 || multiple > kMaxTokens)
    throw Error(text("a tree padded to a multiple of ", multiple), text("use a multiple from 1 to ", kMaxTokens));
  Tree padded = *this;
  padded.place(multiple, rows);
  if (tokens_.empty()) return padded;
  padded.tokens_.assign(at(padded.rows_), 0);
  for (std::size_t i = 0; i < nodes_.size(); ++i)
    std::copy_n(tokens_.begin() + nodes_[i].begin, nodes_[i].size(), padded.tokens_.begin() + padded.nodes_[i].begin);
  return padded;
}

Tree Tree::subset(std::span<const Index> sequences) const {
  std::vector<Index> kept(nodes_.size(), kNoNode);  // then the new numbers
  for (const Index s : sequences) {
    if (s < 0 || s >= this->sequences())
      throw Error(text("sequence ", s, " of ", this->sequences()), "name one that there is");
    for (Index node = sequence_end_[at(s)]; node != kNoNode && kept[at(node)] == kNoNode;
         node = nodes_[at(node)].parent)
      kept[at(node)] = 0;
  }
  Given some;
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    if (kept[i] == kNoNode) continue;
    kept[i] = static_cast<Index>(some.parents.size());
    const Node& node = nodes_[i];
    some.parents.push_back(node.parent == kNoNode ? kNoNode : kept[at(node.parent)]);
    some.lengths.push_back(node.size());
    if (!tokens_.empty())
      some.tokens.insert(some.tokens.end(), tokens_.begin() + node.begin, tokens_.begin() + node.end);
  }
  for (const Index s : sequences) {
    const Index end = sequence_end_[at(s)];
    some.sequence_end.push_back(end == kNoNode ? kNoNode : kept[at(end)]);
  }
  return some.tree();
}

Tree Tree::joined(std::span<const Tree> trees) {
  Given all;
  const auto has_ids = [](const Tree& tree) { return !tree.tokens_.empty(); };
  const auto with = std::find_if(trees.begin(), trees.end(), has_ids);
  for (const Tree& tree : trees) {
    if (with != trees.end() && tree.used_rows_ > 0 && !has_ids(tree))
      throw Error(
          text("tree ", with - trees.begin(), " has ids of tokens and tree ", &tree - trees.data(), " has none"),
          "give all of them ids, or none");
    const Index first = static_cast<Index>(all.parents.size());
    const auto shifted = [&](Index node) { return node == kNoNode ? kNoNode : node + first; };
    const Given one = tree.given();
    std::transform(one.parents.begin(), one.parents.end(), std::back_inserter(all.parents), shifted);
    std::transform(one.sequence_end.begin(), one.sequence_end.end(), std::back_inserter(all.sequence_end), shifted);
    all.lengths.insert(all.lengths.end(), one.lengths.begin(), one.lengths.end());
    all.tokens.insert(all.tokens.end(), one.tokens.begin(), one.tokens.end());
  }
  return all.tree();
}

Index Tree::length(Index sequence) const {
  if (sequence < 0 || sequence >= sequences())
    throw Error(text("sequence ", sequence, " of ", sequences()), "name one that there is");
  const Index end = sequence_end_[at(sequence)];
  return end == kNoNode ? 0 : nodes_[at(end)].position + nodes_[at(end)].size();
}

Index Tree::separate_tokens() const {
  Index tokens = 0;
  for (Index s = 0; s < sequences(); ++s) tokens += length(s);
  return tokens;
}

double Tree::separate_pairs() const {
  double pairs = 0;
  for (Index s = 0; s < sequences(); ++s) {
    const double tokens = static_cast<double>(length(s));
    pairs += tokens * (tokens + 1) / 2;
  }
  return pairs;
}

std::vector<Index> Tree::positions() const {
  std::vector<Index> all(at(rows_), 0);
  for (const Node& node : nodes_) std::iota(all.begin() + node.begin, all.begin() + node.end, node.position);
  return all;
}

std::vector<Index> Tree::node_of_row() const {
  std::vector<Index> all(at(rows_), kNoNode);
  for (const Node& node : nodes_) std::fill(all.begin() + node.begin, all.begin() + node.end, node.number);
  return all;
}

std::vector<Index> Tree::weights() const {
  std::vector<Index> all(at(rows_), 0);
  for (const Node& node : nodes_) std::fill(all.begin() + node.begin, all.begin() + node.end, node.sequences);
  return all;
}

std::vector<Index> Tree::cu_seqlens() const {
  std::vector<Index> sums{0};
  for (Index s = 0; s < sequences(); ++s) sums.push_back(sums.back() + length(s));
  return sums;
}

std::vector<Index> Tree::rows_of_tokens() const {
  const Index tokens = separate_tokens();
  if (tokens > kMaxTokens)
    throw Error(text("a list of the rows of ", tokens, " tokens, those of all sequences of a tree one by one"),
                text("use trees of at most ", kMaxTokens, " (Tree::separate_tokens), or go by rows and edges"));
  std::vector<Index> all(at(tokens));
  auto to = all.begin();
  for (Index s = 0; s < sequences(); ++s) {
    to += length(s);
    auto at_end = to;
    for (Index i = sequence_end_[at(s)]; i != kNoNode; i = nodes_[at(i)].parent) {
      at_end -= nodes_[at(i)].size();
      std::iota(at_end, at_end + nodes_[at(i)].size(), nodes_[at(i)].begin);
    }
  }
  return all;
}

TreeEdges Tree::edges() const {
  TreeEdges all;
  const std::vector<Index> before = rows_before(nodes_);
  for (std::size_t i = 0; i < nodes_.size(); ++i) {
    const Node& node = nodes_[i];
    for (Index row = node.begin; row < node.end; ++row) {
      const Index from = row > node.begin ? row - 1 : before[i];
      if (from < 0) continue;
      all.rows.push_back(from);
      all.next_rows.push_back(row);
      all.weights.push_back(node.sequences);
    }
  }
  return all;
}

std::vector<Index> Tree::edge_of_token() const {
  const std::vector<Index> next_rows = edges().next_rows;
  std::vector<Index> edge_of_row(at(rows_), kNoEdge), all = rows_of_tokens();
  for (std::size_t e = 0; e < next_rows.size(); ++e) edge_of_row[at(next_rows[e])] = static_cast<Index>(e);
  for (Index& row : all) row = edge_of_row[at(row)];
  return all;
}

Packing Tree::packing() const {
  std::vector<Index> offsets, used;
  for (const Node& node : nodes_) {
    if (node.parent != kNoNode) continue;
    offsets.push_back(node.begin);
    used.push_back(node.subtree_end - node.begin);
  }
  offsets.push_back(offsets.empty() ? 0 : padded_rows(offsets.back() + used.back(), multiple_));
  return Stream::from_used(offsets, used, rows_);
}

Problem Tree::problem(const Mask& mask) const {
  Mask own;
  own.slices = slices(mask);
  return {packing(), std::move(own)};
}

}  // namespace weft
