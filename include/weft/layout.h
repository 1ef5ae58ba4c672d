// Who holds which tokens: layouts deal a stream out to ranks as runs of rows.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/config.h"
#include "weft/mask.h"
#include "weft/packing.h"

namespace weft {

// Rows row .. row + count - 1 of a buffer hold tokens token, token + stride, ...
struct Run {
  Index row = 0, token = 0, count = 0, stride = 1;

  friend bool operator==(const Run&, const Run&) = default;
};

enum class LayoutKind { contiguous, dual_chunk, zigzag, striped, balanced, explicit_runs };
WEFT_API std::string_view name(LayoutKind kind);
WEFT_API LayoutKind layout_kind(std::string_view name);  // Error lists the names

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

namespace detail {
struct LayoutParts;
struct RunSource;
}  // namespace detail

// The rows of one buffer as tokens: one rank's rows, several ranks' rows one after another, or the whole stream.
class WEFT_API RunList {
 public:
  // Any runs; all of one stride (runs of one row fit any). Error if they overlap or leave the buffer.
  static RunList from_runs(std::vector<Run> runs, Index rows);
  // Row = token. Planning against it never moves k_begin, so that a row's arithmetic is the same for any ranks.
  static RunList sequence_order(Index tokens);

  Index rows() const { return rows_; }
  Index stride() const { return stride_; }
  bool in_sequence_order() const { return sequence_order_; }
  std::vector<Run> runs() const;  // written out, by (token mod stride, token)

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

class WEFT_API Layout {
 public:
  // Equal pieces of the stream, one a rank.
  static Layout contiguous(const Stream& stream, Index ranks);
  // Each sequence cut into 2·ranks pieces, rank r holds pieces r and 2·ranks-1-r; padded lengths must be multiples.
  static Layout dual_chunk(const Stream& stream, Index ranks);
  // The same cut of the whole stream: documents of any length, only the end of the pack is padded.
  static Layout zigzag(const Stream& stream, Index ranks);
  // Token t lies on rank t mod ranks (counted from the first offset).
  static Layout striped(const Stream& stream, Index ranks);
  // Blocks of query tokens dealt out so that visible pairs are even, rows equal. Deals out the problem's q stream.
  static Layout balanced(const Problem& problem, Index ranks);
  // The caller's runs, one list a rank; every real token must be held exactly once.
  static Layout explicit_runs(const Stream& stream, std::vector<std::vector<Run>> runs);

  LayoutKind kind() const;
  Index ranks() const;
  Index rows() const;  // of each rank's buffer: the same for all
  const Stream& stream() const;
  // The same for layouts of one kind that give every rank the same tokens in the same rows. Computed by the first call.
  std::uint64_t fingerprint() const;

  RunList runs(Index rank) const;
  RunList rank_order() const;                          // all ranks' buffers one after another
  RunList rank_order(RunList::Members members) const;  // some ranks' buffers one after another
  RunList sequence_order() const { return RunList::sequence_order(stream().tokens()); }

  std::vector<Index> tokens(Index rank) const;     // [rows], kNoToken where the row holds none
  std::vector<Index> positions(Index rank) const;  // [rows], position in its sequence; 0 where the row is padding
  // Rows of `whole` (all tokens) that `rank` holds, into `local` [rows()]; rows that hold no token become zero bytes.
  void shard(Index rank, const RowTensor& whole, const RowTensor& local) const;
  // The way back; tokens that no rank holds are left as they are in `whole`.
  void unshard(Index rank, const RowTensor& local, const RowTensor& whole) const;

 private:
  explicit Layout(std::shared_ptr<const detail::LayoutParts> parts) : parts_(std::move(parts)) {}

  std::shared_ptr<const detail::LayoutParts> parts_;
};

// One layout for the queries and one for the keys; the same one for self-attention.
struct Layouts {
  Layout q, k;
};
// By kind. `balanced` deals out queries; keys of another stream are then contiguous. explicit_runs: Error.
WEFT_API Layouts make_layouts(LayoutKind kind, const Problem& problem, Index ranks);

}  // namespace weft
