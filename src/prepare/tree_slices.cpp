// The mask of a tree: what each row would see in its sequence, as slices.
#include <algorithm>

#include "index.h"
#include "text.h"
#include "weft/tree.h"

namespace weft {
namespace {

// Key position minus query position is k - q in rows plus a constant of the two nodes: the query's `shift` minus the
// key's.
Index shift(const Tree::Node& node) { return node.begin - node.position; }

class TreeSlices {
 public:
  TreeSlices(std::span<const Tree::Node> nodes, const Mask& mask) : nodes_(nodes), mask_(mask) {
    find_whole();
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i].size() == 0) continue;
      add_ancestors(i);
      if (whole_[i])
        add({nodes[i].begin, nodes[i].subtree_end, nodes[i].begin, nodes[i].end, -kUnlimited, 0});
      else
        add_own(nodes[i]);
    }
  }

  std::vector<Slice> take() { return std::move(slices_); }

 private:
  // A node is whole if every row of its subtree sees all of its keys that come before it. What lies below such a node
  // is whole too.
  void find_whole() {
    std::vector<Index> last(nodes_.size());  // position of the last token below
    whole_.resize(nodes_.size());
    above_.resize(nodes_.size(), kNoNode);
    for (std::size_t i = nodes_.size(); i-- > 0;) {
      const Tree::Node& node = nodes_[i];
      last[i] = max_of(last[i], node.position + node.size() - 1);
      if (node.parent != kNoNode) last[at(node.parent)] = max_of(last[at(node.parent)], last[i]);
      const bool in_window = mask_.left == -1 || last[i] - node.position <= mask_.left;
      whole_[i] = in_window && chunk_of(node.position) == chunk_of(max_of(node.position, last[i]));
    }
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i].parent == kNoNode) continue;
      const std::size_t parent = at(nodes_[i].parent);
      above_[i] = whole_[parent] || nodes_[parent].size() == 0 ? above_[parent] : nodes_[i].parent;
    }
  }

  Index chunk_of(Index position) const { return mask_.chunk ? position / *mask_.chunk : 0; }

  // The first position that a query at this one sees.
  Index first_seen(Index position) const {
    const Index window = mask_.left == -1 ? 0 : max_of(0, position - mask_.left);
    return mask_.chunk ? max_of(window, chunk_of(position) * *mask_.chunk) : window;
  }

  // What rows of the node see of ancestors that are not whole, the nearest last. Only rows in the chunk of the node's
  // first row share one with an ancestor.
  void add_ancestors(std::size_t i) {
    const Tree::Node& node = nodes_[i];
    const Index reach = first_seen(node.position), first = static_cast<Index>(slices_.size());
    Index q_end = node.end;
    if (mask_.chunk) q_end = min_of(q_end, shift(node) + (chunk_of(node.position) + 1) * *mask_.chunk);
    for (Index a = above_[i]; a != kNoNode; a = above_[at(a)]) {
      const Tree::Node& from = nodes_[at(a)];
      if (from.position + from.size() <= reach) break;
      const Index chunk_begin = mask_.chunk ? shift(from) + chunk_of(node.position) * *mask_.chunk : from.begin;
      const Index lo = mask_.left == -1 ? -kUnlimited : shift(from) - shift(node) - mask_.left;
      add({node.begin, q_end, max_of(from.begin, chunk_begin), from.end, lo, kUnlimited});
    }
    std::reverse(slices_.begin() + first, slices_.end());
  }

  // The node's own rows, a slice a chunk.
  void add_own(const Tree::Node& node) {
    for (Index row = node.begin; row < node.end;) {
      Index end = node.end;
      if (mask_.chunk) end = min_of(end, shift(node) + (chunk_of(row - shift(node)) + 1) * *mask_.chunk);
      add({row, end, row, end, mask_.left == -1 ? -kUnlimited : -mask_.left, 0});
      row = end;
    }
  }

  void add(const Slice& s) {
    const Slice t = trimmed(s, false);
    if (t.q_begin < t.q_end) slices_.push_back(t);
  }

  std::span<const Tree::Node> nodes_;
  const Mask& mask_;
  std::vector<bool> whole_;
  std::vector<Index> above_;  // of each node the nearest ancestor that is not whole and has rows
  std::vector<Slice> slices_;
};

}  // namespace

std::vector<Slice> Tree::slices(const Mask& mask) const {
  if (mask.slices)
    throw Error(text("a mask of ", mask.slices->size(), " slices for a tree"),
                "leave the slices out: a tree makes its own");
  if (!mask.causal)
    throw Error("a mask that is not causal for a tree",
                "use a causal mask, with a window or chunks if need be: what branches from a row cannot be before it");
  const Problem checked(Packing(), mask);  // refuses windows and chunks that are none
  return TreeSlices(nodes_, checked.mask()).take();
}

}  // namespace weft
