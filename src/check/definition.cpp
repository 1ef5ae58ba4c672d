#include "check/definition.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "index.h"

namespace weft::check {
namespace {

const std::vector<Index>& begins(const Side& side) {
  return side.cu_seqlens_padded.empty() ? side.cu_seqlens : side.cu_seqlens_padded;
}

std::vector<Index> lengths(const Side& side) {
  std::vector<Index> out;
  for (std::size_t i = 1; i < side.cu_seqlens.size(); ++i) out.push_back(side.cu_seqlens[i] - side.cu_seqlens[i - 1]);
  return out;
}

std::vector<Place> places(const Side& side) {
  std::vector<Place> out(at(side.tokens.value_or(begins(side).back())));
  const std::vector<Index> length = lengths(side);
  for (std::size_t s = 0; s < length.size(); ++s)
    for (Index p = 0; p < length[s]; ++p) out[at(begins(side)[s] + p)] = {static_cast<Index>(s), p};
  return out;
}

Index chunk_of(Index position, Index chunk) {
  return static_cast<Index>(std::floor(static_cast<double>(position) / static_cast<double>(chunk)));
}

}  // namespace

Buffer rank_buffer(const Layout& layout, RunList::Members members) {
  Buffer b{layout.rank_order(members), {}};
  for (Index m = 0; m < members.count; ++m) {
    const std::vector<Index> own = layout.tokens(members.first + m * members.step);
    b.tokens.insert(b.tokens.end(), own.begin(), own.end());
  }
  return b;
}

Buffer stream_buffer(Index tokens) {
  Buffer b{RunList::sequence_order(tokens), std::vector<Index>(at(tokens))};
  std::iota(b.tokens.begin(), b.tokens.end(), Index{0});
  return b;
}

Definition::Definition(const Case& c)
    : case_(c),
      q_(places(c.q)),
      k_(places(c.k ? *c.k : c.q)),
      q_length_(lengths(c.q)),
      k_length_(lengths(c.k ? *c.k : c.q)),
      k_begin_(begins(c.k ? *c.k : c.q)) {
  if (c.tree) place_tree();
}

// The nodes of a tree, roots one after another from where the stream's sequences begin.
void Definition::place_tree() {
  const TreeCase& tree = *case_.tree;
  for (std::size_t i = 0; i < tree.parents.size(); ++i)
    nodes_.push_back({.parent = tree.parents[i], .length = tree.lengths[i]});
  std::size_t root = 0;
  for (std::size_t i = 0; i < nodes_.size(); ++i)
    if (nodes_[i].parent == -1) place_node(static_cast<Index>(i), k_begin_[root++], 0);
  for (Place& place : q_) place = {};
  for (std::size_t i = 0; i < nodes_.size(); ++i)
    for (Index t = 0; t < nodes_[i].length; ++t)
      q_[at(nodes_[i].begin + t)] = {static_cast<Index>(i), nodes_[i].position + t};
  k_ = q_;
}

// Depth first: the node, then each child with all below it. Returns where they end.
Index Definition::place_node(Index node, Index begin, Index position) {
  TreeNode& n = nodes_[at(node)];
  n.begin = begin;
  n.position = position;
  Index end = begin + n.length;
  for (std::size_t i = 0; i < nodes_.size(); ++i)
    if (nodes_[i].parent == node) end = place_node(static_cast<Index>(i), end, position + n.length);
  return end;
}

// The tokens of the query's own node, or of one above it, that the query sees.
Range Definition::seen_of_node(Index query, Index node) const {
  const TreeNode& n = nodes_[at(node)];
  const Index position = q(query).position;
  Index first = n.position, last = std::min(n.position + n.length - 1, position);
  if (case_.tree->left != -1) first = std::max(first, position - case_.tree->left);
  if (case_.tree->chunk) first = std::max(first, chunk_of(position, *case_.tree->chunk) * *case_.tree->chunk);
  return {n.begin + first - n.position, n.begin + last - n.position + 1};
}

bool Definition::visible(Index q_token, Index k_token) const {
  if (case_.tree) {
    if (!q(q_token).real() || !k(k_token).real()) return false;
    Index node = q(q_token).sequence;
    while (node != -1 && node != k(k_token).sequence) node = nodes_[at(node)].parent;
    if (node == -1) return false;
    const Range seen = seen_of_node(q_token, node);
    return seen.begin <= k_token && k_token < seen.end;
  }
  const Mask& m = case_.mask;
  if (m.slices)
    return std::any_of(m.slices->begin(), m.slices->end(), [&](const Slice& s) {
      const Index d = k_token - q_token;
      return s.q_begin <= q_token && q_token < s.q_end && s.k_begin <= k_token && k_token < s.k_end && s.lo <= d &&
             d <= s.hi;
    });
  const Place &a = q(q_token), &b = k(k_token);
  if (!a.real() || !b.real() || a.sequence != b.sequence) return false;
  const std::size_t s = at(a.sequence);
  const Index i = a.position + (m.align == Align::bottom_right ? k_length_[s] - q_length_[s] : 0), j = b.position;
  if (m.causal && j > i) return false;
  if (m.left != -1 && i - j > m.left) return false;
  if (m.right != -1 && j - i > m.right) return false;
  return !m.chunk || chunk_of(i, *m.chunk) == chunk_of(j, *m.chunk);
}

void Definition::visible_runs(Index q_token, std::vector<Range>& to) const {
  const Mask& m = case_.mask;
  const auto add = [&](Index first, Index last) {
    if (first <= last) to.push_back({first, last + 1});
  };
  if (case_.tree) {
    for (Index node = q(q_token).sequence; node != -1; node = nodes_[at(node)].parent) {
      const Range seen = seen_of_node(q_token, node);
      add(seen.begin, seen.end - 1);
    }
    std::reverse(to.begin(), to.end());
    return;
  }
  if (m.slices) {
    for (const Slice& s : *m.slices) {
      if (q_token < s.q_begin || q_token >= s.q_end) continue;
      add(std::max(s.k_begin, shift_bound(s.lo, q_token)), std::min(s.k_end - 1, shift_bound(s.hi, q_token)));
    }
    std::sort(to.begin(), to.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    return;
  }
  const Place& a = q(q_token);
  if (!a.real()) return;
  const std::size_t s = at(a.sequence);
  const Index i = a.position + (m.align == Align::bottom_right ? k_length_[s] - q_length_[s] : 0);
  Index first = 0, last = k_length_[s] - 1;
  if (m.causal) last = std::min(last, i);
  if (m.left != -1) first = std::max(first, shift_bound(-m.left, i));
  if (m.right != -1) last = std::min(last, shift_bound(m.right, i));
  if (m.chunk) {
    first = std::max(first, chunk_of(i, *m.chunk) * *m.chunk);
    last = std::min(last, chunk_of(i, *m.chunk) * *m.chunk + *m.chunk - 1);
  }
  add(k_begin_[s] + first, k_begin_[s] + last);
}

Index Definition::first_key(Index k_token) const {
  const Place& p = k(k_token);
  const Index begin = k_begin_[at(p.sequence)];
  return case_.mask.chunk ? begin + chunk_of(p.position, *case_.mask.chunk) * *case_.mask.chunk : begin;
}

std::vector<std::vector<Index>> Definition::owned(bool keys) const {
  if (case_.layout >= LayoutKind::balanced) return {};  // those are tables, not arithmetic
  const Side& side = keys && case_.k ? *case_.k : case_.q;
  const std::vector<Index>& offsets = begins(side);
  const Index n = case_.ranks, begin = offsets.front(), total = offsets.back() - begin;
  std::vector<std::vector<Index>> rows(at(n));
  const auto folded = [&](Index piece) { return piece < n ? piece : 2 * n - 1 - piece; };
  for (Index t = begin; t < offsets.back(); ++t) {
    Index owner = 0;
    switch (case_.layout) {
      case LayoutKind::contiguous:
        owner = (t - begin) / ((total + n - 1) / n);
        break;
      case LayoutKind::zigzag:
        owner = folded((t - begin) / ((total + 2 * n - 1) / (2 * n)));
        break;
      case LayoutKind::dual_chunk: {
        std::size_t s = 0;
        while (offsets[s + 1] <= t) ++s;
        owner = folded((t - offsets[s]) / ((offsets[s + 1] - offsets[s]) / (2 * n)));
        break;
      }
      default:
        owner = (t - begin) % n;  // striped
    }
    rows[at(owner)].push_back(t);
  }
  return rows;
}

}  // namespace weft::check
