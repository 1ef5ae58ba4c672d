// What all ranks do, in the few numbers that time needs: loads of exchanges, seconds of kernels, in the order of the
// executor's calls. Slices are counted and forgotten.
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

// Rows that the ranks to, to + 1, .. (as many as a pattern repeats) each get from the rank so far before their own.
struct Span {
  std::uint32_t to = 0, distance = 0;
  double rows = 0;
};

// Who moves how much in an exchange; calls that are alike share it.
struct Pattern {
  enum class Peers {
    block,   // ranks n·size .. (n + 1)·size - 1 with each other
    across,  // ranks of the same place in blocks of `size`
    listed,
    spans,  // all messages of a planned rank are also those of its neighbours: no list of ranks x ranks
  };
  Peers peers = Peers::listed;
  Index size = 1;
  bool uneven = false;  // listed: senders may be what their receivers wait for
  // listed, by rank: [from_begin[r], from_begin[r + 1]) of `from`, and so on
  std::vector<std::uint32_t> from = {}, to = {};
  std::vector<std::size_t> from_begin = {}, to_begin = {};
  std::vector<double> from_bytes = {};
  std::shared_ptr<const std::vector<Span>> spans = {};
  Index repeat = 1;                                     // spans: ranks of each
  double each = 0;                                      // .. bytes a row
  bool back = false;                                    // .. from those who got them
  std::vector<std::uint32_t> sent_messages = {};        // .. [ranks]
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
  bool shifts = false;                     // gradients travel on with the keys, and come home from some steps
  std::vector<Work> work;                  // by rank; ranks that see nothing are left out
};

struct Outline {
  Index ranks = 1;
  Index repeat = 1, stride = 1;  // work of rank r is also that of r + stride, .., repeat times in all
  Index planned = 1;
  std::vector<Pattern> patterns;
  int swap_in = -1, swap_out = -1, swap_home = -1, numbers = -1;
  std::vector<StepOutline> steps;
  std::vector<float> begin_rows, end_rows;  // [ranks] seconds
  std::vector<Index> pairs;                 // [ranks] times query heads
  RankMemory memory = {};

  const Pattern& pattern(int n) const { return patterns[at(n)]; }
};

Outline outline_of(const Job& job, const Machine& machine, Pass pass);
Outline outline_of(std::span<const Schedule> schedules, const TensorShape& shape, const Machine& machine, Pass pass);

// One thing that every rank does.
struct Op {
  enum class Kind { post, wait, compute, rows_begin, rows_end };
  Kind kind = Kind::compute;
  std::string_view name = {};
  int pattern = -1;      // post, wait
  std::size_t call = 0;  // .. which slot: a few are under way at a time
  Index step = -1;
};
inline constexpr std::size_t kSlots = 8;
std::vector<Op> ops_of(const Outline& outline, Pass pass);

}  // namespace weft::cost
