#include "weft/packing.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "index.h"
#include "text.h"

namespace weft {
namespace {

// Prefix sums as callers give them: at least one entry, none negative, never falling.
void check_offsets(std::string_view what, std::span<const Index> offsets) {
  if (offsets.empty()) throw Error(text(what, " is empty"), "give n + 1 entries for n sequences, at least one entry");
  if (offsets[0] < 0) throw Error(text(what, "[0] = ", offsets[0], " is negative"), "start at row 0 or later");
  for (std::size_t i = 1; i < offsets.size(); ++i) {
    if (offsets[i] < offsets[i - 1])
      throw Error(text(what, "[", i, "] = ", offsets[i], " is less than ", what, "[", i - 1, "] = ", offsets[i - 1]),
                  "give prefix sums, which never fall");
  }
}

std::vector<Index> widen(std::span<const std::int32_t> narrow) { return {narrow.begin(), narrow.end()}; }

}  // namespace

Stream::Stream(std::vector<Index> offsets, std::vector<Index> used, std::optional<Index> tokens)
    : offsets_(std::move(offsets)), used_(std::move(used)), tokens_(tokens.value_or(offsets_.back())) {
  for (Index i = 0; i < sequences(); ++i) {
    if (this->used(i) < 0)
      throw Error(text("sequence ", i, ": length ", this->used(i), " is negative"), "use 0 for an empty sequence");
    if (this->used(i) > padded(i))
      throw Error(text("sequence ", i, ": ", this->used(i), " used tokens do not fit the ", padded(i),
                       " rows between padded offsets ", offset(i), " and ", offset(i + 1)),
                  text("pad it to at least ", this->used(i), " rows (Stream::padded_to)"));
  }
  if (tokens_ < offsets_.back())
    throw Error(text("the buffer has ", tokens_, " rows but the last sequence ends at row ", offsets_.back()),
                text("give at least ", offsets_.back(), " rows, or sequences that end before"));
  if (tokens_ > kMaxTokens)
    throw Error(
        text("a stream of ", tokens_, " tokens is past the limit of ", kMaxTokens, " (rows are 32-bit on devices)"),
        "split the pack");
}

Stream Stream::from_lengths(std::span<const Index> lengths) {
  std::vector<Index> offsets{0};
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 0)
      throw Error(text("sequence ", i, ": length ", lengths[i], " is negative"), "use 0 for an empty sequence");
    if (lengths[i] > kMaxTokens - offsets.back())
      throw Error(text("sequence ", i, ": length ", lengths[i], " takes the stream past ", kMaxTokens,
                       " tokens (rows are 32-bit on devices)"),
                  "split the pack");
    offsets.push_back(offsets.back() + lengths[i]);
  }
  return Stream(std::move(offsets), {lengths.begin(), lengths.end()}, {});
}

Stream Stream::from_cu_seqlens(const CuSeqlens& from) {
  const std::span<const Index> cu = from.cu_seqlens, padded = from.cu_seqlens_padded;
  check_offsets("cu_seqlens", cu);
  if (!padded.empty()) {
    check_offsets("cu_seqlens_padded", padded);
    if (padded.size() != cu.size())
      throw Error(text("cu_seqlens has ", cu.size(), " entries and cu_seqlens_padded has ", padded.size()),
                  "give both n + 1 entries for the same n sequences");
  }
  std::vector<Index> used(cu.size() - 1);
  for (std::size_t i = 0; i < used.size(); ++i) used[i] = cu[i + 1] - cu[i];
  const std::span<const Index> offsets = padded.empty() ? cu : padded;
  return Stream({offsets.begin(), offsets.end()}, std::move(used), from.tokens);
}

Stream Stream::from_cu_seqlens(std::span<const std::int32_t> cu_seqlens,
                               std::span<const std::int32_t> cu_seqlens_padded, std::optional<Index> tokens) {
  const std::vector<Index> cu = widen(cu_seqlens), padded = widen(cu_seqlens_padded);
  return from_cu_seqlens({.cu_seqlens = cu, .cu_seqlens_padded = padded, .tokens = tokens});
}

Stream Stream::from_used(std::span<const Index> offsets, std::span<const Index> used, std::optional<Index> tokens) {
  check_offsets("padded offsets", offsets);
  if (used.size() + 1 != offsets.size())
    throw Error(text(offsets.size(), " padded offsets do not go with ", used.size(), " used lengths"),
                text("give n + 1 offsets for n sequences: ", used.size() + 1, " here"));
  return Stream({offsets.begin(), offsets.end()}, {used.begin(), used.end()}, tokens);
}

Stream Stream::from_batch(Index batch, Index length, std::span<const Index> used) {
  if (batch < 0 || length < 0)
    throw Error(text("a batch of ", batch, " sequences of ", length, " rows"), "give sizes of 0 or more");
  if (batch > 0 && length > kMaxTokens / batch)
    throw Error(text("a batch of ", batch, " sequences of ", length, " rows is past the limit of ", kMaxTokens,
                     " tokens (rows are 32-bit on devices)"),
                "split the batch");
  if (!used.empty() && static_cast<Index>(used.size()) != batch)
    throw Error(text(used.size(), " used lengths for a batch of ", batch), "give one length a sequence, or none");
  std::vector<Index> offsets(at(batch) + 1), lengths(at(batch), length);
  for (std::size_t i = 0; i < offsets.size(); ++i) offsets[i] = static_cast<Index>(i) * length;
  if (!used.empty()) lengths.assign(used.begin(), used.end());
  return Stream(std::move(offsets), std::move(lengths), {});
}

Stream Stream::padded_to(Index multiple) const {
  if (multiple < 1 || multiple > kMaxTokens)
    throw Error(text("cannot pad to a multiple of ", multiple), text("use a multiple from 1 to ", kMaxTokens));
  std::vector<Index> offsets{0};
  for (const Index n : used_) offsets.push_back(offsets.back() + ceil_div(n, multiple) * multiple);
  return Stream(std::move(offsets), used_, {});
}

Index Stream::used_tokens() const { return std::accumulate(used_.begin(), used_.end(), Index{0}); }

Packing::Packing(Stream both) : q_(both), k_(std::move(both)) {}

Packing::Packing(Stream q, Stream k) : q_(std::move(q)), k_(std::move(k)) {
  if (q_.sequences() != k_.sequences())
    throw Error(text("queries have ", q_.sequences(), " sequences and keys have ", k_.sequences()),
                "give both sides the same number; a sequence may have length 0 on one side");
}

Packing Packing::padded_to(Index multiple) const { return {q_.padded_to(multiple), k_.padded_to(multiple)}; }

}  // namespace weft
