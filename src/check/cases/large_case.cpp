#include <algorithm>
#include <utility>

#include "check/cases/random_case.h"
#include "check/cases/tree_case.h"
#include "index.h"

namespace weft::check {
namespace {

// Pairs of all heads: a few seconds for the dense softmax and each schedule; of f64, whose kernel is slow, far fewer.
constexpr Index kMostPairs = 160'000'000, kMostPairsF64 = 10'000'000, kWindowF64 = 300;

// Lengths that make up `tokens`: one, a few of any size, or many of some hundreds.
std::vector<Index> lengths_of(Choices& c, Index tokens) {
  const Index kind = c.pick(0, 3), documents = kind == 0 ? 1 : kind == 3 ? c.pick(20, 60) : c.pick(2, 6);
  std::vector<Index> cuts = {0, tokens};
  for (Index i = 1; i < documents; ++i) cuts.push_back(c.pick(0, tokens));
  std::sort(cuts.begin(), cuts.end());
  std::vector<Index> lengths;
  for (std::size_t i = 1; i < cuts.size(); ++i) lengths.push_back(cuts[i] - cuts[i - 1]);
  return lengths;
}

// As many documents, of about the same size or much shorter.
std::vector<Index> other_lengths(Choices& c, std::vector<Index> lengths) {
  for (Index& length : lengths) length = c.one_in(4) ? c.pick(0, length) : length + c.pick(0, 30);
  return lengths;
}

// Parts of the documents' queries, each with a band over two parts of one document's keys: no two share a pair.
std::vector<Slice> slices_of(Choices& c, const Case& from) {
  const std::vector<Range> q = documents_of(from.q), k = documents_of(from.k ? *from.k : from.q);
  std::vector<Slice> slices;
  if (q.empty() || k.empty()) return slices;
  for (const Range& rows : q) {
    const Index cut = c.pick(rows.begin, rows.end);
    for (const Range& part : {Range{rows.begin, cut}, Range{cut, rows.end}}) {
      const Range keys = k[at(c.pick(0, static_cast<Index>(k.size()) - 1))];
      const Index middle = c.pick(keys.begin, keys.end);
      for (const Range& half : {Range{keys.begin, middle}, Range{middle, keys.end}}) {
        if (part.size() == 0 || half.size() == 0 || c.one_in(5)) continue;
        Slice s{part.begin, part.end, half.begin, half.end};
        if (c.one_in(2)) s.lo = half.begin - part.begin - c.pick(0, 3000);
        if (c.one_in(2))
          s.hi = max_of(half.begin - part.begin + c.pick(0, 3000), is_unlimited(s.lo) ? -kMaxTokens : s.lo);
        slices.push_back(s);
      }
    }
  }
  return slices;
}

void choose_large_mask(Choices& c, Case& to, const Sizes& sizes) {
  Mask& m = to.mask;
  const Index kind = c.pick(0, 9);
  if (kind == 9) {  // nodes of half a share each on average, so at most as many tokens as elsewhere
    const Index nodes = c.one_in(2) ? 8 : 60;
    const Index length = max_of(1, sizes.most / nodes);
    return choose_tree(c, to, {.nodes = nodes, .length = length, .reach = 3000, .least = sizes.least});
  }
  if (kind == 8) {
    m.slices = slices_of(c, to);
    return;
  }
  m.causal = kind != 0 && (kind <= 2 || c.one_in(2));
  if (c.one_in(2)) m.align = Align::bottom_right;
  if (kind == 3 || kind == 6) m.left = c.one_in(2) ? c.pick(0, 300) : c.pick(300, 6000);
  if (kind == 4) {
    m.causal = false;
    m.left = c.pick(-1, 2000);
    m.right = c.pick(1, 2000);
  }
  if (kind == 5 || kind == 6) m.chunk = c.pick(50, 5000);
}

// Fewer heads, and of f64 a window, where there are too many pairs.
void limit_pairs(Case& to) {
  const Index most = to.dtype == DType::f64 ? kMostPairsF64 : kMostPairs;
  if (problem_of(to).visible_pairs() * to.heads_q <= most) return;
  to.heads_q = to.heads_k = 1;
  if (to.dtype != DType::f64 || problem_of(to).visible_pairs() <= most) return;
  if (to.tree) {
    TreeCase tree = *to.tree;
    tree.left = kWindowF64;
    set_tree(to, std::move(tree));
  }
  if (to.mask.slices) return;
  const auto narrow = [](Index& side) { side = side == -1 ? kWindowF64 : min_of(side, kWindowF64); };
  narrow(to.mask.left);
  if (!to.mask.causal) narrow(to.mask.right);
}

}  // namespace

Case random_large_case(Choices& c, const Sizes& sizes, std::optional<LayoutKind> layout) {
  Case to;
  to.layout = layout ? *layout : static_cast<LayoutKind>(c.pick(0, 6));
  to.ranks = c.pick(2, 8);
  const std::vector<Index> lengths = lengths_of(c, c.pick(sizes.least, sizes.most));
  const Index multiple = to.layout == LayoutKind::dual_chunk ? 2 * to.ranks : 1;
  const auto side = [&](const std::vector<Index>& of) {
    return random_side(c, static_cast<Index>(of.size()), [&](Index i) { return of[at(i)]; }, multiple,
                       {.ends = 50, .padding = 40});
  };
  to.q = side(lengths);
  if (c.one_in(4)) to.k = side(other_lengths(c, lengths));
  choose_large_mask(c, to, sizes);
  choose_runs(c, to, sizes.most / 8);
  choose_attention(c, to, 2);
  limit_pairs(to);
  to.seed = static_cast<unsigned long long>(c.pick(0, 999));
  return to;
}

}  // namespace weft::check
