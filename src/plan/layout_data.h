// What a Layout and a RunList hold.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "plan/runs.h"
#include "weft/layout.h"

namespace weft::detail {

// A number that the first caller computes; 0 until then. Threads that compute it at once store the same value.
struct CachedNumber {
  std::atomic<std::uint64_t> value = 0;

  CachedNumber() = default;
  CachedNumber(const CachedNumber& other) : value(other.value.load()) {}
};

struct LayoutData {
  LayoutKind kind;
  Stream stream;
  Index ranks = 0;
  Index rows = 0;   // of each rank
  Index piece = 0;  // contiguous, zigzag
  Index stride = 1;
  std::vector<std::vector<Run>> runs = {};  // by rank: balanced, placed and explicit only, the others are arithmetic
  mutable CachedNumber fingerprint = {};

  bool regular() const { return kind < LayoutKind::balanced; }
};

inline std::shared_ptr<const LayoutData> shared(LayoutData data) {
  return std::make_shared<const LayoutData>(std::move(data));
}

// How a regular layout cuts its stream; Error for the others, whose runs are a table.
RegularRuns::Cut cut_of(LayoutKind kind);

// Runs sorted for search; see TableRuns.
struct RunTable {
  std::vector<Run> runs;
  std::vector<Index> residues, class_begin;
  Index stride = 1;

  // Runs of more than one row have this stride already.
  RunTable(std::vector<Run> unsorted, Index stride);
  TableRuns view() const;
};

struct RunSource {
  std::variant<RegularRuns, RunTable> runs;
  std::shared_ptr<const LayoutData> owner = {};  // keeps the offsets alive that RegularRuns points to
  Index sequences = 0;                           // of the owner's stream
};

// Far more ranks than any cluster has is an Error; so is none.
void check_ranks(Index ranks);
// Error if a slice of the caller's own has queries in no sequence.
void check_queries(std::span<const Slice> slices, const Stream& stream);

// The common stride of runs; Error if two differ. Runs of one row fit any.
Index common_stride(std::span<const Run> runs);
// Error if a run leaves [0, rows), or two share a row.
void check_rows(std::span<const Run> runs, Index rows, std::string_view whose);

}  // namespace weft::detail
