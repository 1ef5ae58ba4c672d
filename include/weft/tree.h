// Prefix trees: sequences that share prefixes, packed so that each shared token is one row. See docs/trees.md.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "weft/mask.h"
#include "weft/packing.h"
#include "weft/prepare.h"
#include "weft/slice.h"

namespace weft {

// The parent of a root, and the last node of an empty sequence.
inline constexpr Index kNoNode = -1;
// The edge of a token that no row predicts: the first of its sequence.
inline constexpr Index kNoEdge = -1;

// A forest as its caller has it: nodes in any order, siblings in the order that they are to keep.
struct TreeNodes {
  std::span<const Index> parents;                           // [n] a node, or kNoNode
  std::span<const Index> lengths;                           // [n] tokens of each node; 0 is allowed
  std::span<const Index> tokens = {};                       // [sum of lengths] ids, node after node; left out: none
  std::optional<std::span<const Index>> sequence_end = {};  // [sequences] last node of each; left out: every leaf
};

// Where one row predicts the next token of a sequence. A row with several branches behind it has several edges.
struct TreeEdges {
  std::vector<Index> rows;       // [edges] the row that predicts
  std::vector<Index> next_rows;  // [edges] the row of the token that it predicts, rising
  std::vector<Index> weights;    // [edges] sequences that have this edge
};

// A forest: sequences that share prefixes, and plain documents, which are trees of one node. Rows are tokens of one
// packed stream in depth-first order, so those of a node are contiguous, and so are those of its subtree. A row sees
// what it would see in its sequence: rows of its ancestors, and its own node causally. Immutable.
class WEFT_API Tree {
 public:
  // Tokens of one node: rows [begin, end).
  struct Node {
    Index parent = kNoNode;    // in nodes()
    Index begin = 0, end = 0;  // rows
    Index subtree_end = 0;     // rows [begin, subtree_end) are those of the node and of all below it
    Index position = 0;        // of its first token in the sequences that pass it
    Index sequences = 0;       // how many pass it
    Index number = 0;          // as the caller counts nodes

    Index size() const { return end - begin; }
    friend bool operator==(const Node&, const Node&) = default;
  };

  Tree() = default;
  // Error, with the node, for a parent that there is not, a cycle, a negative length, more than kMaxTokens rows, and a
  // node in no sequence.
  static Tree from_nodes(const TreeNodes& nodes);
  // Sequence i is tokens [cu_seqlens[i], cu_seqlens[i + 1]). Longest common prefixes become nodes, in time linear in
  // the tokens; siblings keep the order in which sequences first need them. Sequences may be empty, equal, or prefixes
  // of others.
  static Tree from_sequences(std::span<const Index> tokens, std::span<const Index> cu_seqlens);
  // The trees one after another without padding, and so their sequences and nodes. Error if some have ids of tokens and
  // others have not.
  static Tree joined(std::span<const Tree> trees);

  // Every root padded to a multiple of rows, as layout dual_chunk needs; in all `rows` of them, if given.
  Tree padded_to(Index multiple, std::optional<Index> rows = {}) const;
  // The tree of some of its sequences, in this order, with nodes numbered anew. Without padding.
  Tree subset(std::span<const Index> sequences) const;

  Index rows() const { return rows_; }            // padding included
  Index used_rows() const { return used_rows_; }  // padding not included
  Index multiple() const { return multiple_; }    // that roots are padded to
  Index sequences() const { return static_cast<Index>(sequence_end_.size()); }
  Index separate_tokens() const;                                         // of all sequences, one by one
  double separate_pairs() const;                                         // visible ones of these under a causal mask
  std::span<const Node> nodes() const { return nodes_; }                 // in the order of the stream
  std::span<const Index> sequence_end() const { return sequence_end_; }  // [sequences] in nodes(), or kNoNode
  std::span<const Index> tokens() const { return tokens_; }              // [rows] ids, 0 in padding; or none
  Index length(Index sequence) const;                                    // in tokens

  std::vector<Index> positions() const;       // [rows] in their sequences; 0 in padding
  std::vector<Index> node_of_row() const;     // [rows] its number; kNoNode in padding
  std::vector<Index> weights() const;         // [rows] sequences that pass it; 0 in padding
  std::vector<Index> cu_seqlens() const;      // [sequences + 1] of the sequences, one by one
  std::vector<Index> rows_of_tokens() const;  // [separate_tokens] row of each token of each sequence
  TreeEdges edges() const;
  // [separate_tokens] the edge that predicts each token; kNoEdge for the first of a sequence.
  std::vector<Index> edge_of_token() const;

  // A sequence for each root.
  Packing packing() const;
  // What every sequence by itself would see under a causal mask, with a window and chunks: a slice for each node all
  // of whose subtree sees all of it, and for other nodes one for each chunk and each node below within reach; fewer
  // where a node goes on from its parent.
  std::vector<Slice> slices(const Mask& mask = {.causal = true}) const;
  Problem problem(const Mask& mask = {.causal = true}) const;

  friend bool operator==(const Tree&, const Tree&) = default;

 private:
  struct Given;  // nodes by number
  Given given() const;
  void place(Index multiple, std::optional<Index> rows);
  void count_sequences();

  std::vector<Node> nodes_;
  std::vector<Index> tokens_;  // [rows], or none
  std::vector<Index> sequence_end_;
  Index rows_ = 0, used_rows_ = 0, multiple_ = 1;
};

// --- Packs of trees ---

// Sequences of one tree that are together in a pack: all of them, unless it was split.
struct TreePiece {
  Index tree = 0;
  std::vector<Index> sequences = {};
};

// How well trees were packed, and what they save.
struct TreePackReport {
  Index trees = 0, packs = 0;
  Index rows = 0;             // without padding
  Index padding = 0;          // rows that pad roots to a multiple
  Index empty = 0;            // rows at the ends of packs
  Index separate_tokens = 0;  // rows if every sequence were by itself
  Index repeated = 0;         // rows that are there again because their tree was split
  Index split_trees = 0;
  double pairs = 0, separate_pairs = 0;  // visible ones under a causal mask
  double waste = 0;                      // (padding + empty) / (packs · budget)
};

// Trees assigned to packs of one size.
struct WEFT_API TreePacks {
  PackOptions options;
  std::vector<std::vector<TreePiece>> packs;
  std::vector<Tree> trees;  // [packs] of rows() == budget each
  TreePackReport report;
};

// Packs trees as pack_documents packs documents, by rows. A tree that does not fit a pack is refused, or with
// TooLong::split cut into parts of as many sequences, in depth-first order, as fit, which repeat the path that they
// share. Error for a sequence that is by itself too long. Not with pair_limit.
WEFT_API TreePacks pack_trees(std::span<const Tree> trees, const PackOptions& options);

}  // namespace weft
