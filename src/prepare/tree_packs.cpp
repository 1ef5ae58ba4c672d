// Trees to packs of one size.
#include <algorithm>
#include <numeric>
#include <utility>

#include "index.h"
#include "text.h"
#include "weft/tree.h"

namespace weft {
namespace {

// Some sequences of a tree, and the rows that they take, padding included.
struct TreePart {
  TreePiece piece;
  Index rows = 0;
};

// Collects sequences in depth-first order into parts that fit a pack.
class Splitter {
 public:
  Splitter(const Tree& tree, Index number, const PackOptions& options)
      : tree_(tree), number_(number), options_(options), part_of_(tree.nodes().size(), -1) {}

  std::vector<TreePart> split() {
    const std::span<const Index> ends = tree_.sequence_end();
    std::vector<Index> order(ends.size());
    std::iota(order.begin(), order.end(), Index{0});
    std::sort(order.begin(), order.end(),
              [&](Index a, Index b) { return std::pair(ends[at(a)], a) < std::pair(ends[at(b)], b); });
    for (const Index s : order) add(s);
    return std::move(parts_);
  }

 private:
  // What a sequence adds to the last part.
  struct Added {
    Index rows = 0;
    bool root = true;  // none of its tokens is there yet
  };

  Added added(Index sequence) const {
    Added more;
    const Index part = static_cast<Index>(parts_.size()) - 1;
    Index node = tree_.sequence_end()[at(sequence)];
    for (; node != kNoNode && part_of_[at(node)] != part; node = tree_.nodes()[at(node)].parent)
      more.rows += tree_.nodes()[at(node)].size();
    more.root = node == kNoNode;
    return more;
  }

  Index padded(Index rows) const { return ceil_div(rows, options_.multiple) * options_.multiple; }
  // Rows of the last part with the sequence.
  Index rows_with(const Added& more) const {
    return more.root ? finished_ + padded(open_) + padded(more.rows) : finished_ + padded(open_ + more.rows);
  }

  void add(Index sequence) {
    Added more = added(sequence);
    if (parts_.empty() || rows_with(more) > options_.budget) {
      parts_.push_back({{number_, {}}, 0});
      finished_ = open_ = 0;
      more = added(sequence);
    }
    if (rows_with(more) > options_.budget)
      throw Error(text("tree ", number_, ", sequence ", sequence, ": padded length ", rows_with(more),
                       " is above the budget of ", options_.budget, " rows"),
                  "give a larger budget: trees are split between sequences, not inside of them");
    if (more.root) {
      finished_ += padded(open_);
      open_ = 0;
    }
    open_ += more.rows;
    const Index part = static_cast<Index>(parts_.size()) - 1;
    Index node = tree_.sequence_end()[at(sequence)];
    for (; node != kNoNode && part_of_[at(node)] != part; node = tree_.nodes()[at(node)].parent)
      part_of_[at(node)] = part;
    parts_.back().piece.sequences.push_back(sequence);
    parts_.back().rows = finished_ + padded(open_);
  }

  const Tree& tree_;
  Index number_;
  const PackOptions& options_;
  std::vector<Index> part_of_;  // the last part that has the node
  std::vector<TreePart> parts_;
  Index finished_ = 0, open_ = 0;  // of the last part: padded rows of its earlier roots, rows of its last root
};

std::vector<TreePart> parts_of(std::span<const Tree> trees, const PackOptions& options) {
  std::vector<TreePart> parts;
  for (std::size_t i = 0; i < trees.size(); ++i) {
    const Index number = static_cast<Index>(i), rows = trees[i].padded_to(options.multiple).rows();
    if (rows <= options.budget) {
      TreePart whole{{number, std::vector<Index>(at(trees[i].sequences()))}, rows};
      std::iota(whole.piece.sequences.begin(), whole.piece.sequences.end(), Index{0});
      parts.push_back(std::move(whole));
      continue;
    }
    if (options.too_long == PackOptions::TooLong::refuse)
      throw Error(text("tree ", i, ": ", rows, " rows of ", trees[i].sequences(), " sequences are above the budget of ",
                       options.budget),
                  "give a larger budget, or split it (PackOptions::TooLong::split)");
    std::vector<TreePart> split = Splitter(trees[i], number, options).split();
    std::move(split.begin(), split.end(), std::back_inserter(parts));
  }
  return parts;
}

double causal_pairs(const Tree& tree) {
  double pairs = 0;
  for (const Tree::Node& node : tree.nodes()) {
    const double own = static_cast<double>(node.size()), below = static_cast<double>(node.subtree_end - node.end);
    pairs += own * (own + 1) / 2 + own * below;
  }
  return pairs;
}

TreePackReport tree_report(std::span<const Tree> trees, const TreePacks& packs, const std::vector<TreePart>& parts) {
  TreePackReport r{.trees = static_cast<Index>(trees.size()), .packs = static_cast<Index>(packs.packs.size())};
  Index padded = 0;
  for (const TreePart& part : parts) padded += part.rows;
  std::vector<Index> pieces(trees.size(), 0);
  for (const TreePart& part : parts) r.split_trees += ++pieces[at(part.piece.tree)] == 2 ? 1 : 0;
  for (const Tree& tree : packs.trees) {
    r.rows += tree.used_rows();
    r.pairs += causal_pairs(tree);
  }
  r.repeated = r.rows;
  for (const Tree& tree : trees) {
    r.repeated -= tree.used_rows();
    r.separate_tokens += tree.separate_tokens();
    r.separate_pairs += tree.separate_pairs();
  }
  const Index rows = r.packs * packs.options.budget;
  r.padding = padded - r.rows;
  r.empty = rows - padded;
  r.waste = rows == 0 ? 0 : static_cast<double>(rows - r.rows) / static_cast<double>(rows);
  return r;
}

}  // namespace

TreePacks pack_trees(std::span<const Tree> trees, const PackOptions& options) {
  if (options.pair_limit != 0)
    throw Error(text("trees in packs of at most ", options.pair_limit, " times the mean number of pairs"),
                "leave pair_limit out: it is for documents (pack_documents)");
  pack_documents({}, options);  // refuses budgets and multiples that cannot be
  std::vector<TreePart> parts = parts_of(trees, options);
  std::vector<Index> rows;
  for (const TreePart& part : parts) rows.push_back(part.rows);
  TreePacks packs{options, {}, {}, {}};
  for (const std::vector<Piece>& pack : pack_documents(rows, options).packs) {
    std::vector<Tree> together;
    std::vector<TreePiece> pieces;
    for (const Piece& piece : pack) {
      const TreePart& part = parts[at(piece.document)];
      together.push_back(trees[at(part.piece.tree)].subset(part.piece.sequences));
      pieces.push_back(part.piece);
    }
    packs.trees.push_back(Tree::joined(together).padded_to(options.multiple, options.budget));
    packs.packs.push_back(std::move(pieces));
  }
  packs.report = tree_report(trees, packs, parts);
  return packs;
}

}  // namespace weft
