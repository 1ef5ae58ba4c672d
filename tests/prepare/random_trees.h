// Random trees, and what their sequences see one by one.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "index.h"
#include "weft/tree.h"

namespace weft::test {

using List = std::vector<Index>;
using Lists = std::vector<List>;

inline Tree tree_from(const Lists& sequences) {
  List tokens, cu_seqlens{0};
  for (const List& s : sequences) {
    tokens.insert(tokens.end(), s.begin(), s.end());
    cu_seqlens.push_back(static_cast<Index>(tokens.size()));
  }
  return Tree::from_sequences(tokens, cu_seqlens);
}

inline Tree tree_from(const List& parents, const List& lengths) {
  return Tree::from_nodes({.parents = parents, .lengths = lengths});
}

// Sequences over few tokens, some of which go on from another one.
inline Lists random_sequences(std::mt19937_64& engine, Index most = 9, Index longest = 12) {
  const auto pick = [&](Index low, Index high) {
    return low + static_cast<Index>(engine() % static_cast<std::uint64_t>(high - low + 1));
  };
  Lists all;
  for (Index n = pick(0, most); n > 0; --n) {
    List s;
    if (!all.empty() && pick(0, 3) > 0) {
      s = all[at(pick(0, static_cast<Index>(all.size()) - 1))];
      s.resize(at(pick(0, static_cast<Index>(s.size()))));
    }
    for (Index more = pick(0, longest); more > 0; --more) s.push_back(pick(-1, 2));
    if (pick(0, 9) == 0) s.clear();
    all.push_back(s);
  }
  return all;
}

// Nodes in any order, also children before their parents, and empty ones.
inline Tree random_nodes(std::mt19937_64& engine, Index most, Index longest) {
  const Index n = 1 + static_cast<Index>(engine() % static_cast<std::uint64_t>(most));
  List names(at(n)), parents(at(n)), lengths(at(n));
  std::iota(names.begin(), names.end(), Index{0});
  std::shuffle(names.begin(), names.end(), engine);
  for (Index i = 0; i < n; ++i) {
    const bool root = i == 0 || engine() % 6 == 0;
    parents[at(names[at(i)])] = root ? kNoNode : names[engine() % static_cast<std::uint64_t>(i)];
    lengths[at(names[at(i)])] = static_cast<Index>(engine() % static_cast<std::uint64_t>(longest + 1));
  }
  return tree_from(parents, lengths);
}

inline List part_of(const List& all, const List& cu_seqlens, Index sequence) {
  return {all.begin() + cu_seqlens[at(sequence)], all.begin() + cu_seqlens[at(sequence) + 1]};
}

// Rows of the sequences, one list each.
inline Lists paths_of(const Tree& tree) {
  Lists paths;
  const List rows = tree.rows_of_tokens(), cu_seqlens = tree.cu_seqlens();
  for (Index s = 0; s < tree.sequences(); ++s) paths.push_back(part_of(rows, cu_seqlens, s));
  return paths;
}

// What a token of a sequence by itself sees: rows of the tree.
inline std::set<Index> seen_alone(const List& path, Index i, const Mask& mask) {
  std::set<Index> seen;
  for (Index j = 0; j <= i; ++j)
    if ((mask.left == -1 || i - j <= mask.left) && (!mask.chunk || i / *mask.chunk == j / *mask.chunk))
      seen.insert(path[at(j)]);
  return seen;
}

inline void expect_rows_see_what_sequences_see(const Tree& tree, const Mask& mask) {
  const Lists paths = paths_of(tree);
  const std::vector<Slice> slices = tree.slices(mask);
  std::vector<std::multiset<Index>> seen(at(tree.rows()));
  for (const Slice& s : slices)
    for (Index q = s.q_begin; q < s.q_end; ++q)
      for (Index k = s.k_begin; k < s.k_end; ++k)
        if (sees(s, q, k)) seen[at(q)].insert(k);
  std::vector<bool> reached(at(tree.rows()), false);
  for (const List& path : paths) {
    for (Index i = 0; i < static_cast<Index>(path.size()); ++i) {
      const std::set<Index> alone = seen_alone(path, i, mask);
      const std::multiset<Index>& row = seen[at(path[at(i)])];
      ASSERT_EQ(std::multiset<Index>(alone.begin(), alone.end()), row) << "row " << path[at(i)];
      reached[at(path[at(i)])] = true;
    }
  }
  for (Index row = 0; row < tree.rows(); ++row) {
    if (reached[at(row)]) continue;
    ASSERT_TRUE(seen[at(row)].empty()) << "padding row " << row;
  }
  EXPECT_NO_THROW(tree.problem(mask));  // disjoint, and only real rows
}

}  // namespace weft::test
