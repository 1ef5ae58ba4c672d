// What is drawn of a problem on ranks: a plain value, which the page and the picture only write down.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weft/schedule.h"
#include "weft/simulate.h"

namespace weft::draw {

// The question, the same in every panel.
struct Subject {
  Problem problem;
  Index heads_q = 1, heads_k = 1;
  std::vector<Index> head_map = {};
  TensorShape shape = {};
  Machine machine = {};      // that the timelines are of
  std::string title = {};    // any text; empty: said from the problem
  std::string command = {};  // how it was made, any text
  bool by_step = false;      // the matrix coloured by step, not by rank (the page can change it)
};

// One panel: who holds what, and how it moves.
struct Setting {
  Layouts layouts;
  ScheduleOptions options = {};
  std::string note = {};  // why this one, any text
};

// A slice of a rank's plan, and where its key rows lie: token = k_shift + row · k_stride.
struct PlacedSlice {
  Index rank = 0, step = 0;  // the first step that attends it (more than one if heads come in groups)
  Slice slice = {};
  Index k_shift = 0, k_stride = 1;
};

struct RankShare {
  Index pair_heads = 0;  // visible pairs times the query heads that this rank attends them with
  Traffic forward = {}, backward = {};
};

// When ranks compute and exchange.
struct Times {
  std::string about = {};                // what was timed, or why not
  Timeline forward = {}, backward = {};  // with the events of all ranks, or of some spread evenly if there are many
};

struct Panel {
  Layouts layouts;
  ScheduleOptions options;
  std::string note = {};
  Index inside = 1;  // ranks that swap heads: a group attends together
  Index steps = 0;
  Index head_steps = 1;             // steps that attend the same slices, a group of heads each
  std::vector<Index> step_of = {};  // by (query's group - key's group) mod groups, or [groups, groups]; -1: never
  double balance = 1;
  std::vector<RankShare> ranks = {};
  Index slices_total = 0;
  std::vector<PlacedSlice> slices = {};  // all, or none if they would not fit a page
  Times times = {};
};

struct Scene {
  Subject subject;
  std::vector<Slice> mask;  // global slices
  std::vector<Panel> panels;
};

// Error for what make_schedule refuses, and for more ranks or documents than can be gone through.
Scene make_scene(const Subject& subject, const std::vector<Setting>& settings);

// The schedule that is predicted to be the quickest on the subject's machine, and why.
Setting chosen(const Subject& subject, const Layouts& layouts);

// "3 documents, 16 tokens, mask causal" and "zigzag, ring".
std::string words(const Subject& subject);
std::string words(const Panel& panel);

// One file, no network: the whole page.
std::string html(const Scene& scene);
// A static picture.
std::string svg(const Scene& scene);

}  // namespace weft::draw
