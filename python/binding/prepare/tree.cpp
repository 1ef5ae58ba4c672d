// Prefix trees, and packs of them.
#include "weft/tree.h"

#include <optional>
#include <utility>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "convert.h"
#include "index.h"
#include "module.h"
#include "problem.h"
#include "text.h"
#include "weft/error.h"

namespace weft::python {
namespace {

using namespace nb::literals;

auto tree_array(std::vector<Index> (Tree::*values)() const) {
  return [values](const Tree& tree) { return array_of((tree.*values)()); };
}
auto edge_array(std::vector<Index> TreeEdges::* field) {
  return [field](const Tree& tree) { return array_of(std::move(tree.edges().*field)); };
}
// A field of every node, in the order of the caller's numbers.
template <class Of>
auto node_array(Of of) {
  return [of](const Tree& tree) {
    std::vector<Index> values(tree.nodes().size());
    for (const Tree::Node& node : tree.nodes()) values[at(node.number)] = of(tree, node);
    return array_of(std::move(values));
  };
}
Index number_of(const Tree& tree, Index node) { return node == kNoNode ? kNoNode : tree.nodes()[at(node)].number; }

void bind_arrays(nb::class_<Tree>& tree) {
  tree.def_prop_ro("rows", &Tree::rows)
      .def_prop_ro("used_rows", &Tree::used_rows)
      .def_prop_ro("multiple", &Tree::multiple)
      .def_prop_ro("nodes", [](const Tree& t) { return t.nodes().size(); })
      .def_prop_ro("sequences", &Tree::sequences)
      .def_prop_ro("separate_tokens", &Tree::separate_tokens)
      .def_prop_ro("separate_pairs", &Tree::separate_pairs)
      .def_prop_ro("has_tokens", [](const Tree& t) { return !t.tokens().empty(); })
      .def_prop_ro(
          "tokens", [](const Tree& t) { return array_of(std::vector<Index>(t.tokens().begin(), t.tokens().end())); },
          kNew)
      .def_prop_ro(
          "sequence_end",
          [](const Tree& t) {
            std::vector<Index> ends;
            for (const Index end : t.sequence_end()) ends.push_back(number_of(t, end));
            return array_of(std::move(ends));
          },
          kNew)
      .def_prop_ro("parents", node_array([](const Tree& t, const Tree::Node& n) { return number_of(t, n.parent); }),
                   kNew)
      .def_prop_ro("lengths", node_array([](const Tree&, const Tree::Node& n) { return n.size(); }), kNew)
      .def_prop_ro("node_begins", node_array([](const Tree&, const Tree::Node& n) { return n.begin; }), kNew)
      .def_prop_ro("positions", tree_array(&Tree::positions), kNew)
      .def_prop_ro("node_of_row", tree_array(&Tree::node_of_row), kNew)
      .def_prop_ro("weights", tree_array(&Tree::weights), kNew)
      .def_prop_ro("cu_seqlens", tree_array(&Tree::cu_seqlens), kNew)
      .def_prop_ro("rows_of_tokens", tree_array(&Tree::rows_of_tokens), kNew)
      .def_prop_ro("edge_of_token", tree_array(&Tree::edge_of_token), kNew)
      .def_prop_ro("edge_rows", edge_array(&TreeEdges::rows), kNew)
      .def_prop_ro("edge_next_rows", edge_array(&TreeEdges::next_rows), kNew)
      .def_prop_ro("edge_weights", edge_array(&TreeEdges::weights), kNew)
      .def_prop_ro("packing", &Tree::packing)
      .def(
          "slices", [](const Tree& t, const Mask& mask) { return slices_array(t.slices(mask)); }, "mask"_a)
      .def(
          "mask",
          [](const Tree& t, const Mask& mask) {
            Mask own;
            own.slices = t.slices(mask);
            return own;
          },
          "mask"_a)
      .def("problem", &Tree::problem, "mask"_a);
}

void bind_tree(nb::module_& m) {
  nb::class_<Tree> tree(m, "Tree", "A forest of sequences that share prefixes; weft.prepare.Tree is made of it.");
  tree.def_static(
          "from_nodes",
          [](nb::object parents, nb::object lengths, nb::object tokens, nb::object ends) {
            const auto ids = optional_indices(tokens, "tokens").value_or(std::vector<Index>{});
            const auto given = optional_indices(ends, "sequence_end");
            const std::vector<Index> above = indices(parents, "parents"), sizes = indices(lengths, "lengths");
            TreeNodes nodes{above, sizes, ids, {}};
            if (given) nodes.sequence_end = std::span<const Index>(*given);
            return Tree::from_nodes(nodes);
          },
          "parents"_a, "lengths"_a, "tokens"_a.none() = nb::none(), "sequence_end"_a.none() = nb::none())
      .def_static(
          "from_sequences",
          [](nb::object tokens, nb::object cu_seqlens) {
            return Tree::from_sequences(indices(tokens, "tokens"), indices(cu_seqlens, "cu_seqlens"));
          },
          "tokens"_a, "cu_seqlens"_a)
      .def_static(
          "joined", [](const std::vector<Tree>& trees) { return Tree::joined(trees); }, "trees"_a)
      .def("padded_to", &Tree::padded_to, "multiple"_a, "rows"_a.none() = nb::none())
      .def(
          "subset", [](const Tree& t, nb::object sequences) { return t.subset(indices(sequences, "sequences")); },
          "sequences"_a)
      .def("__eq__", [](const Tree& a, const Tree& b) { return a == b; }, nb::is_operator());
  bind_arrays(tree);
}

void check_pack_of_trees(const TreePacks& packs, Index pack) {
  if (pack < 0 || pack >= static_cast<Index>(packs.packs.size()))
    throw Error(text("there is no pack ", pack, " of ", packs.packs.size()), "use 0 <= pack < len(packs)");
}

void bind_tree_packs(nb::module_& m) {
  nb::class_<TreePacks>(m, "TreePacks", "Trees dealt out to packs of one size.")
      .def("__len__", [](const TreePacks& p) { return p.packs.size(); })
      .def(
          "sequences",
          [](const TreePacks& p, Index pack) {
            check_pack_of_trees(p, pack);
            std::vector<Index> flat;
            for (const TreePiece& piece : p.packs[at(pack)])
              for (const Index s : piece.sequences) flat.insert(flat.end(), {piece.tree, s});
            return array_of(std::move(flat), 2);
          },
          "pack"_a)
      .def(
          "tree",
          [](const TreePacks& p, Index pack) {
            check_pack_of_trees(p, pack);
            return p.trees[at(pack)];
          },
          "pack"_a)
      .def_prop_ro("report", [](const TreePacks& p) {
        const TreePackReport& r = p.report;
        return dict_of("trees", r.trees, "packs", r.packs, "rows", r.rows, "padding", r.padding, "empty", r.empty,
                       "separate_tokens", r.separate_tokens, "repeated", r.repeated, "split_trees", r.split_trees,
                       "pairs", r.pairs, "separate_pairs", r.separate_pairs, "waste", r.waste);
      });
  m.def(
      "pack_trees",
      [](const std::vector<Tree>& trees, Index budget, Index multiple, bool keep_order, bool split) {
        return pack_trees(trees, {.budget = budget,
                                  .multiple = multiple,
                                  .keep_order = keep_order,
                                  .too_long = split ? PackOptions::TooLong::split : PackOptions::TooLong::refuse});
      },
      "trees"_a, "budget"_a, "multiple"_a, "keep_order"_a, "split"_a);
}

}  // namespace

void bind_trees(nb::module_& m) {
  bind_tree(m);
  bind_tree_packs(m);
}

}  // namespace weft::python
