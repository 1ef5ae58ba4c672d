// The mask of a tree: what each row would see in its sequence, as slices.
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
    slice_of_.resize(nodes.size(), kNone);
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i].size() == 0) continue;
      // A leaf may have one slice with what it sees above.
      const bool leaf = nodes[i].subtree_end == nodes[i].end, whole = whole_[i] && !(leaf && above_[i] != kNoNode);
      add_within_reach(i, !whole);
      if (whole)
        add_whole(i);
      else
        add_later_chunks(nodes[i]);
    }
  }

  std::vector<Slice> take() { return std::move(slices_); }

 private:
  static constexpr Index kNone = -1;

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
  // The first row past the chunk that a row of the node is in.
  Index chunk_end(const Tree::Node& node, Index row) const {
    return mask_.chunk ? min_of(node.end, shift(node) + (chunk_of(row - shift(node)) + 1) * *mask_.chunk) : node.end;
  }
  // The first position that a query at this one sees.
  Index first_seen(Index position) const {
    const Index window = mask_.left == -1 ? 0 : max_of(0, position - mask_.left);
    return mask_.chunk ? max_of(window, chunk_of(position) * *mask_.chunk) : window;
  }

  // One slice for the node and all below it. An only child goes on where its parent's ends.
  void add_whole(std::size_t i) {
    const Tree::Node& node = nodes_[i];
    const Index above = node.parent == kNoNode ? kNone : slice_of_[at(node.parent)];
    if (above != kNone && slices_[at(above)].k_end == node.begin && slices_[at(above)].q_end == node.subtree_end) {
      slices_[at(above)].k_end = node.end;
      slice_of_[i] = above;
      return;
    }
    slice_of_[i] = static_cast<Index>(slices_.size());
    add({node.begin, node.subtree_end, node.begin, node.end, -kUnlimited, 0});
  }

  // What the node's first rows, those of one chunk, see of ancestors that are not whole and, if asked, of the node:
  // later rows share no chunk with an ancestor. Keys that are neighbours in the stream and have one band become one
  // slice.
  void add_within_reach(std::size_t i, bool own) {
    const Tree::Node& node = nodes_[i];
    const Index reach = first_seen(node.position), q_end = chunk_end(node, node.begin);
    std::vector<Slice> found;
    const auto lo = [&](const Tree::Node& from) {
      return mask_.left == -1 ? -kUnlimited : shift(from) - shift(node) - mask_.left;
    };
    if (own) found.push_back({node.begin, q_end, node.begin, q_end, lo(node), 0});
    for (Index a = above_[i]; a != kNoNode; a = above_[at(a)]) {
      const Tree::Node& from = nodes_[at(a)];
      if (from.position + from.size() <= reach) break;
      const Index chunk_begin = mask_.chunk ? shift(from) + chunk_of(node.position) * *mask_.chunk : from.begin;
      const Slice s{node.begin, q_end, max_of(from.begin, chunk_begin), from.end, lo(from), 0};
      if (!found.empty() && found.back().k_begin == s.k_end && found.back().lo == s.lo)
        found.back().k_begin = s.k_begin;
      else
        found.push_back(s);
    }
    for (std::size_t n = found.size(); n-- > 0;) add(found[n]);
  }

  void add_later_chunks(const Tree::Node& node) {
    for (Index row = chunk_end(node, node.begin); row < node.end;) {
      const Index end = chunk_end(node, row);
      add({row, end, row, end, mask_.left == -1 ? -kUnlimited : -mask_.left, 0});
      row = end;
    }
  }

  void add(const Slice& s) {
    const Slice t = trimmed(s, false);
    if (t.q_begin < t.q_end) slices_.push_back(t);
    if (slices_.size() > kMostSlices)
      throw Error(text("a tree of ", nodes_.size(), " nodes makes more than ", kMostSlices,
                       " slices under this window or these chunks"),
                  "use another window, larger chunks, or fewer and longer nodes");
  }

  static constexpr std::size_t kMostSlices = std::size_t{1} << 26;  // 3.2 GB

  std::span<const Tree::Node> nodes_;
  const Mask& mask_;
  std::vector<bool> whole_;
  std::vector<Index> above_;     // of each node the nearest ancestor that is not whole and has rows
  std::vector<Index> slice_of_;  // of each whole node the slice that it is the last of
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
