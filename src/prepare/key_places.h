// Which rows of a K/V buffer the keys of each token take, and for how long.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "weft/kv_buffer.h"

namespace weft {

// Error if queries see keys of a later micro-sequence.
void require_earlier_keys(const MicroSequences& micros, const Problem& problem);

// Where keys lie while a sequence goes through its micro-sequences: no two tokens whose keys are there at the same time
// have the same row, so nothing is moved inside the buffer. The same for both passes, which go through the
// micro-sequences in opposite order.
class KeyPlaces {
 public:
  // In a buffer of this many rows. With `drop`, rows go round the buffer if that is enough for these keys; else a row
  // is used again as soon as no later query sees its token, wherever it lies, so that of a tree one path is held.
  // Without a value: there are too few.
  static std::optional<KeyPlaces> in_rows(const MicroSequences& micros, const Problem& problem, Index rows, bool drop);
  // The fewest rows that will do.
  static Index least_rows(const MicroSequences& micros, const Problem& problem, KeyRows how);

  // Rows of these tokens, as few ranges as there are.
  std::vector<Range> rows_of(Range tokens) const;
  // The slice, whose keys are tokens, in rows of the buffer: one for each range of rows.
  void place(const Slice& slice, std::vector<Slice>& out) const;
  // Tokens whose keys no query after those of this micro-sequence sees, but its queries or earlier ones do, and its own
  // unless later ones see them. Rising ranges.
  std::span<const Range> last_seen(Index micro) const;
  // Whether the keys of this micro-sequence find free rows when so many micro-sequences have been attended.
  bool has_room(Index micro, Index attended) const;

 private:
  // Tokens begin, begin + 1, .. lie in rows row, row + 1, ..
  struct Run {
    Index begin, end, row;
  };
  using Ranges = std::vector<Range>;

  static KeyPlaces around(const MicroSequences& micros, const Problem& problem, Index rows);
  static KeyPlaces reused(const MicroSequences& micros, const Problem& problem, bool ahead);
  void round_and_round(Index tokens);
  std::vector<Run>::const_iterator run_of(Index token) const;

  std::vector<Run> runs_;     // of all tokens that are ever held, rising
  std::vector<Ranges> last_;  // [micros] last_seen
  std::vector<Index> ends_;   // [micros] past the last token of each
  Index rows_ = 0;            // of the buffer, or with `reused` those that it takes
  bool around_ = true;        // token t lies in row t mod rows_
  bool ahead_ = false;        // of reused rows: keys come while the micro-sequence before theirs is attended
};

}  // namespace weft
