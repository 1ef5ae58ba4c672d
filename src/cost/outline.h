// What all ranks do, in the few numbers that time depends on: loads of exchanges and seconds of kernels, in the order
// of the executor's calls. Slices are counted and not kept.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "cost/load.h"
#include "index.h"
#include "weft/simulate.h"

namespace weft::cost {

// Rows that each of the ranks [to, to + Pattern::repeat) gets from the rank `distance` before it.
struct Span {
  std::uint32_t to = 0, distance = 0;
  double rows = 0;
};

// Who moves how much in an exchange. Equal exchanges share one pattern.
struct Pattern {
  enum class Peers {
    block,       // ranks [n·size, (n + 1)·size) with each other
    same_place,  // ranks at the same place in blocks of `size`
    listed,
    spans,  // a planned rank's messages are also those of its neighbours, so that ranks x ranks need no list
  };
  Peers peers = Peers::listed;
  Index size = 1;
  bool uneven = false;  // listed: a rank may send more than its receivers get, so that they wait for its link
  // listed, by rank: [from_begin[r], from_begin[r + 1]) of `from`, and so on
  std::vector<std::uint32_t> from = {}, to = {};
  std::vector<std::size_t> from_begin = {}, to_begin = {};
  std::vector<double> from_bytes = {};
  std::shared_ptr<const std::vector<Span>> spans = {};
  Index repeat = 1;                                     // spans: ranks of each
  double each = 0;                                      // spans: bytes a row
  bool back = false;                                    // spans: in the opposite direction
  std::vector<std::uint32_t> sent_messages = {};        // spans: [ranks]
  std::vector<Load> loads = {};                         // [ranks]
  std::vector<double> seconds = {}, interference = {};  // [ranks]
};

// Calls f(from, to, count, bytes): each rank from + i sends so many bytes to to + i, i below count.
template <class F>
void for_each_message(const Pattern& p, Index ranks, F&& f) {
  for (const Span& s : *p.spans) {
    const Index first = s.to, distance = s.distance, end = min_of(ranks, first + p.repeat);
    const Index wraps = min_of(max_of(first, distance), end);  // ranks below it get from the last ranks
    const double bytes = s.rows * p.each;
    const auto part = [&](Index begin, Index count, Index other) {
      if (count > 0) p.back ? f(begin, other, count, bytes) : f(other, begin, count, bytes);
    };
    part(first, wraps - first, first - distance + ranks);
    part(wraps, end - wraps, wraps - distance);
  }
}

// A step's kernel call on a rank.
struct Work {
  std::uint32_t rank = 0;
  float seconds = 0;
  float rows = 0;  // seconds of the pass over rows that follows
  double pairs = 0;
};

struct StepOutline {
  int kv = -1, gradients = -1, home = -1;  // patterns; -1: nothing moves
  int enter = -1, leave = -1;              // the first hop of K and V into nodes, and the last of their gradients
  bool shifts = false;                     // gradients travel on with the keys, and come home from some steps
  bool again = false;                      // the keys of the step before
  Range queries = {0, 1};                  // of a mesh: 0 the own, n those of query move n - 1
  std::vector<Work> work;                  // by rank; ranks that see nothing are left out
};

// Steps that follow one swap of heads; all steps if there is none.
struct HeadGroupOutline {
  Range steps = {};
  int swap_in = -1, swap_out = -1, swap_home = -1;  // patterns; -1: nothing moves
  std::vector<float> begin_rows, end_rows;          // [ranks] seconds before its steps and after them
};

// Queries on their way to other ranks, and results on their way home; patterns.
struct QueryMoveOutline {
  int there = -1, back = -1;
};

struct Outline {
  Index ranks = 1;
  Index repeat = 1, stride = 1;  // ranks r, r + stride, and so on, `repeat` of them, have the work of rank r
  Index planned = 1;
  std::vector<Pattern> patterns;
  int numbers = -1;
  std::vector<StepOutline> steps;
  std::vector<HeadGroupOutline> head_groups;
  std::vector<QueryMoveOutline> query_moves;
  std::vector<float> merge_rows;  // [ranks] seconds of what comes home with a query move
  std::vector<float> last_rows;   // [ranks] seconds at the end
  std::vector<Index> pairs;       // [ranks] times query heads
  RankMemory memory = {};

  const Pattern& pattern(int n) const { return patterns[at(n)]; }
  // So many head groups with as many steps each; all ranks' passes over rows take no time yet.
  void set_head_groups(Index count);
};

Outline outline_of(const Job& job, const Machine& machine, Pass pass);
Outline outline_of(std::span<const Schedule> schedules, const TensorShape& shape, const Machine& machine, Pass pass);

// One thing that every rank does.
struct Op {
  enum class Kind { post, wait, compute, rows };
  Kind kind = Kind::compute;
  std::string_view name = {};
  int pattern = -1;      // post, wait
  std::size_t call = 0;  // post, wait: the slot of the exchange
  Index step = -1;
  const std::vector<float>* rows = nullptr;  // rows: [ranks] seconds, of the outline
};
// The outline must outlive them.
std::vector<Op> ops_of(const Outline& outline, Pass pass);
// Slots that they use: exchanges in flight at a time.
std::size_t slots_of(const std::vector<Op>& ops);

}  // namespace weft::cost
