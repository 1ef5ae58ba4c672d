#include "plan/runs.h"

#include <algorithm>
#include <utility>

#include "plan/layout_data.h"
#include "ranges.h"
#include "text.h"

namespace weft {
namespace detail {
namespace {

std::string show(const Run& r) {
  return text("{row ", r.row, ", token ", r.token, ", count ", r.count, ", stride ", r.stride, "}");
}

}  // namespace

RunTable::RunTable(std::vector<Run> unsorted, Index common) : runs(std::move(unsorted)), stride(common) {
  std::erase_if(runs, [](const Run& r) { return r.count == 0; });
  for (Run& r : runs) r.stride = stride;
  if (stride == 1) {  // without a division for each comparison
    std::sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) { return a.token < b.token; });
    if (!runs.empty()) residues = {0};
    class_begin = runs.empty() ? std::vector<Index>{0} : std::vector<Index>{0, static_cast<Index>(runs.size())};
    return;
  }
  std::sort(runs.begin(), runs.end(), [this](const Run& a, const Run& b) {
    return std::pair(a.token % stride, a.token) < std::pair(b.token % stride, b.token);
  });
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (!residues.empty() && residues.back() == runs[i].token % stride) continue;
    residues.push_back(runs[i].token % stride);
    class_begin.push_back(static_cast<Index>(i));
  }
  class_begin.push_back(static_cast<Index>(runs.size()));
}

TableRuns RunTable::view() const {
  return {runs.data(), residues.data(), class_begin.data(), static_cast<Index>(residues.size()), stride};
}

Index common_stride(std::span<const Run> runs) {
  const Run* first = nullptr;
  for (const Run& r : runs) {
    if (r.count < 2) continue;
    if (!first) first = &r;
    if (r.stride != first->stride)
      throw Error(text("runs ", show(*first), " and ", show(r), " have different strides"),
                  "cut the layout into runs of one stride (stride 1 always works)");
  }
  return first ? first->stride : 1;
}

void check_rows(std::span<const Run> runs, Index rows, std::string_view whose) {
  std::vector<Range> taken;
  for (const Run& r : runs) {
    // Compared by subtraction: sums of hostile values could overflow.
    const bool sane = r.row >= 0 && r.token >= 0 && r.count >= 0 && r.stride >= 1;
    if (!sane || r.count > rows || r.row > rows - r.count)
      throw Error(text(whose, ": run ", show(r), " does not lie inside ", rows, " rows"),
                  "give row, token and count of 0 or more, stride of 1 or more, row + count within the buffer");
    if (r.token > kMaxTokens || (r.count > 1 && r.stride > (kMaxTokens - r.token) / (r.count - 1)))
      throw Error(text(whose, ": run ", show(r), " reaches past token ", kMaxTokens), "keep tokens inside the stream");
    if (r.count > 0) taken.push_back({r.row, r.row + r.count});
  }
  taken = sorted(std::move(taken));
  for (std::size_t i = 1; i < taken.size(); ++i) {
    if (taken[i].begin < taken[i - 1].end)
      throw Error(text(whose, ": row ", taken[i].begin, " is held by two runs"), "give each row to one run");
  }
}

}  // namespace detail

RunList::RunList(std::shared_ptr<const detail::RunSource> source, Index rows, Index stride, bool sequence_order)
    : source_(std::move(source)), rows_(rows), stride_(stride), sequence_order_(sequence_order) {}

RunList RunList::from_runs(std::vector<Run> runs, Index rows) {
  if (rows < 0 || rows > kMaxTokens)
    throw Error(text("a buffer of ", rows, " rows"), text("give a number of rows from 0 to ", kMaxTokens));
  detail::check_rows(runs, rows, "run list");
  const Index stride = detail::common_stride(runs);
  detail::RunTable table(std::move(runs), stride);
  for (std::size_t i = 1; i < table.runs.size(); ++i) {
    const Run &a = table.runs[i - 1], &b = table.runs[i];
    if (a.token % stride == b.token % stride && b.token <= a.token + (a.count - 1) * stride)
      throw Error(text("run list: token ", b.token, " is held twice"), "give each token to one run");
  }
  return RunList(std::make_shared<detail::RunSource>(detail::RunSource{std::move(table)}), rows, stride, false);
}

RunList RunList::sequence_order(Index tokens) {
  if (tokens < 0 || tokens > kMaxTokens)
    throw Error(text("a stream of ", tokens, " tokens"), text("give a number of tokens from 0 to ", kMaxTokens));
  const RegularRuns whole{RegularRuns::pieces, 1, 0, tokens, tokens, tokens, nullptr, {0, 1, 1}};
  return RunList(std::make_shared<detail::RunSource>(detail::RunSource{whole}), tokens, 1, true);
}

std::vector<Run> RunList::runs() const {
  if (const auto* table = std::get_if<detail::RunTable>(&source_->runs)) return table->runs;
  const RegularRuns& regular = std::get<RegularRuns>(source_->runs);
  std::vector<Run> runs;
  const auto add = [&](const Run& r) {
    if (r.count > 0) runs.push_back(r);
  };
  if (regular.cut != RegularRuns::folded_per_sequence) {
    regular.for_each(0, regular.begin, regular.end, Residues{}, add);
  } else {
    for (Index i = 0; i < source_->sequences; ++i)
      regular.for_each(i, regular.offsets[i], regular.offsets[i + 1], Residues{}, add);
  }
  return runs;
}

}  // namespace weft
