// A tree from sequences of token ids: a radix tree, into which each sequence walks down as far as it is known.
#include <algorithm>
#include <cstdint>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "index.h"
#include "text.h"
#include "weft/tree.h"

namespace weft {
namespace {

class Trie {
 public:
  explicit Trie(std::span<const Index> tokens) : tokens_(tokens) {}

  void add(Index sequence, Range of) {
    Index node = kNoNode;
    for (Index from = of.begin; from < of.end;) {
      const auto [found, is_new] = child_.try_emplace({node, tokens_[at(from)]}, static_cast<Index>(branches_.size()));
      Index next = found->second;
      if (is_new) {
        branches_.push_back({node, {from, of.end}, sequence});
        from = of.end;
      } else {
        const Index common = shared(branches_[at(next)].tokens, {from, of.end});
        if (common < branches_[at(next)].tokens.size()) next = split(next, common);
        from += common;
      }
      node = next;
    }
    ends_.push_back(node);
  }

  Tree tree() const {
    // Siblings differ in the first sequence that passes them, which orders them.
    std::vector<Index> order(branches_.size()), number(branches_.size()), parents, lengths, ids, ends;
    std::iota(order.begin(), order.end(), Index{0});
    const auto place = [&](Index i) { return std::pair(branches_[at(i)].first, i); };
    std::sort(order.begin(), order.end(), [&](Index a, Index b) { return place(a) < place(b); });
    for (std::size_t i = 0; i < order.size(); ++i) number[at(order[i])] = static_cast<Index>(i);
    const auto numbered = [&](Index node) { return node == kNoNode ? kNoNode : number[at(node)]; };
    for (const Index i : order) {
      const Branch& branch = branches_[at(i)];
      parents.push_back(numbered(branch.parent));
      lengths.push_back(branch.tokens.size());
      ids.insert(ids.end(), tokens_.begin() + branch.tokens.begin, tokens_.begin() + branch.tokens.end);
    }
    std::transform(ends_.begin(), ends_.end(), std::back_inserter(ends), numbered);
    return Tree::from_nodes({parents, lengths, ids, std::span<const Index>(ends)});
  }

 private:
  struct Branch {
    Index parent;
    Range tokens;  // of the sequence that came first
    Index first;   // sequence
  };
  struct Key {
    Index parent, token;
    bool operator==(const Key&) const = default;
  };
  struct KeyHash {
    std::size_t operator()(const Key& key) const {
      std::uint64_t x = static_cast<std::uint64_t>(key.parent) * 0x9e3779b97f4a7c15u;
      x ^= static_cast<std::uint64_t>(key.token) + (x >> 29);
      x *= 0xbf58476d1ce4e5b9u;  // of splitmix64
      return x ^ (x >> 32);
    }
  };

  Index shared(Range a, Range b) const {
    const auto first = tokens_.begin() + a.begin;
    const auto stop = first + min_of(a.size(), b.size());
    return std::mismatch(first, stop, tokens_.begin() + b.begin).first - first;
  }

  // Puts a node of the first `length` tokens above a node, which keeps the rest.
  Index split(Index node, Index length) {
    const Index above = static_cast<Index>(branches_.size());
    Branch& rest = branches_[at(node)];
    const Branch upper{rest.parent, {rest.tokens.begin, rest.tokens.begin + length}, rest.first};
    child_[{upper.parent, tokens_[at(upper.tokens.begin)]}] = above;
    rest.parent = above;
    rest.tokens.begin += length;
    child_[{above, tokens_[at(rest.tokens.begin)]}] = node;
    branches_.push_back(upper);
    return above;
  }

  std::span<const Index> tokens_;
  std::vector<Branch> branches_;
  std::unordered_map<Key, Index, KeyHash> child_;  // by parent and first token
  std::vector<Index> ends_;                        // of each sequence
};

}  // namespace

Tree Tree::from_sequences(std::span<const Index> tokens, std::span<const Index> cu_seqlens) {
  const Index count = static_cast<Index>(tokens.size());
  if (cu_seqlens.empty()) throw Error("cu_seqlens is empty", "give [0, length of the first, ...]; [0] is no sequence");
  Trie trie(tokens);
  for (std::size_t i = 0; i + 1 < cu_seqlens.size(); ++i) {
    const Range of{cu_seqlens[i], cu_seqlens[i + 1]};
    if (of.begin < 0 || of.end < of.begin || of.end > count)
      throw Error(text("sequence ", i, " is tokens ", of.begin, ":", of.end, " of ", count),
                  "give cu_seqlens that rise from 0 to the number of tokens");
    trie.add(static_cast<Index>(i), of);
  }
  Tree tree = trie.tree();
  for (std::size_t i = 0; i < tree.nodes_.size(); ++i) tree.nodes_[i].number = static_cast<Index>(i);
  return tree;
}

}  // namespace weft
