// A problem under layouts and schedules as a plain value, which the page and the picture write down.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weft/schedule.h"
#include "weft/simulate.h"

namespace weft::draw {

// What all panels have in common.
struct Subject {
  Problem problem;
  Index heads_q = 1, heads_k = 1;
  std::vector<Index> head_map = {};
  TensorShape shape = {};
  Machine machine = {};      // the timelines are simulated on it
  std::string title = {};    // any text; empty: the problem in words
  std::string command = {};  // the command line that made the figure, any text
  bool by_step = false;      // colour the matrix by step, not by rank (the page can switch)
};

// What one panel is made of.
struct PanelSpec {
  Layouts layouts;
  ScheduleOptions options = {};
  std::string note = {};  // why this layout and schedule, any text
};

// A slice of a rank's plan, and the tokens of its key rows: token = k_shift + row · k_stride.
struct PlacedSlice {
  Index rank = 0, step = 0;  // the first step that attends it: with groups of heads there are several
  Slice slice = {};          // rows of the rank's query buffer (Schedule::query_moves)
  Index k_shift = 0, k_stride = 1;
};

struct RankLoad {
  Index pair_heads = 0;  // visible pairs times the query heads that this rank computes
  Traffic forward = {}, backward = {};
};

// When ranks compute and exchange, as simulated.
struct Timelines {
  std::string about = {};                // what was timed, or why not
  Timeline forward = {}, backward = {};  // with the events of all ranks, or of some, evenly spaced, if there are many
};

struct Panel {
  Layouts layouts;
  ScheduleOptions options;
  std::string note = {};
  Index ulysses = 1;      // Ulysses degree: groups of so many ranks swap heads for sequence and attend together
  Index query_ranks = 1;  // ranks of a mesh that attend each other's queries
  Index steps = 0;
  Index head_steps = 1;             // steps that attend the same slices, each for one group of heads
  std::vector<Index> step_of = {};  // as meeting_steps() gives it
  double imbalance = 1;             // largest load over the mean
  std::vector<RankLoad> ranks = {};
  Index slices_total = 0;
  std::vector<PlacedSlice> slices = {};  // all, or none if they do not fit a page
  Timelines times = {};
};

struct Figure {
  Subject subject;
  std::vector<Slice> mask;  // global slices
  std::vector<Panel> panels;
};

// Error for what make_schedule refuses, and for too many ranks or documents.
Figure make_figure(const Subject& subject, const std::vector<PanelSpec>& specs);

// The schedule that is predicted to be the fastest on the subject's machine, and why.
PanelSpec chosen(const Subject& subject, const Layouts& layouts);

// "causal, window (512, 0)", "3 documents, 16 tokens, mask causal", "zigzag, ring".
std::string mask_words(const Mask& mask);
std::string words(const Subject& subject);
std::string words(const Panel& panel);

std::string html(const Figure& figure);  // a page in one file, which loads nothing
std::string svg(const Figure& figure);   // a static picture

}  // namespace weft::draw
