// How a tile of keys passes by the units of a stack, so that tiles and vectors work at the same time.
#pragma once

#include "kernel/cpu/tile.h"
#include "kernel/cpu/x86/tile_mask.h"
#include "kernel/cpu/x86/tile_micro.h"

namespace weft::cpu {
namespace {

inline constexpr Index kTileKeys = 256;  // part of a row's arithmetic, so the same for all widths
inline constexpr Index kBlock = kUnit * kUnit;

// One or two units that go through a tile of keys together: what is loaded of K and V serves both.
struct UnitGroup {
  Index count, units[2];
  UnitMask masks[2];
  Bits* pairs[2];  // [keys / 32][2] tiles: the right operand of their last product, P or dS

  Range keys() const {
    const Range &a = masks[0].keys, &b = masks[count - 1].keys;
    return {min_of(a.begin, b.begin), max_of(a.end, b.end)};
  }
  bool sees(Index member, Index key) const { return masks[member].keys.begin <= key && key < masks[member].keys.end; }
};
// 32 keys of a group.
struct Turn {
  const UnitGroup* group = nullptr;
  Index key = 0, buffer = 0;

  // What belongs to a member in room for four blocks of 32 keys and 32 rows.
  float* block(float* room, Index member) const { return room + (buffer * 2 + member) * kBlock; }
};

// Sums of all units that grow by the last product: [unit][column][32 slots of rows] += left^T·pairs.
struct UnitSums {
  const Bits* left;  // [column / 16][key / 32] tiles
  float* to;
  Index wide;
  Bits* pairs;  // room for two groups: 4·kTileKeys·32
};

// Kernel has score(turn, between): the products of 32 keys; score_steps(): how many they take for a member; and a class
// Vectors(kernel, turn), what vectors do with the scores, in pieces (Pacer).
template <class T, class Kernel>
class TilePipeline {
 protected:
  // The keys of a tile that begins at key row `base` pass by `units`. Prefetches the rows `next` on the way.
  template <class Args>
  void pass(const Args& args, const Slice& s, const Index* tokens, Range units, Index base, Range keys, Range next,
            Index kv_head) {
    const Index batch = ceil_div(2 * kTileKeys, units.size());
    Turn current;
    Index turns = 0, groups = 0;
    for (Index unit = units.begin; unit < units.end; next.begin += batch) {
      prefetch_keys(args, {next.begin, min_of(next.begin + batch, next.end)}, kv_head);
      UnitGroup& group = groups_[groups % 3];
      for (group.count = 0; unit < units.end && group.count < 2; ++unit) {
        if (!group.masks[group.count].look(s, tokens + unit * kUnit, base, keys)) continue;
        group.units[group.count] = unit;
        group.pairs[group.count] = last_.pairs + (groups % 2 * 2 + group.count) * kTileKeys * kUnit;
        ++group.count;
      }
      if (group.count == 0) continue;
      ++groups;
      const Range seen = group.keys();
      for (Index j = seen.begin; j < seen.end; j += kUnit, ++turns) {
        const Turn turn{&group, j, turns % 2};
        advance(current, turn);
        current = turn;
      }
    }
    if (current.group == nullptr) return;
    advance(current, {});
    NoWork none;
    add_products(products_left(), none);
    before_ = nullptr;
  }

  UnitSums last_ = {};

 private:
  Kernel& kernel() { return static_cast<Kernel&>(*this); }

  // Vectors work on the current turn while the tiles compute scores of the next and last products of the group before.
  void advance(const Turn& current, const Turn& next) {
    if (current.group == nullptr) {
      NoWork none;
      kernel().score(next, none);
      return;
    }
    // The group before is to be done with the last turn of this one.
    const Index turns = (current.group->keys().end - current.key) / kUnit, products = ceil_div(products_left(), turns);
    Index steps = products > 0 ? products * before_->keys().size() / kUnit : 0;
    if (next.group != nullptr) steps += next.group->count * kernel().score_steps();
    typename Kernel::Vectors vectors(kernel(), current);
    Pacer pacer(vectors, max_of(steps, 1));
    if (next.group != nullptr) kernel().score(next, pacer);
    add_products(products, pacer);
    pacer.finish();
    if (turns > 1) return;
    before_ = current.group;
    done_ = 0;
  }

  // A product: 32 columns of a unit.
  Index products_left() const { return before_ == nullptr ? 0 : last_.wide / kUnit * before_->count - done_; }
  template <class Between>
  void add_products(Index count, Between& between) {
    constexpr Index kColumn = kTileKeys / kUnit * kTile;
    for (; count > 0; --count, ++done_) {
      const Index m = done_ % before_->count, d = done_ / before_->count * kUnit;
      const Range keys = before_->masks[m].keys;
      const Index first = keys.begin / kUnit;
      tile_product<T, true>({last_.left + d / 16 * kColumn + first * kTile, kColumn, kTile},
                            {before_->pairs[m] + first * 2 * kTile, kTile, 2 * kTile}, keys.size() / kUnit,
                            last_.to + (before_->units[m] * last_.wide + d) * kUnit, kUnit, between);
    }
  }

  UnitGroup groups_[3];                // the next, the current one and that before
  const UnitGroup* before_ = nullptr;  // whose pairs wait for their product
  Index done_ = 0;                     // of its products
};

}  // namespace
}  // namespace weft::cpu
