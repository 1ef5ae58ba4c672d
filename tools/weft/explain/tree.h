// weft explain --tree: the tree in lines, a node each.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "weft/layout.h"
#include "weft/tree.h"

namespace weft::tool {

// Rows and positions of each node, how many sequences pass it, and the ranks that hold its rows.
void draw_tree(const Tree& tree, const Layout& layout);
nlohmann::json tree_json(const Tree& tree);

}  // namespace weft::tool
