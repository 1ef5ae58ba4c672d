// Cases whose documents are a forest of branches that share prefixes.
#pragma once

#include "check/cases/random_case.h"
#include "weft/tree.h"

namespace weft::check {

// The nodes of a tree, as a case holds them.
TreeCase tree_case(const Tree& tree);
Tree tree_of(const TreeCase& given);

// Makes the case one of this tree: its queries, without keys of their own, and its mask, which is the tree's slices.
void set_tree(Case& to, TreeCase tree);

// At most so many nodes and tokens of a node, and windows and chunks of at most so many positions.
struct TreeSizes {
  Index nodes, length, reach;
  Index least = 0;  // rows; one more node has those that are missing
};
// A random tree in the case's place, causal, with a window, chunks or both; padded as its layout asks.
void choose_tree(Choices& choices, Case& to, const TreeSizes& sizes);
inline constexpr TreeSizes kSmallTree = {.nodes = 8, .length = 11, .reach = 9};

// As random_case, on two ranks or more, always a tree.
Case random_tree_case(Choices& choices, std::optional<LayoutKind> layout = {});

}  // namespace weft::check
