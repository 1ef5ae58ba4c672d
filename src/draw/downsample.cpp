#include "draw/downsample.h"

#include <algorithm>

#include "index.h"

namespace weft::draw {

BundledSlices bundled(std::vector<Slice> slices, Index most) {
  const Index count = static_cast<Index>(slices.size());
  if (count <= most) return {std::move(slices), 1};
  std::sort(slices.begin(), slices.end(), [](const Slice& a, const Slice& b) { return a.q_begin < b.q_begin; });
  BundledSlices out{{}, ceil_div(count, max_of(most, 1))};
  for (Index n = 0; n < count; ++n) {
    const Slice& s = slices[at(n)];
    if (n % out.each == 0) {
      out.slices.push_back(s);
      continue;
    }
    Slice& all = out.slices.back();
    all = {min_of(all.q_begin, s.q_begin), max_of(all.q_end, s.q_end), min_of(all.k_begin, s.k_begin),
           max_of(all.k_end, s.k_end),     min_of(all.lo, s.lo),       max_of(all.hi, s.hi)};
  }
  return out;
}

BundledStream bundled(const Stream& stream, Index most) {
  const Index count = stream.sequences();
  BundledStream out{{0}, {}, max_of(1, ceil_div(count, max_of(most, 1)))};
  if (count > 0) out.offsets[0] = stream.offset(0);
  for (Index i = 0; i < count; i += out.each) {
    const Index end = min_of(count, i + out.each), begin = stream.offset(i);
    Index last = begin;  // behind the last token that is no padding
    for (Index n = i; n < end; ++n)
      if (stream.used(n) > 0) last = stream.offset(n) + stream.used(n);
    out.used.push_back(last - begin);
    out.offsets.push_back(stream.offsets()[at(end)]);
  }
  return out;
}

Holding holding(const Layout& layout, Index most) {
  Holding out;
  for (Index r = 0; r < layout.ranks(); ++r)
    for (const Run& run : layout.runs(r).runs()) out.parts.push_back({r, run});
  if (static_cast<Index>(out.parts.size()) <= most) return out;
  const Index tokens = layout.stream().tokens();
  out.stretch = max_of(1, ceil_div(tokens, max_of(most, 1)));
  std::vector<Index> ranks(at(ceil_div(tokens, out.stretch)), -1);
  const auto middle = [&](Index n) { return min_of(n * out.stretch + out.stretch / 2, tokens - 1); };
  for (const auto& [rank, run] : out.parts) {
    const Index last = run.token + (run.count - 1) * run.stride;
    for (Index n = run.token / out.stretch; n <= last / out.stretch; ++n) {
      const Index m = middle(n);
      if (m >= run.token && m <= last && (m - run.token) % run.stride == 0) ranks[at(n)] = rank;
    }
  }
  out.parts.clear();
  for (Index n = 0; n < static_cast<Index>(ranks.size()); ++n) {
    const Index rank = ranks[at(n)], count = min_of(out.stretch, tokens - n * out.stretch);
    if (rank < 0) continue;
    const bool goes_on = !out.parts.empty() && out.parts.back().rank == rank &&
                         out.parts.back().run.token + out.parts.back().run.count == n * out.stretch;
    if (goes_on)
      out.parts.back().run.count += count;
    else
      out.parts.push_back({rank, {0, n * out.stretch, count, 1}});
  }
  return out;
}

}  // namespace weft::draw
