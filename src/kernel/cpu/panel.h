// A panel: 16 stacked rows, or as many as S says (token-major, the heads of a group next to each other), against a tile
// of keys.
#pragma once

#include <limits>

#include "kernel/cpu/micro.h"
#include "kernel/cpu/rows.h"
#include "weft/slice.h"

namespace weft::cpu {

// No keys yet. Not -inf: differences of two of these must be 0, not NaN.
inline constexpr float kNoMax = std::numeric_limits<float>::lowest();

// The mask of a panel and a tile of keys: row r sees keys first[r] .. last[r], counted from the tile's start.
template <Index kRows>
struct PanelVisibility {
  Index begin = 0, end = 0;          // keys that some row sees; nothing outside is touched
  bool whole = true;                 // every row sees all of them
  Index all_begin = 0, all_end = 0;  // keys that every row sees
  float first[kRows], last[kRows];   // only if not whole
};
using Visibility = PanelVisibility<kPanel>;

// Keys of `s` in a tile that starts at key row `base`, for rows tokens[0..kRows) of which `count` are real. `keys` is
// the part of the tile that is loaded. Results of rows past `count` are not used.
template <Index kRows = kPanel>
WEFT_INLINE PanelVisibility<kRows> visibility_of(const Slice& s, const Index* tokens, Index count, Index base,
                                                 Range keys) {
  PanelVisibility<kRows> visible;
  const Index t_first = tokens[0], t_last = tokens[count - 1];  // tokens are sorted
  if (t_first >= s.q_begin && t_last < s.q_end && shift_bound(s.lo, t_last) <= base + keys.begin &&
      shift_bound(s.hi, t_first) >= base + keys.end - 1) {
    visible.begin = visible.all_begin = keys.begin;
    visible.end = visible.all_end = keys.end;
    return visible;
  }
  visible.whole = false;
  Index begin = keys.end, end = keys.begin, all_begin = keys.begin, all_end = keys.end;
  for (Index r = 0; r < kRows; ++r) {
    const Index t = tokens[r < count ? r : count - 1];
    Index first = max_of(keys.begin, shift_bound(s.lo, t) - base);
    Index last = min_of(keys.end - 1, shift_bound(s.hi, t) - base);
    if (t < s.q_begin || t >= s.q_end || first > last) {
      first = keys.end;
      last = keys.begin - 1;
    }
    begin = min_of(begin, first);
    end = max_of(end, last + 1);
    all_begin = max_of(all_begin, first);
    all_end = min_of(all_end, last + 1);
    visible.first[r] = static_cast<float>(first);
    visible.last[r] = static_cast<float>(last);
  }
  visible.begin = begin;
  visible.end = end;
  visible.all_begin = min_of(max_of(begin, all_begin), end);
  visible.all_end = min_of(max_of(visible.all_begin, all_end), end);
  return visible;
}

// The visible keys rounded to whole units.
template <class S>
WEFT_INLINE Range whole_units(const PanelVisibility<S::kPanel>& visible) {
  return {visible.begin / S::kPair * S::kPair, round_up(visible.end, S::kPair)};
}

// scores[j][kPanel], j in whole_units(visible): keys that a row does not see become -inf.
template <class S>
WEFT_INLINE void apply_mask(const PanelVisibility<S::kPanel>& visible, float* scores, Index stride) {
  using V = typename S::V;
  constexpr int kVectors = static_cast<int>(S::kPanel) / S::kLanes;
  const V none = S::all(-std::numeric_limits<float>::infinity());
  if constexpr (S::kPair > 1) {
    const Range keys = whole_units<S>(visible);
    const auto mask_row = [&](Index j) {
      for (int v = 0; v < kVectors; ++v) S::store(scores + j * stride + v * S::kLanes, none);
    };
    for (Index j = keys.begin; j < visible.begin; ++j) mask_row(j);
    for (Index j = visible.end; j < keys.end; ++j) mask_row(j);
  }
  if (visible.whole) return;
  const auto one = [&](Index j) __attribute__((always_inline)) {
    const V key = S::all(static_cast<float>(j));
    WEFT_UNROLL for (int v = 0; v < kVectors; ++v) {
      float* at = scores + j * stride + v * S::kLanes;
      S::store(at, S::inside_or(S::load(at), key, S::load(visible.first + v * S::kLanes),
                                S::load(visible.last + v * S::kLanes), none));
    }
  };
  for (Index j = visible.begin; j < visible.all_begin; ++j) one(j);
  for (Index j = visible.all_end; j < visible.end; ++j) one(j);
}

// A factor of scores costs least in the rows of the panel; pairs cannot take it there without rounding again, so their
// scores do.

// Rows [d][kPanel]: packed[i][r] = factor·rows[r][i], from kPanel rows of `width` (a multiple of 4) units.
template <class S>
WEFT_INLINE void pack_panel(const float* rows, Index width, [[maybe_unused]] float factor, float* packed) {
  for (Index r = 0; r < S::kPanel; r += 4) {
    for (Index i = 0; i < width; i += 4) {
      if constexpr (S::kPair == 1)
        S::transpose4(rows + r * width + i, width, packed + i * S::kPanel + r, S::kPanel, factor);
      else
        S::transpose4(rows + r * width + i, width, packed + i * S::kPanel + r, S::kPanel);
    }
  }
}

// scores[j][kPanel] = a[j][0..n)·packed[..][kPanel] for keys [begin, end); a has rows of zeros up to the next multiple
// of kKeys. `factor` is the one that pack_panel was given.
template <class S>
WEFT_INLINE void score(const float* a, Index n, const float* packed, [[maybe_unused]] float factor, Index begin,
                       Index end, float* scores, Index stride) {
  for (Index j = begin / S::kKeys * S::kKeys; j < end; j += S::kKeys) {
    float* to = scores + j * stride;
    product_by_rows<S, S::kKeys, static_cast<int>(S::kPanel) / S::kLanes, false>(a + j * n, n, n, packed, S::kPanel, to,
                                                                                 stride);
    if constexpr (S::kPair > 1) {
      if (factor == 1.0f) continue;
      const typename S::V by = S::all(factor);
      WEFT_UNROLL for (int x = 0; x < S::kKeys; ++x) for (float* at = to + x * stride; at < to + x * stride + S::kPanel;
                                                          at += S::kLanes) S::store(at, S::mul(S::load(at), by));
    }
  }
}

}  // namespace weft::cpu
