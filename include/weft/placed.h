// Layout `placed`: every sequence on as few ranks as balance and memory allow, near each other.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "weft/layout.h"

namespace weft {

// What a placement weighs. Seconds are those of all heads, forward and backward together; only their ratios matter. The
// defaults are what placed_options() (weft/cost.h) gives for the preset h100-400g with 64 query heads and 8 K/V heads
// of width 128 in bf16, so that a placement by name is the same on every rank without a machine.
struct PlacedOptions {
  Index capacity = 0;              // rows of a rank at most; 0: a sixteenth more than an even share
  Index node = 8;                  // neighbours [n·node, (n + 1)·node) that fast links join
  Index head_groups = 4;           // groups of K/V heads that rows can come in, one under the work of another; 1: none
  double pair_seconds = 2.07e-10;  // a visible pair
  double row_seconds = 3.1e-8;     // a query row, beside its pairs: tiles that are partly empty, begin and end of tiles
  double merge_seconds = 1.5e-7;   // a query row of a rank that computes in several steps, whose states are merged
  double near_seconds = 4.55e-8;   // a K/V row that comes over links inside a node, and its gradients that return
  double far_seconds = 3.64e-7;    // and over links between nodes
};

// On how many ranks a sequence lies, and why.
struct PlacedSequence {
  enum class Why {
    whole,  // one rank has room for its rows and its work
    work,   // one rank would have more work with it than the others
    rows,   // it has more rows than a rank may hold
    room,   // no rank has room left for all of it, so it fills what is left
  };
  Index ranks = 0, nodes = 0;  // 0: it has no query rows
  Why why = Why::whole;
  double work = 0;  // over a rank's mean share of all work
};
// The name of a reason, such as "whole".
WEFT_API std::string_view name(PlacedSequence::Why why);

// Where everything lies, and why.
struct WEFT_API Placement {
  Layouts layouts;
  std::vector<PlacedSequence> sequences = {};  // in the order of the packing
  Index capacity = 0;                          // rows of a rank at most
  // Predicted seconds of attention by the weights: enough to compare placements with; weft/simulate.h times one.
  double seconds = 0;

  // How many sequences lie on how many ranks, and why, as text.
  std::string why() const;
};

// Places the sequences of a problem. Short ones lie whole on one rank; a long one lies on any number of ranks, inside a
// node if that does, each with two chunks as far from its two ends, so that under a causal mask work goes by rows.
// Ranks hold different numbers of rows, up to the capacity. Padding is held with its sequence. Keys of another stream
// lie on the ranks of their sequence's queries, in equal parts. Slices of the caller's own count as work of the
// sequences that their queries are in; keys that they take from other sequences are not weighed. Deterministic; near
// linear in the number of sequences. Error if the capacity does not hold all tokens.
WEFT_API Placement place(const Problem& problem, Index ranks, const PlacedOptions& options = {});

}  // namespace weft
