// The mask of a unit: 32 stacked rows, two panels, against a tile of keys.
#pragma once

#include "kernel/cpu/panel.h"
#include "kernel/cpu/x86/tile_micro.h"

namespace weft::cpu {
namespace {

// The mask of a unit's two panels, and the keys that it sees in whole units.
struct UnitMask {
  Visibility panels[2];
  Range keys;

  // False if nothing is seen.
  bool look(const Slice& s, const Index* tokens, Index base, Range loaded) {
    Index begin = loaded.end, end = loaded.begin;
    for (Index h = 0; h < 2; ++h) {
      panels[h] = visibility_of(s, tokens + h * kPanel, kPanel, base, loaded);
      if (panels[h].begin >= panels[h].end) continue;
      begin = min_of(begin, panels[h].begin);
      end = max_of(end, panels[h].end);
    }
    keys = {begin / kUnit * kUnit, round_up(end, kUnit)};
    return begin < end;
  }
  // Whether each row sees all keys of a unit of them.
  bool all(Index key) const {
    return key >= max_of(panels[0].all_begin, panels[1].all_begin) &&
           key + kUnit <= min_of(panels[0].all_end, panels[1].all_end);
  }
  // scores[key][32], beginning with that of key 0: what a row does not see becomes -inf.
  void apply(Range to, float* scores) const {
    const __m512 none = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (Index h = 0; h < 2; ++h) {
      const Visibility& visible = panels[h];
      const bool empty = visible.begin >= visible.end;
      for (Index j = to.begin; j < to.end; ++j) {
        float* at = scores + j * kUnit + h * kPanel;
        if (empty || j < visible.begin || j >= visible.end)
          _mm512_storeu_ps(at, none);
        else if (j < visible.all_begin || j >= visible.all_end)
          _mm512_storeu_ps(at, Avx512::inside_or(_mm512_loadu_ps(at), _mm512_set1_ps(static_cast<float>(j)),
                                                 _mm512_loadu_ps(visible.first), _mm512_loadu_ps(visible.last), none));
      }
    }
  }
};

}  // namespace
}  // namespace weft::cpu
