// Prefix trees against the sequences that they are made of, one by one: rows, edges, packs.
#include "weft/tree.h"

#include <map>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "index.h"
#include "prepare/random_trees.h"
#include "refusal.h"

namespace weft {
namespace {

using namespace test;

TEST(Tree, OfSequencesByHand) {
  // 5 6 - 7 - 8
  //     \ 9
  const Tree tree = tree_from({{5, 6, 7, 8}, {5, 6, 9}, {}, {5, 6, 7}, {5, 6, 9}});
  EXPECT_EQ(tree.rows(), 5);
  EXPECT_EQ(tree.sequences(), 5);
  EXPECT_EQ(tree.separate_tokens(), 13);
  EXPECT_EQ(tree.separate_pairs(), 10 + 6 + 6 + 6);
  EXPECT_EQ(List(tree.tokens().begin(), tree.tokens().end()), (List{5, 6, 7, 8, 9}));
  EXPECT_EQ(tree.positions(), (List{0, 1, 2, 3, 2}));
  EXPECT_EQ(tree.weights(), (List{4, 4, 2, 1, 2}));
  EXPECT_EQ(tree.node_of_row(), (List{0, 0, 1, 2, 3}));
  EXPECT_EQ(tree.cu_seqlens(), (List{0, 4, 7, 7, 10, 13}));
  EXPECT_EQ(tree.rows_of_tokens(), (List{0, 1, 2, 3, 0, 1, 4, 0, 1, 2, 0, 1, 4}));
  EXPECT_EQ(tree.edges().rows, (List{0, 1, 2, 1}));
  EXPECT_EQ(tree.edges().next_rows, (List{1, 2, 3, 4}));
  EXPECT_EQ(tree.edges().weights, (List{4, 2, 1, 2}));
  EXPECT_EQ(tree.edge_of_token(), (List{-1, 0, 1, 2, -1, 0, 3, -1, 0, 1, -1, 0, 3}));
  EXPECT_EQ(
      tree.slices(),
      (std::vector<Slice>{{0, 5, 0, 2, -kUnlimited, 0}, {2, 4, 2, 4, -kUnlimited, 0}, {4, 5, 4, 5, -kUnlimited, 0}}));
}

TEST(Tree, OfNodesByHand) {
  // Two roots: 3 with children 0 and 2 in this order, 0 with child 4; and 1.
  const Tree tree = tree_from({3, -1, 3, -1, 0}, {2, 1, 1, 3, 0});
  EXPECT_EQ(tree.node_of_row(), (List{1, 3, 3, 3, 0, 0, 2}));
  EXPECT_EQ(tree.positions(), (List{0, 0, 1, 2, 3, 4, 3}));
  EXPECT_EQ(tree.sequences(), 3);  // leaves 1, 4, 2
  EXPECT_EQ(tree.rows_of_tokens(), (List{0, 1, 2, 3, 4, 5, 1, 2, 3, 6}));
  EXPECT_EQ(tree.weights(), (List{1, 2, 2, 2, 1, 1, 1}));
  EXPECT_TRUE(tree.tokens().empty());
  const Packing packing = tree.packing();
  EXPECT_EQ(packing.sequences(), 2);
  EXPECT_EQ(packing.q().used(0), 1);
  EXPECT_EQ(packing.q().used(1), 6);
}

TEST(Tree, EmptyOnes) {
  const Tree none = tree_from(Lists{});
  EXPECT_EQ(none.rows(), 0);
  EXPECT_EQ(none.packing().sequences(), 0);
  EXPECT_TRUE(none.slices().empty());
  EXPECT_EQ(none.edge_of_token(), List{});
  const Tree blank = tree_from({{}, {}});
  EXPECT_EQ(blank.sequences(), 2);
  EXPECT_EQ(blank.cu_seqlens(), (List{0, 0, 0}));
  EXPECT_EQ(Tree::joined({}).rows(), 0);
  const Tree hollow = tree_from({-1, 0, 0}, {0, 2, 3});  // a root of no tokens
  EXPECT_EQ(hollow.positions(), (List{0, 1, 0, 1, 2}));
  EXPECT_EQ(hollow.edges().rows, (List{0, 2, 3}));
  EXPECT_EQ(hollow.problem().visible_pairs(), 3 + 6);
}

TEST(Tree, RandomSequencesComeBack) {
  std::mt19937_64 engine(7);
  for (int round = 0; round < 500; ++round) {
    const Lists sequences = random_sequences(engine);
    const Tree tree = tree_from(sequences);
    std::map<List, Index> passed;
    for (const List& s : sequences)
      for (std::size_t n = 1; n <= s.size(); ++n) ++passed[{s.begin(), s.begin() + static_cast<std::ptrdiff_t>(n)}];
    ASSERT_EQ(tree.rows(), static_cast<Index>(passed.size()));  // no prefix twice
    ASSERT_EQ(tree.sequences(), static_cast<Index>(sequences.size()));
    const Lists paths = paths_of(tree);
    const List positions = tree.positions(), weights = tree.weights(), edge_of = tree.edge_of_token();
    const TreeEdges edges = tree.edges();
    std::set<std::pair<Index, Index>> distinct;
    for (std::size_t e = 0; e < edges.rows.size(); ++e)
      distinct.insert({edges.rows[e], tree.tokens()[at(edges.next_rows[e])]});
    ASSERT_EQ(distinct.size(), edges.rows.size());
    Index token = 0;
    for (std::size_t s = 0; s < sequences.size(); ++s) {
      ASSERT_EQ(paths[s].size(), sequences[s].size());
      for (std::size_t i = 0; i < paths[s].size(); ++i, ++token) {
        const Index row = paths[s][i];
        ASSERT_EQ(tree.tokens()[at(row)], sequences[s][i]);
        ASSERT_EQ(positions[at(row)], static_cast<Index>(i));
        ASSERT_EQ(weights[at(row)],
                  (passed[{sequences[s].begin(), sequences[s].begin() + static_cast<std::ptrdiff_t>(i) + 1}]));
        const Index edge = edge_of[at(token)];
        if (i == 0) {
          ASSERT_EQ(edge, kNoEdge);
          continue;
        }
        ASSERT_EQ(edges.rows[at(edge)], paths[s][i - 1]);
        ASSERT_EQ(edges.next_rows[at(edge)], row);
        ASSERT_EQ(edges.weights[at(edge)], weights[at(row)]);
      }
    }
    // The same tree from its nodes.
    List parents, lengths, ends;
    for (const Tree::Node& node : tree.nodes()) {
      parents.push_back(node.parent);
      lengths.push_back(node.size());
    }
    const Tree again = Tree::from_nodes({parents, lengths, tree.tokens(), tree.sequence_end()});
    ASSERT_EQ(again, tree);
  }
}

TEST(Tree, SiblingsKeepTheOrderOfTheSequences) {
  const Tree tree = tree_from({{9, 9, 1}, {9, 2}, {9, 9, 0}, {3}});
  EXPECT_EQ(List(tree.tokens().begin(), tree.tokens().end()), (List{9, 9, 1, 0, 2, 3}));
}

TEST(Tree, SubsetsAndJoinedTrees) {
  std::mt19937_64 engine(17);
  for (int round = 0; round < 200; ++round) {
    const Lists a = random_sequences(engine), b = random_sequences(engine);
    const Tree trees[] = {tree_from(a), tree_from(b)};
    const Tree both = Tree::joined(trees);
    ASSERT_EQ(both.sequences(), trees[0].sequences() + trees[1].sequences());
    Lists all = a;
    all.insert(all.end(), b.begin(), b.end());
    const Lists paths = paths_of(both);
    for (std::size_t s = 0; s < all.size(); ++s)
      for (std::size_t i = 0; i < all[s].size(); ++i) ASSERT_EQ(both.tokens()[at(paths[s][i])], all[s][i]);
    ASSERT_EQ(both.rows(), trees[0].rows() + trees[1].rows());
    List some;
    Lists chosen;
    for (Index s = 0; s < both.sequences(); ++s)
      if (engine() % 2 == 0) {
        some.insert(some.begin(), s);
        chosen.insert(chosen.begin(), all[at(s)]);
      }
    const Tree part = both.subset(some);
    const Lists part_paths = paths_of(part);
    ASSERT_EQ(part_paths.size(), chosen.size());
    for (std::size_t s = 0; s < chosen.size(); ++s) {
      ASSERT_EQ(part_paths[s].size(), chosen[s].size());
      for (std::size_t i = 0; i < chosen[s].size(); ++i) ASSERT_EQ(part.tokens()[at(part_paths[s][i])], chosen[s][i]);
    }
    expect_rows_see_what_sequences_see(part, {.causal = true});
  }
}

TEST(Tree, PaddingIsBetweenRootsAndAtTheEnd) {
  const Tree tree = tree_from({{1, 2, 3}, {1, 2, 4}, {7}});
  const Tree padded = tree.padded_to(8, 20);
  EXPECT_EQ(padded.rows(), 20);
  EXPECT_EQ(padded.used_rows(), 5);
  EXPECT_EQ(List(padded.tokens().begin(), padded.tokens().begin() + 9), (List{1, 2, 3, 4, 0, 0, 0, 0, 7}));
  EXPECT_EQ(padded.node_of_row()[4], kNoNode);
  EXPECT_EQ(padded.weights()[4], 0);
  EXPECT_EQ(padded.packing().q().offset(1), 8);
  EXPECT_EQ(padded.packing().q().offset(2), 16);
  EXPECT_EQ(padded.packing().q().tokens(), 20);
  EXPECT_EQ(padded.padded_to(1), tree);
}

TEST(Tree, Refusals) {
  expect_refusal([] { tree_from({-1, 5}, {1, 1}); }, {"node 1", "parent 5", "2 nodes"});
  expect_refusal([] { tree_from({-1, 2, 1}, {1, 1, 1}); }, {"node 1", "circle"});
  expect_refusal([] { tree_from({0}, {1}); }, {"node 0", "circle"});
  expect_refusal([] { tree_from({-1}, {-3}); }, {"node 0", "-3"});
  expect_refusal([] { tree_from({-1, 0}, {1}); }, {"2 parents", "1 lengths"});
  expect_refusal([] { tree_from({-1, 0}, {kMaxTokens, 1}); }, {"2 nodes", "2147483648 rows"});
  const List parents{-1, 0, 0}, lengths{2, 1, 1}, ids{1, 2, 3}, wrong_end{1, 3}, few{1};
  expect_refusal([&] { Tree::from_nodes({parents, lengths, ids, {}}); }, {"4 rows", "3 ids"});
  expect_refusal([&] { Tree::from_nodes({parents, lengths, {}, std::span<const Index>(wrong_end)}); },
                 {"sequence 1", "node 3"});
  expect_refusal([&] { Tree::from_nodes({parents, lengths, {}, std::span<const Index>(few)}); },
                 {"node 2 is in no sequence"});
  const Tree tree = tree_from(parents, lengths);
  expect_refusal([&] { tree.slices({}); }, {"not causal"});
  expect_refusal([&] { tree.slices({.causal = true, .left = -2}); }, {"-2"});
  expect_refusal([&] { tree.slices({.causal = true, .chunk = 0}); }, {"chunk size 0"});
  expect_refusal([&] { tree.padded_to(0); }, {"multiple of 0"});
  expect_refusal([&] { tree.padded_to(8, 7); }, {"8 rows", "7"});
  expect_refusal([&] { tree.subset(wrong_end); }, {"sequence 3 of 2"});
  const List ids_of_rows{1, 2}, cu{0, 3}, falling{0, 2, 1};
  expect_refusal([&] { Tree::from_sequences(ids_of_rows, cu); }, {"sequence 0", "0:3", "2"});
  expect_refusal([&] { Tree::from_sequences(ids_of_rows, falling); }, {"sequence 1", "2:1"});
  const Tree with_ids[] = {tree_from({{1, 2}}), tree};
  expect_refusal([&] { Tree::joined(with_ids); }, {"tree 0 has ids", "tree 1 has none"});
}

// Every sequence is in one pack, whole.
void expect_all_packed(const TreePacks& packs, const std::vector<Lists>& given) {
  std::set<std::pair<Index, Index>> found;
  Index rows = 0;
  for (std::size_t p = 0; p < packs.packs.size(); ++p) {
    const Tree& tree = packs.trees[p];
    EXPECT_EQ(tree.rows(), packs.options.budget);
    rows += tree.used_rows();
    const Lists paths = paths_of(tree);
    std::size_t next = 0;
    for (const TreePiece& piece : packs.packs[p]) {
      for (const Index s : piece.sequences) {
        const List& sequence = given[at(piece.tree)][at(s)];
        ASSERT_TRUE(found.insert({piece.tree, s}).second);
        ASSERT_EQ(paths[next].size(), sequence.size());
        for (std::size_t i = 0; i < sequence.size(); ++i) ASSERT_EQ(tree.tokens()[at(paths[next][i])], sequence[i]);
        ++next;
      }
    }
    EXPECT_EQ(next, paths.size());
  }
  std::size_t sequences = 0;
  Index separate = 0;
  for (const Lists& tree : given) {
    sequences += tree.size();
    for (const List& s : tree) separate += static_cast<Index>(s.size());
  }
  EXPECT_EQ(found.size(), sequences);
  const TreePackReport& r = packs.report;
  EXPECT_EQ(r.rows, rows);
  EXPECT_EQ(r.separate_tokens, separate);
  EXPECT_EQ(r.rows + r.padding + r.empty, r.packs * packs.options.budget);
}

TEST(TreePacks, EverySequenceIsInOnePack) {
  std::mt19937_64 engine(19);
  Index split = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<Lists> given;
    std::vector<Tree> trees;
    for (Index n = 1 + static_cast<Index>(engine() % 6); n > 0; --n) {
      given.push_back(random_sequences(engine, 24, 5));
      trees.push_back(tree_from(given.back()));
    }
    const TreePacks packs = pack_trees(trees, {.budget = 40,
                                               .multiple = 1 + round % 4,
                                               .keep_order = round % 3 == 0,
                                               .too_long = PackOptions::TooLong::split});
    expect_all_packed(packs, given);
    split += packs.report.split_trees;
    Index used = 0;
    for (const Tree& tree : trees) used += tree.used_rows();
    EXPECT_EQ(packs.report.repeated, packs.report.rows - used);
  }
  EXPECT_GT(split, 5);
}

TEST(TreePacks, SavesAndSplitsByHand) {
  const Tree prompt = tree_from({-1, 0, 0, 0}, {600, 100, 100, 100});
  const std::vector<Tree> trees{prompt, tree_from({-1}, {100})};
  const TreePackReport r = pack_trees(trees, {.budget = 1000}).report;
  EXPECT_EQ(r.packs, 1);
  EXPECT_EQ(r.rows, 1000);
  EXPECT_EQ(r.separate_tokens, 2200);
  EXPECT_EQ(r.pairs, 600.0 * 601 / 2 + 3 * (600.0 * 100 + 5050) + 5050);
  EXPECT_EQ(r.separate_pairs, 3 * 700.0 * 701 / 2 + 5050);
  expect_refusal([&] { pack_trees(trees, {.budget = 800}); }, {"tree 0", "900 rows", "3 sequences", "800"});
  const TreePacks split = pack_trees(trees, {.budget = 800, .too_long = PackOptions::TooLong::split});
  EXPECT_EQ(split.report.packs, 2);  // two branches with the prompt; one, and the document
  EXPECT_EQ(split.report.repeated, 600);
  EXPECT_EQ(split.report.split_trees, 1);
  expect_refusal([&] { pack_trees(trees, {.budget = 650, .too_long = PackOptions::TooLong::split}); },
                 {"tree 0, sequence 0", "700", "650"});
  expect_refusal([&] { pack_trees(trees, {.budget = 1000, .pair_limit = 1.1}); }, {"1.1", "pair_limit"});
  expect_refusal([&] { pack_trees(trees, {.budget = 0}); }, {"a pack of 0 rows"});
}

TEST(Tree, RefusesSequencesThatThereAreNotAndSlicesOfTheCaller) {
  const Tree tree = tree_from({{1, 2}, {1, 3}});
  for (const Index none : {Index{-1}, Index{2}})
    expect_refusal([&] { static_cast<void>(tree.length(none)); }, {"of 2", "name one that there is"});
  const Mask mask{.causal = true, .slices = std::vector<Slice>{{0, 1, 0, 1, 0, 0}}};
  expect_refusal([&] { static_cast<void>(tree.slices(mask)); },
                 {"a mask of 1 slices for a tree", "leave the slices out"});
}

}  // namespace
}  // namespace weft
