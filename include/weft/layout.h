// Layouts: which rank holds which tokens of a stream, as runs of rows.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/mask.h"
#include "weft/packing.h"

namespace weft {

// A run: rows row .. row + count - 1 of a buffer hold tokens token, token + stride, ...
struct Run {
  Index row = 0, token = 0, count = 0, stride = 1;

  friend bool operator==(const Run&, const Run&) = default;
};

// How a layout deals out tokens; docs/concepts.md draws each.
enum class LayoutKind { contiguous, dual_chunk, zigzag, striped, balanced, placed, explicit_runs };
// The name of a kind, such as "zigzag".
WEFT_API std::string_view name(LayoutKind kind);
// The kind of that name; the Error for any other lists the names.
WEFT_API LayoutKind layout_kind(std::string_view name);

// Stands for the token of a row that holds none.
inline constexpr Index kNoToken = -1;

// Rows of any tensor, for shard and unshard: row -> (row / inner)·outer_stride + (row % inner)·row_stride, in bytes.
struct RowTensor {
  void* data = nullptr;
  Index rows = 0;
  Index row_bytes = 0;
  Index row_stride = 0;  // 0: row_bytes
  Index inner = 0;       // 0: all rows (no outer dimension)
  Index outer_stride = 0;
};

struct PlacedOptions;
struct Placement;

namespace detail {
struct LayoutData;
struct RunSource;
}  // namespace detail

// Which tokens the rows of one buffer hold: those of one rank, of several ranks concatenated, or the whole stream.
class WEFT_API RunList {
 public:
  // Any runs of one stride (runs of one row fit any). Throws Error if they overlap or leave the buffer.
  static RunList from_runs(std::vector<Run> runs, Index rows);
  // Row = token. Planning against it never moves k_begin, so that a row's bits are the same for any number of ranks.
  static RunList sequence_order(Index tokens);

  Index rows() const { return rows_; }
  Index stride() const { return stride_; }
  bool in_sequence_order() const { return sequence_order_; }
  std::vector<Run> runs() const;  // sorted by (token mod stride, token)

  struct Members {
    Index first = 0, count = 0, step = 1;  // ranks first, first + step, ...
  };

  const detail::RunSource& source() const { return *source_; }  // for the planner

 private:
  friend class Layout;
  RunList(std::shared_ptr<const detail::RunSource> source, Index rows, Index stride, bool sequence_order);

  std::shared_ptr<const detail::RunSource> source_;
  Index rows_ = 0, stride_ = 1;
  bool sequence_order_ = false;
};

// How a stream is dealt out to ranks. Cheap to copy, safe to share between threads.
class WEFT_API Layout {
 public:
  // Equal pieces of the stream, one per rank.
  static Layout contiguous(const Stream& stream, Index ranks);
  // Each sequence is cut into 2·ranks pieces, and rank r holds pieces r and 2·ranks-1-r. Padded lengths must be
  // multiples of 2·ranks.
  static Layout dual_chunk(const Stream& stream, Index ranks);
  // The same cut of the whole stream: documents have any length, and only the end of the pack is padded.
  static Layout zigzag(const Stream& stream, Index ranks);
  // Token t lies on rank t mod ranks (counted from the first offset).
  static Layout striped(const Stream& stream, Index ranks);
  // Blocks of the problem's query tokens, dealt out so that all ranks have the same number of rows and about the same
  // number of visible pairs.
  static Layout balanced(const Problem& problem, Index ranks);
  // Each sequence on as few ranks as balance and memory allow; weft/placed.h has its options, and its reasons.
  static Layout placed(const Problem& problem, Index ranks);
  static Layout placed(const Problem& problem, Index ranks, const PlacedOptions& options);
  // The caller's runs, one list per rank; every real token must be held exactly once.
  static Layout explicit_runs(const Stream& stream, std::vector<std::vector<Run>> runs);

  LayoutKind kind() const;
  Index ranks() const;
  Index rows() const;  // of each rank's buffer: the same for all
  const Stream& stream() const;
  // A hash that is the same for layouts of one kind that give every rank the same tokens in the same rows. The first
  // call computes it.
  std::uint64_t fingerprint() const;

  RunList runs(Index rank) const;
  RunList rank_order() const;                          // the buffers of all ranks, concatenated
  RunList rank_order(RunList::Members members) const;  // the buffers of some ranks, concatenated
  RunList sequence_order() const { return RunList::sequence_order(stream().tokens()); }

  std::vector<Index> tokens(Index rank) const;     // [rows], kNoToken where the row holds none
  std::vector<Index> positions(Index rank) const;  // [rows], position in its sequence; 0 where the row is padding
  // Copies the rows of `whole` (all tokens) that `rank` holds into `local` [rows()]; rows without a token become zero.
  void shard(Index rank, const RowTensor& whole, const RowTensor& local) const;
  // Copies them back; tokens that `rank` does not hold are left as they are in `whole`.
  void unshard(Index rank, const RowTensor& local, const RowTensor& whole) const;

 private:
  friend WEFT_API Placement place(const Problem& problem, Index ranks, const PlacedOptions& options);
  explicit Layout(std::shared_ptr<const detail::LayoutData> data) : data_(std::move(data)) {}

  std::shared_ptr<const detail::LayoutData> data_;
};

// One layout for the queries and one for the keys; the same one for self-attention.
struct Layouts {
  Layout q, k;
};
// The layouts of one kind. `balanced` deals out queries; keys of another stream are then contiguous. `placed` puts them
// where their queries are. Throws Error for explicit_runs, which are given by their runs.
WEFT_API Layouts make_layouts(LayoutKind kind, const Problem& problem, Index ranks);

}  // namespace weft
