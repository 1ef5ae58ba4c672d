// Decoding: few queries on K and V of earlier tokens, which lie in rows that were set aside for each sequence.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "weft/attention.h"
#include "weft/mask.h"
#include "weft/packing.h"

namespace weft {

// Arguments of KvCache::attend; K and V are the cache's, and what queries see is the mask's.
struct KvCacheArgs {
  ConstTensorView q = {};  // [tq, hq, dqk], the queries of all sequences one after another
  Attention attention = {};
  TensorView out = {};        // [tq, hq, dv]
  TensorView lse = {};        // [tq, hq] f32 or f64; optional
  TensorView max_logit = {};  // [hq] f32 or f64; optional
  Index keys_per_split = 0;   // as in ForwardArgs
  Place place = {};           // of the cache too
};

// K and V of several sequences in the caller's tensors. Sequence i has the rows [offsets[i], offsets[i + 1]) of the
// caller's tensors, of which the first used(i) are filled. The others are never read, so they may hold anything.
class WEFT_API KvCache {
 public:
  // k [rows, hk, dqk] and v [rows, hk, dv] belong to the caller. `used` empty: nothing is filled yet.
  KvCache(const TensorView& k, const TensorView& v, std::span<const Index> offsets, std::span<const Index> used = {});

  Index sequences() const { return static_cast<Index>(used_.size()); }
  Index used(Index sequence) const;
  Index room(Index sequence) const;  // rows that are left
  // Drops all rows but the first `used`: for a sequence that ended, or tokens that were rejected.
  void keep(Index sequence, Index used);

  // Copies counts[i] new rows of sequence i, packed one after another in k and v, into the cache. Error, and nothing
  // written, if there is no room for some. `place`: of the cache and of k and v.
  void append(std::span<const Index> counts, const ConstTensorView& k, const ConstTensorView& v,
              const Place& place = {});

  // Slices of counts[i] queries of sequence i, packed one after another: they are the last positions of the sequence,
  // so the mask is aligned bottom_right.
  std::vector<Slice> slices(std::span<const Index> counts, Mask mask = {.causal = true}) const;
  // Attends those queries.
  void attend(std::span<const Index> counts, const KvCacheArgs& args, const Mask& mask = {.causal = true},
              std::string_view kernel = "") const;

 private:
  void check_counts(std::span<const Index> counts) const;

  TensorView k_, v_;
  std::vector<Index> offsets_, used_;
};

}  // namespace weft
