// Where tiles begin that end where no slice continues: the arithmetic of the lists that the device makes.
//
// A run is a maximal range of rows that slices connect, or of rows in no slice. A row joins the one before it if a
// slice contains both. Bits of rows lie in words of 64.
#pragma once

#include <bit>

#include "weft/slice.h"

namespace weft::cuda {

using RowBits = unsigned long long;
inline constexpr int kWordRows = 64;

WEFT_HD constexpr int words_of(Index rows) { return static_cast<int>(ceil_div(rows, kWordRows)); }

// Bits begin .. end - 1 of a word.
WEFT_HD constexpr RowBits bits_between(int begin, int end) {
  if (begin >= end) return 0;
  return (end >= kWordRows ? ~RowBits{0} : (RowBits{1} << end) - 1) & ~((RowBits{1} << begin) - 1);
}
WEFT_HD inline int count_bits(RowBits bits) {
#ifdef __CUDA_ARCH__
  return __popcll(bits);
#else
  return std::popcount(bits);
#endif
}
// Of bits that are not all 0.
WEFT_HD inline int lowest_bit(RowBits bits) {
#ifdef __CUDA_ARCH__
  return __ffsll(static_cast<long long>(bits)) - 1;
#else
  return std::countr_zero(bits);
#endif
}
WEFT_HD inline int highest_bit(RowBits bits) {
#ifdef __CUDA_ARCH__
  return 63 - __clzll(static_cast<long long>(bits));
#else
  return 63 - std::countl_zero(bits);
#endif
}

// Which end of a run its full tiles are counted from. From the end the tile that is not full comes first, which sees
// the least with causal masks; and short runs that are neighbours share a tile.
enum class FullTiles { from_begin, from_end };

struct Run32 {
  int begin, end;
};

// Rows first .. first + 63 where a tile of the run begins, other than the run's own begin.
WEFT_HD inline RowBits tiles_within(const Run32& run, int size, FullTiles full, int first) {
  const int low = run.begin + 1 > first ? run.begin + 1 : first;
  const int high = run.end - first < kWordRows ? run.end : first + kWordRows;
  if (low >= high) return 0;
  RowBits bits = 0;
  for (int row = full == FullTiles::from_begin ? run.begin + (low - run.begin + size - 1) / size * size
                                               : run.end - (run.end - low) / size * size;
       row < high; row += size)
    bits |= RowBits{1} << (row - first);
  return bits;
}

// Does a tile begin where the run does? Counted from the end, runs that begin within the same `size` rows, a cell,
// share a tile as far as it holds them: only the last of them may be too long. `previous`: where the run before begins,
// or -1; `runs`: bits of all runs' begins.
WEFT_HD inline bool begins_tile(const Run32& run, int previous, const RowBits* runs, int size, FullTiles full) {
  const int cell = run.begin / size * size;
  if (full == FullTiles::from_begin || previous < cell) return true;
  int word = cell / kWordRows;  // the first run of the cell
  RowBits found = runs[word] & bits_between(cell % kWordRows, kWordRows);
  while (found == 0) found = runs[++word];
  return run.end - (word * kWordRows + lowest_bit(found)) > size;
}

// The rows of a word where tiles begin. `before`: the last begin of a run before the word, or -1; `next`: the first one
// after it, or the number of rows.
WEFT_HD inline RowBits tiles_of_word(const RowBits* runs, int word, int before, int next, int size, FullTiles full) {
  const int first = word * kWordRows;
  RowBits tiles = 0, left = runs[word];
  for (int previous = -1, begin = before;; left &= left - 1) {
    const int end = left != 0 ? first + lowest_bit(left) : next;
    const Run32 run{begin, end};
    if (begin >= 0) tiles |= tiles_within(run, size, full, first);
    if (begin >= first && begins_tile(run, previous, runs, size, full)) tiles |= RowBits{1} << (begin - first);
    if (left == 0) return tiles;
    previous = begin;
    begin = end;
  }
}

// Finds the run and the tile of a row.
struct TileIndex {
  const RowBits *runs, *tiles;           // [words] rows where runs and tiles begin
  const int *run_before, *tiles_before;  // [words] of each word's first row: the last begin before it, or -1; tiles

  WEFT_HD int run_of(int row) const {
    const int word = row / kWordRows;
    const RowBits own = runs[word] & bits_between(0, row % kWordRows + 1);
    return own != 0 ? word * kWordRows + highest_bit(own) : run_before[word];
  }
  WEFT_HD int tile_of(int row) const {
    const int word = row / kWordRows;
    return tiles_before[word] + count_bits(tiles[word] & bits_between(0, row % kWordRows + 1)) - 1;
  }
};

// The most tiles that rows have of which slices connect at most `held` ranges. A run of L rows has at most (L + size -
// 1) / size. Counted from the end, no more than two runs that begin in a cell begin a tile; a run with k more tiles
// leaves k - 1 cells without begins, and only one such run begins in a cell: 3 tiles a cell.
WEFT_HD constexpr Index most_tiles(Index rows, int size, Index held, FullTiles full) {
  const Index runs = 2 * held + 1;  // with those between
  const Index most = min_of(rows, (rows + runs * (size - 1)) / size);
  return full == FullTiles::from_begin ? most : min_of(most, 3 * ceil_div(rows, size));
}

}  // namespace weft::cuda
