#include "explain/tree.h"

#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "index.h"
#include "terminal/numbers.h"
#include "terminal/terminal.h"
#include "weft/plan.h"

namespace weft::tool {
namespace {

constexpr Index kNodesListed = 48, kHolders = 32, kDepthShown = 12;

std::string range_words(Index begin, Index end) { return fmt::format("[{}, {})", begin, end); }

double saved(double tree, double separate) { return separate > 0 ? 1 - tree / separate : 0; }

double pairs_of(const Tree& tree) {
  double pairs = 0;
  for (const Slice& s : tree.slices()) pairs += static_cast<double>(visible_pairs(s));
  return pairs;
}

// Branches in front of each node, in stream order: "│  ├─ ". Of deep nodes only the last of them.
std::vector<std::string> branches(std::span<const Tree::Node> nodes, Index listed) {
  std::vector<bool> has_later(nodes.size(), false), is_parent(nodes.size(), false);  // a later sibling
  bool later_root = false;
  for (std::size_t i = nodes.size(); i-- > 0;) {
    const Index parent = nodes[i].parent;
    has_later[i] = parent == kNoNode ? later_root : static_cast<bool>(is_parent[at(parent)]);
    if (parent == kNoNode)
      later_root = true;
    else
      is_parent[at(parent)] = true;
  }
  std::vector<std::string> all;
  for (Index i = 0; i < listed; ++i) {
    std::string line;
    Index depth = 0;
    for (Index n = i; nodes[at(n)].parent != kNoNode; n = nodes[at(n)].parent, ++depth) {
      if (depth >= kDepthShown) continue;
      const bool more = has_later[at(n)];
      line.insert(0, n == i ? (more ? "├─ " : "└─ ") : (more ? "│  " : "   "));
    }
    if (depth > kDepthShown) line.insert(0, fmt::format("({} above) ", depth - kDepthShown));
    all.push_back(line);
  }
  return all;
}

// The rows of a node that are drawn: all, or some of them.
std::vector<Index> drawn_rows(const Tree::Node& node) {
  const Index shown = min_of(node.size(), kHolders);
  std::vector<Index> rows;
  for (Index i = 0; i < shown; ++i) rows.push_back(node.begin + i * node.size() / shown);
  return rows;
}

// Who holds the drawn rows of the listed nodes. Looks rows up in runs: a tree may have more rows than fit in memory.
std::map<Index, Index> owners(std::span<const Tree::Node> nodes, const Layout& layout) {
  std::map<Index, Index> rank_of;
  if (layout.ranks() > kLetters) return rank_of;
  std::set<Index> rows;
  for (const Tree::Node& node : nodes)
    for (const Index row : drawn_rows(node)) rows.insert(row);
  for (Index rank = 0; rank < layout.ranks(); ++rank)
    for (const Run& run : layout.runs(rank).runs())
      for (auto row = rows.lower_bound(run.token); row != rows.end() && *row < run.token + run.count * run.stride;
           ++row)
        if ((*row - run.token) % run.stride == 0) rank_of[*row] = rank;
  return rank_of;
}

// A letter for each row, or for every so many of them.
std::string holders(const Tree::Node& node, const std::map<Index, Index>& rank_of) {
  std::string out;
  for (const Index row : drawn_rows(node)) {
    const auto held = rank_of.find(row);
    out += held == rank_of.end() ? "·" : coloured(std::string(1, letter(held->second)), held->second, true);
  }
  return out;
}

}  // namespace

void draw_tree(const Tree& tree, const Layout& layout) {
  const std::span<const Tree::Node> nodes = tree.nodes();
  const Index listed = min_of(static_cast<Index>(nodes.size()), kNodesListed);
  fmt::print(
      "A tree of {} nodes: {} rows for {} tokens of {} sequences, {:.1f} % of the tokens and {:.1f} % of the "
      "causal pairs saved\n\n",
      grouped(static_cast<Index>(nodes.size())), grouped(tree.used_rows()), grouped(tree.separate_tokens()),
      grouped(tree.sequences()),
      100 * saved(static_cast<double>(tree.used_rows()), static_cast<double>(tree.separate_tokens())),
      100 * saved(pairs_of(tree), tree.separate_pairs()));
  const std::vector<std::string> branch = branches(nodes, listed);
  const bool drawn = layout.ranks() <= kLetters;
  const std::map<Index, Index> rank_of = owners(nodes.first(at(listed)), layout);
  // Branches are drawn in letters of three bytes and one column.
  const auto columns = [](const std::string& s) {
    return std::count_if(s.begin(), s.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
  };
  std::ptrdiff_t width = 4;
  for (Index i = 0; i < listed; ++i)
    width = std::max(width,
                     columns(branch[at(i)]) + static_cast<std::ptrdiff_t>(std::to_string(nodes[at(i)].number).size()));
  fmt::print("{:<{}}  {:<24}{:<24}{:>9}{}\n", "node", width, "rows", "positions", "sequences",
             drawn ? "  held by" : "");
  for (Index i = 0; i < listed; ++i) {
    const Tree::Node& node = nodes[at(i)];
    const std::string name = branch[at(i)] + std::to_string(node.number);
    fmt::print("{}{:{}}  {:<24}{:<24}{:>9}{}\n", name, "", width - columns(name), range_words(node.begin, node.end),
               range_words(node.position, node.position + node.size()), grouped(node.sequences),
               drawn && node.size() > 0 ? "  " + holders(node, rank_of) : "");
  }
  if (listed < static_cast<Index>(nodes.size()))
    fmt::print("… and {} more nodes\n", grouped(static_cast<Index>(nodes.size()) - listed));
  fmt::print("\n");
}

nlohmann::json tree_json(const Tree& tree) {
  nlohmann::json out = {{"rows", tree.rows()},
                        {"used_rows", tree.used_rows()},
                        {"sequences", tree.sequences()},
                        {"separate_tokens", tree.separate_tokens()},
                        {"separate_pairs", tree.separate_pairs()},
                        {"nodes", nlohmann::json::array()}};
  for (const Tree::Node& node : tree.nodes())
    out["nodes"].push_back({{"node", node.number},
                            {"parent", node.parent == kNoNode ? kNoNode : tree.nodes()[at(node.parent)].number},
                            {"rows", {node.begin, node.end}},
                            {"position", node.position},
                            {"sequences", node.sequences}});
  return out;
}

}  // namespace weft::tool
