// The definition of masks and layouts per pair and per token, independent of the planner: slow and plain.
#pragma once

#include <vector>

#include "check/cases/case.h"
#include "index.h"

namespace weft::check {

// The sequence (of a tree: the node) and position of a token; -1 for padding.
struct Place {
  Index sequence = -1, position = -1;
  bool real() const { return sequence >= 0; }
};

// A buffer of rows, and the token of each.
struct Buffer {
  RunList runs;
  std::vector<Index> tokens;
};
Buffer rank_buffer(const Layout& layout, RunList::Members members);
Buffer stream_buffer(Index tokens);  // row = token

// A node of a tree: where its tokens are in the stream and in their sequences.
struct TreeNode {
  Index parent = -1, begin = 0, length = 0, position = 0;
};

class Definition {
 public:
  explicit Definition(const Case& c);

  Index q_tokens() const { return static_cast<Index>(q_.size()); }
  Index k_tokens() const { return static_cast<Index>(k_.size()); }
  const Place& q(Index token) const { return q_[at(token)]; }
  const Place& k(Index token) const { return k_[at(token)]; }
  bool visible(Index q_token, Index k_token) const;
  // The keys that a query sees, as runs of tokens, rising: for problems with too many pairs to ask of each.
  void visible_runs(Index q_token, std::vector<Range>& to) const;
  // First key that a kernel tiles from, keys in sequence order: the sequence's, or the chunk's, first.
  Index first_key(Index k_token) const;

  // Tokens of each rank's rows in order, kNoToken for none; empty if the layout is not one of the regular ones.
  std::vector<std::vector<Index>> owned(bool keys) const;

 private:
  void place_tree();
  Index place_node(Index node, Index begin, Index position);
  Range seen_of_node(Index query, Index node) const;

  const Case& case_;
  std::vector<Place> q_, k_;
  std::vector<Index> q_length_, k_length_, k_begin_;
  std::vector<TreeNode> nodes_;  // of a tree, in the caller's order
};

}  // namespace weft::check
