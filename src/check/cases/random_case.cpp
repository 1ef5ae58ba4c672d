#include "check/cases/random_case.h"

#include <algorithm>
#include <utility>

#include "check/cases/tree_case.h"
#include "index.h"

namespace weft::check {
namespace {

Index length(Choices& c) {
  switch (c.pick(0, 3)) {
    case 0:
      return c.pick(0, 2);
    case 1:
      return c.pick(0, 7);
    default:
      return c.pick(1, 17);
  }
}

void choose_mask(Choices& c, Case& to) {
  Mask& m = to.mask;
  const Index kind = c.pick(0, 8);
  if (kind == 7) {
    m.slices = random_slices(c, to);
    return;
  }
  if (kind == 8) return choose_tree(c, to, kSmallTree);
  if (c.one_in(2)) m.align = Align::bottom_right;
  if (kind == 1 || kind == 2) {
    m.causal = true;
    m.align = kind == 2 ? Align::bottom_right : Align::top_left;
  }
  if (kind >= 3) m.causal = c.one_in(2);
  if (kind == 3 || kind == 6) m.left = c.pick(0, 9);
  if (kind == 4) {
    m.causal = false;
    m.left = c.pick(-1, 7);
  }
  if (kind == 4 || (kind == 6 && c.one_in(2))) m.right = c.pick(1, 7);
  if (kind == 5 || kind == 6) m.chunk = c.pick(1, 9);
}

}  // namespace

Side random_side(Choices& c, Index sequences, const std::function<Index(Index)>& length_of, Index multiple,
                 const Gaps& gaps) {
  Side side;
  const bool padded = multiple > 1 || c.one_in(2);
  Index offset = c.one_in(3) ? c.pick(1, gaps.ends) : 0;
  side.cu_seqlens = {padded ? 0 : offset};
  if (padded) side.cu_seqlens_padded = {offset};
  for (Index i = 0; i < sequences; ++i) {
    const Index used = length_of(i), room = used + (padded && c.one_in(2) ? c.pick(0, gaps.padding) : 0);
    side.cu_seqlens.push_back(side.cu_seqlens.back() + used);
    offset += ceil_div(room, multiple) * multiple;
    if (padded) side.cu_seqlens_padded.push_back(offset);
  }
  if (c.one_in(3)) side.tokens = offset + c.pick(0, gaps.ends);
  return side;
}

std::vector<Range> documents_of(const Side& side) {
  const std::vector<Index>& begin = side.cu_seqlens_padded.empty() ? side.cu_seqlens : side.cu_seqlens_padded;
  std::vector<Range> real;
  for (std::size_t i = 0; i + 1 < begin.size(); ++i) {
    const Range r{begin[i], begin[i] + side.cu_seqlens[i + 1] - side.cu_seqlens[i]};
    if (r.size() > 0) real.push_back(r);
  }
  return real;
}

void choose_runs(Choices& c, Case& to, Index longest) {
  if (to.layout != LayoutKind::explicit_runs) return;
  const Index stride = c.one_in(3) ? c.pick(2, 5) : 1;
  to.runs = random_runs(c, to.q, to.ranks, stride, longest);
  if (to.k) to.k_runs = random_runs(c, *to.k, to.ranks, stride, longest);
}

void choose_attention(Choices& c, Case& to, Index largest_group) {
  to.heads_k = c.pick(1, 2);
  to.heads_q = to.heads_k * c.pick(1, largest_group);
  to.dim_qk = c.pick(1, 9);
  to.dim_v = c.one_in(2) ? to.dim_qk : c.pick(1, 9);
  to.dtype = static_cast<DType>(c.pick(0, 3));
  if (c.one_in(3)) to.scale = static_cast<double>(c.pick(0, 8)) / 4;
  if (c.one_in(3)) to.softcap = static_cast<double>(c.pick(1, 8)) / 2;
  to.sink = static_cast<Case::SinkKind>(c.pick(0, 2));
}

std::vector<Slice> random_slices(Choices& c, const Case& from) {
  const std::vector<Range> q = documents_of(from.q), k = documents_of(from.k ? *from.k : from.q);
  std::vector<Slice> slices;
  if (q.empty() || k.empty()) return slices;
  const auto part = [&](const std::vector<Range>& real) {
    const Range r = real[at(c.pick(0, static_cast<Index>(real.size()) - 1))];
    const Index begin = c.pick(r.begin, r.end - 1);
    return Range{c.one_in(2) ? r.begin : begin, c.one_in(2) ? r.end : c.pick(begin, r.end)};
  };
  for (Index n = c.pick(0, 6); n > 0; --n) {
    const Range a = part(q), b = part(k);
    Slice s{a.begin, a.end, b.begin, b.end};
    if (c.one_in(2)) s.lo = b.begin - a.begin - c.pick(-4, 12);
    if (c.one_in(2)) s.hi = max_of(b.begin - a.begin + c.pick(-4, 12), is_unlimited(s.lo) ? -kMaxTokens : s.lo);
    const bool taken = std::any_of(slices.begin(), slices.end(), [&](const Slice& other) {
      for (Index i = a.begin; i < a.end; ++i)
        for (Index j = b.begin; j < b.end; ++j)
          if (sees(s, i, j) && sees(other, i, j)) return true;
      return false;
    });
    if (!taken) slices.push_back(s);
  }
  return slices;
}

std::vector<std::vector<Run>> random_runs(Choices& c, const Side& side, Index ranks, Index stride, Index longest) {
  const std::vector<Index>& offsets = side.cu_seqlens_padded.empty() ? side.cu_seqlens : side.cu_seqlens_padded;
  std::vector<std::vector<Run>> runs(at(ranks));
  std::vector<Index> next_row(at(ranks), 0);
  std::vector<Run> blocks;
  for (Index residue = 0; residue < stride; ++residue) {
    for (Index token = offsets.front() + residue; token < offsets.back();) {
      const Index left = ceil_div(offsets.back() - token, stride);
      const Index count = min_of(left, c.pick(1, longest));
      blocks.push_back({0, token, count, stride});
      token += count * stride;
    }
  }
  for (std::size_t i = blocks.size(); i > 1; --i) {
    if (c.one_in(3)) std::swap(blocks[i - 1], blocks[at(c.pick(0, static_cast<Index>(i) - 1))]);
  }
  for (Run& block : blocks) {
    const std::size_t rank = at(c.pick(0, ranks - 1));
    block.row = next_row[rank] + (c.one_in(5) ? 1 : 0);
    next_row[rank] = block.row + block.count;
    runs[rank].push_back(block);
  }
  return runs;
}

Case random_case(Choices& c, std::optional<LayoutKind> layout) {
  Case to;
  to.layout = layout ? *layout : static_cast<LayoutKind>(c.pick(0, 6));
  to.ranks = c.pick(1, 8);
  if (to.ranks == 1 && !c.one_in(8)) to.ranks = 2;
  const Index sequences = c.pick(0, 5);
  const Index multiple = to.layout == LayoutKind::dual_chunk ? 2 * to.ranks : 1;
  const auto side = [&] {
    return random_side(c, sequences, [&](Index) { return length(c); }, multiple, {.ends = 5, .padding = 4});
  };
  to.q = side();
  if (c.one_in(3)) to.k = side();
  choose_mask(c, to);
  choose_runs(c, to, 12);
  choose_attention(c, to, 3);
  to.seed = static_cast<unsigned long long>(c.pick(0, 999));
  return to;
}

}  // namespace weft::check
