#include "weft/kv_cache.h"

#include <utility>

#include "comm/blocks.h"
#include "device/device.h"
#include "index.h"
#include "run/kernel_args.h"
#include "text.h"

namespace weft {

KvCache::KvCache(const TensorView& k, const TensorView& v, std::span<const Index> offsets, std::span<const Index> used)
    : k_(k), v_(v) {
  check_tensor(k, {.name = "k", .output = true});
  const DType dtype[] = {k.dtype};
  check_tensor(v, {.name = "v", .rows = k.rows, .heads = k.heads, .dtypes = dtype, .output = true});
  const std::vector<Index> nothing(offsets.empty() ? 0 : offsets.size() - 1, 0);
  const Stream stream = Stream::from_used(offsets, used.empty() ? std::span<const Index>(nothing) : used, k.rows);
  offsets_.assign(stream.offsets().begin(), stream.offsets().end());
  used_.assign(stream.used_lengths().begin(), stream.used_lengths().end());
}

Index KvCache::used(Index sequence) const {
  detail::check_part("sequences", sequence, 1, sequences());
  return used_[at(sequence)];
}

Index KvCache::room(Index sequence) const {
  const Index filled = used(sequence);  // Error if there is no such sequence
  return offsets_[at(sequence) + 1] - offsets_[at(sequence)] - filled;
}

void KvCache::keep(Index sequence, Index used) {
  if (used < 0 || used > this->used(sequence))
    throw Error(
        text("sequence ", sequence, " holds ", this->used(sequence), " rows, of which ", used, " cannot be kept"),
        text("keep 0 to ", this->used(sequence)));
  used_[at(sequence)] = used;
}

void KvCache::check_counts(std::span<const Index> counts) const {
  if (counts.size() != used_.size())
    throw Error(text(counts.size(), " counts for ", used_.size(), " sequences"), "give one a sequence, 0 for none");
  for (std::size_t i = 0; i < counts.size(); ++i)
    if (counts[i] < 0) throw Error(text("sequence ", i, ": count ", counts[i]), "give 0 or more");
}

void KvCache::append(std::span<const Index> counts, const ConstTensorView& k, const ConstTensorView& v,
                     const Place& place) {
  check_counts(counts);
  Index rows = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const Index left = room(static_cast<Index>(i));
    if (counts[i] > left)
      throw Error(text("sequence ", i, ": ", counts[i], " new rows, and room for ", left),
                  "set more rows aside for it, or keep() fewer of the old ones");
    rows += counts[i];
  }
  const DType dtype[] = {k_.dtype};
  check_tensor(k, {.name = "k", .rows = rows, .heads = k_.heads, .dim = k_.dim, .dtypes = dtype});
  check_tensor(v, {.name = "v", .rows = rows, .heads = v_.heads, .dim = v_.dim, .dtypes = dtype});
  std::vector<Block> from, to;
  Index row = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const Range here{row, row + counts[i]}, there{offsets_[i] + used_[i], offsets_[i] + used_[i] + counts[i]};
    append_blocks(k, here, from);
    append_blocks(v, here, from);
    append_blocks(k_, there, to);
    append_blocks(v_, there, to);
    row += counts[i];
  }
  if (place.kind == DeviceKind::cpu)
    move_blocks(from, to, Message::Combine::replace);
  else
    device::copy(place, from, to);
  for (std::size_t i = 0; i < counts.size(); ++i) used_[i] += counts[i];
}

std::vector<Slice> KvCache::slices(std::span<const Index> counts, Mask mask) const {
  check_counts(counts);
  for (std::size_t i = 0; i < counts.size(); ++i)
    if (counts[i] > used_[i])
      throw Error(text("sequence ", i, ": ", counts[i], " queries, and it holds ", used_[i], " rows"),
                  "append the keys of the queries first");
  if (!mask.slices) mask.align = Align::bottom_right;
  const Packing packing(Stream::from_lengths(counts), Stream::from_used(offsets_, used_, k_.rows));
  return Problem(packing, std::move(mask)).global_slices();
}

void KvCache::attend(std::span<const Index> counts, const KvCacheArgs& args, const Mask& mask,
                     std::string_view kernel) const {
  const std::vector<Slice> all = slices(counts, mask);
  weft::attend(run::forward_call(args, {k_, v_}, all), kernel);
}

}  // namespace weft
