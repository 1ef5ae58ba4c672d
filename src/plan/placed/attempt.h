// One attempt at a placement: the greedy one for a given target of every rank's seconds.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "plan/placed/solver.h"

namespace weft::detail {

// What attempts differ in.
struct Trial {
  double target = 0;   // seconds that no rank should pass
  double exposed = 0;  // share of the exchanges that counts as a rank's work
  double filler = 0;   // seconds that each free row of a rank will cost once short sequences have filled it
  Index capacity = 0;  // rows of a rank
  Index filled = 0;    // rows up to which short sequences fill a rank, if they can: the rest is for evening out
  // Sequences that need half a node take all of it, and those that need half of the ranks all: nobody is left with less
  // work than they have.
  bool wide = false;
};

// A sequence that lies on several ranks: rank n of the list holds two chunks, of share[n] rows together.
struct Split {
  Index sequence = 0;
  std::vector<Index> ranks, share;
  Index nodes = 1;
  bool gaps = false;  // fills gaps: one chunk a rank, in the order of ranks
};

class Attempt {
 public:
  // `order`: the sequences by falling work; those without rows are left out.
  Attempt(std::span<const SequenceWork> sequences, std::span<const Index> order, Index ranks,
          const PlacedOptions& options, const Trial& trial);

  // Seconds of the best way to move what crosses: each rank is sent what it sees, straight or in two hops (into a node
  // once, then inside it), after its own keys are attended or in groups of heads; or everything is gathered.
  double predicted() const;

  const std::vector<Index>& whole() const { return whole_; }  // by sequence: its rank, or -1
  const std::vector<Split>& splits() const { return splits_; }

 private:
  // A rank of a node with room, the lightest first.
  using Lightest = std::pair<double, Index>;
  struct Choice {
    double end = 0;
    Index nodes = 0, of_node = 0;  // ranks of each
  };
  struct Busy;  // seconds of each rank, by kind

  const SequenceWork& of(Index sequence) const { return sequences_[static_cast<std::size_t>(sequence)]; }
  Range ranks_of(Index node) const { return {node * node_, min_of(ranks_, (node + 1) * node_)}; }
  Index room(Index rank) const { return trial_.capacity - rows_[static_cast<std::size_t>(rank)]; }
  double weight(Index rank) const;
  void sort_node(Index node);
  void add(Index rank, Index rows, double seconds);
  double moving(const SequenceWork& s, Index ranks, Index nodes) const;
  double cut(const SequenceWork& s, Index ranks) const;

  bool spread(Index sequence, bool wide);
  bool nodes_with_room(Index piece, Index of_node, Index nodes, std::vector<Lightest>& found) const;
  void split_over(Index sequence, const Choice& choice);
  void place_whole(std::span<const Index> order);
  Index lightest_with_room(Index rows) const;  // -1: none
  void fill_gaps(Index sequence);
  void even_out();
  void share_out(Split& split);
  void add_moves(const Split& split, Busy& busy) const;
  double relayed(const Busy& busy) const;
  double grouped(const Busy& busy) const;

  std::span<const SequenceWork> sequences_;
  Index ranks_, node_, nodes_;
  const PlacedOptions& options_;
  Trial trial_;
  std::vector<double> load_;                    // [ranks] seconds, exposed exchanges included
  std::vector<Index> rows_;                     // [ranks]
  std::vector<std::vector<Lightest>> by_node_;  // by weight
  std::vector<Index> whole_;
  std::vector<Split> splits_;
};

}  // namespace weft::detail
