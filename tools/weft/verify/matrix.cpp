#include <algorithm>
#include <array>

#include <fmt/format.h>

#include "check/cases/random_case.h"
#include "index.h"
#include "verify/documents.h"
#include "verify/grids.h"

namespace weft::tool {
namespace {

using check::Case;

// `multiple`: what padded lengths are rounded up to, 1 or what dual_chunk asks for.
struct PackingKind {
  const char* name;
  void (*put)(Case& to, Index multiple);
};

void any_lengths(Case& to, Index multiple) {
  to.q = side_of_rooms({{37, 0}, {0, 0}, {1, 0}, {22, 0}, {90, 0}}, multiple);
}

void padding_between(Case& to, Index multiple) {
  to.q = side_of_rooms({{19, 23}, {0, 4}, {30, 30}, {7, 16}}, multiple, 3, 5);
}

// All real tokens lie in the first piece of any cut, so that some ranks hold only padding. With dual_chunk, which cuts
// each document, a piece has 8 rows.
void padding_rank(Case& to, Index multiple) {
  to.q = multiple == 1 ? side_of_rooms({{12, 0}, {9, 10}, {0, 0}, {5, 150}}, 1)
                       : side_of_rooms({{8, 8 * multiple}, {7, 8 * multiple}}, multiple);
}

void cross_attention(Case& to, Index multiple) {
  to.q = side_of_rooms({{20, 0}, {33, 0}, {0, 0}, {11, 0}}, multiple);
  to.k = side_of_rooms({{41, 44}, {5, 8}, {12, 0}, {30, 0}}, multiple, 2);
}

void batch(Case& to, Index multiple) {
  const Index length = ceil_div(40, multiple) * multiple;
  to.q = side_of_rooms({{33, length}, {17, length}, {length, length}}, multiple);
}

constexpr std::array kPackings = {
    PackingKind{"any lengths, empty ones", any_lengths}, PackingKind{"padding, first token 3", padding_between},
    PackingKind{"padding alone on a rank", padding_rank}, PackingKind{"cross-attention", cross_attention},
    PackingKind{"batch of one length", batch}};

struct MaskKind {
  const char* name;
  Mask mask;
};

// No document has a length that 11 divides or, but for padded ones, 16.
const std::vector<MaskKind>& masks() {
  static const std::vector<MaskKind> kinds = {{"full", {}},
                                              {"causal", {.causal = true}},
                                              {"bottom_right", {.causal = true, .align = Align::bottom_right}},
                                              {"window 9,0", {.left = 9, .right = 0}},
                                              {"window 7,5", {.left = 7, .right = 5}},
                                              {"causal, chunk 16", {.causal = true, .chunk = 16}},
                                              {"chunk 11", {.chunk = 11}},
                                              {"slices", {.slices = std::vector<Slice>{}}}};
  return kinds;
}

struct HeadKind {
  const char* name;
  Index q, k;
  std::vector<Index> map = {};
};
const std::vector<HeadKind>& head_kinds() {
  static const std::vector<HeadKind> kinds = {{"2:2", 2, 2},
                                              {"4:2", 4, 2},
                                              {"3:1", 3, 1},
                                              {"6:3", 6, 3},
                                              {"3:2 by map", 3, 2, {0, 1, 1}},
                                              {"5:3 by map", 5, 3, {2, 0, 2, 1, 2}}};
  return kinds;
}

struct Widths {
  Index qk, v;
};
constexpr std::array kWidths = {Widths{16, 16}, Widths{24, 16}, Widths{8, 8}, Widths{32, 32}};

template <class List>
const auto& drawn(check::Choices& choices, const List& list) {
  return list[at(choices.pick(0, static_cast<Index>(list.size()) - 1))];
}

std::vector<Slice> some_slices(check::Choices& choices, const Case& c) {
  constexpr std::size_t kEnough = 3;
  std::vector<Slice> slices;
  for (int again = 0; again < 100 && slices.size() < kEnough; ++again) slices = random_slices(choices, c);
  return slices;
}

constexpr Index kDraws = 3;  // of features, for each combination of the full matrix

class Maker {
 public:
  Maker(const GridAxes& axes, const std::vector<LayoutKind>& layouts, bool full) : axes_(axes), full_(full) {
    for (const LayoutKind kind : layouts) (kind == LayoutKind::dual_chunk ? dual_ : others_).push_back(kind);
  }

  Grid make() {
    Grid grid{.title = full_ ? "The support matrix" : "The support matrix, dtypes and ranks taking turns",
              .row_axes = {"layout", "mask"},
              .other_axes = {"packing", "dtype", "ranks", "format", "heads", "widths", "sink", "softcap", "scale"}};
    for (const ScheduleOption& option : schedule_options())
      if (option.whole != nullptr) grid.other_axes.emplace_back(option.name);
    for (const MaskKind& mask : masks())
      for (const PackingKind& packing : kPackings) add_problems(mask, packing, grid);
    return grid;
  }

 private:
  void add_problems(const MaskKind& mask, const PackingKind& packing, Grid& grid) {
    const Index turn = turn_++;
    for (Index again = 0; again < (full_ ? kDraws : 1); ++again) add_drawn(mask, packing, turn, grid);
  }

  // Heads, widths, sink, softcap and scale are drawn anew for each problem.
  void add_drawn(const MaskKind& mask, const PackingKind& packing, Index turn, Grid& grid) {
    for (const DType dtype : full_ ? axes_.dtypes : std::vector{taken(axes_.dtypes, turn)}) {
      if (!others_.empty()) {
        GridProblem& problem = add_problem(mask, packing, dtype, 1, grid);
        for (std::size_t i = 0; i < others_.size(); ++i)
          for (const Index ranks : ranks_of(turn + static_cast<Index>(i))) add_cells(problem, others_[i], ranks);
      }
      for (const Index ranks : dual_.empty() ? std::vector<Index>{} : ranks_of(turn + 1))
        add_cells(add_problem(mask, packing, dtype, 2 * ranks, grid), LayoutKind::dual_chunk, ranks);
    }
  }

  template <class T>
  static T taken(const std::vector<T>& list, Index turn) {
    return list[at(turn) % list.size()];
  }
  // The packing is the inner of two loops: without the quotient it would always meet the same ranks.
  std::vector<Index> ranks_of(Index turn) const {
    return full_ ? axes_.ranks : std::vector{taken(axes_.ranks, turn + turn / 5)};
  }

  GridProblem& add_problem(const MaskKind& mask, const PackingKind& packing, DType dtype, Index multiple, Grid& grid) {
    const Index number = number_++;
    check::RandomChoices choices(static_cast<unsigned long long>(number));
    GridProblem problem;
    Case& c = problem.question;
    packing.put(c, multiple);
    c.mask = mask.mask;
    if (c.mask.slices) c.mask.slices = some_slices(choices, c);
    c.dtype = dtype;
    c.seed = axes_.seed + static_cast<unsigned long long>(number);
    labels_ = {{"mask", mask.name}, {"packing", packing.name}, {"dtype", std::string(name(dtype))}};
    choose_features(choices, c);
    grid.problems.push_back(std::move(problem));
    return grid.problems.back();
  }

  void choose_features(check::Choices& choices, Case& c) {
    const HeadKind& heads = drawn(choices, head_kinds());
    const Widths widths = drawn(choices, kWidths);
    c.heads_q = heads.q;
    c.heads_k = heads.k;
    c.head_map = heads.map;
    c.dim_qk = widths.qk;
    c.dim_v = widths.v;
    c.sink = static_cast<Case::SinkKind>(choices.pick(0, 2));
    if (choices.one_in(2)) c.softcap = 5;
    if (choices.one_in(3)) c.scale = 0.4;
    labels_.insert(labels_.end(), {{"heads", heads.name},
                                   {"widths", fmt::format("{}:{}", widths.qk, widths.v)},
                                   {"sink", kSinkNames[static_cast<std::size_t>(c.sink)]},
                                   {"softcap", c.softcap > 0 ? "5" : "none"},
                                   {"scale", c.scale ? "0.4" : "1/sqrt(width)"}});
  }

  // All schedules of one placement; batches in every format, which dual_chunk alone has.
  void add_cells(GridProblem& problem, LayoutKind layout, Index ranks) {
    Case placed = problem.question;
    placed.layout = layout;
    placed.ranks = ranks;
    if (layout == LayoutKind::explicit_runs) choose_runs(placed);
    std::vector<Case::Format> formats = {Case::Format::thd};
    if (layout == LayoutKind::dual_chunk && label(labels_, "packing") == kPackings.back().name)
      formats.insert(formats.end(), {Case::Format::bshd, Case::Format::sbhd});
    for (const Case::Format format : formats) {
      ++placement_;
      placed.format = format;
      for (const ScheduleOptions& usual : axes_.schedules) {
        const ScheduleOptions schedule = by_turn(usual, placed, placement_);
        Labels labels = labels_;
        labels.insert(labels.end(), {{"layout", std::string(name(layout))},
                                     {"ranks", std::to_string(ranks)},
                                     {"format", std::string(name(format))}});
        for (auto& label : variant_labels(schedule)) labels.push_back(std::move(label));
        problem.cells.push_back({placed, schedule, std::move(labels)});
      }
    }
  }

  static void choose_runs(Case& c) {
    check::RandomChoices choices(c.seed + static_cast<unsigned long long>(c.ranks) * 1000);
    const Index stride = choices.one_in(4) ? 2 : 1;
    c.runs = random_runs(choices, c.q, c.ranks, stride);
    if (c.k) c.k_runs = random_runs(choices, *c.k, c.ranks, stride);
  }

  const GridAxes& axes_;
  bool full_;
  std::vector<LayoutKind> dual_, others_;
  Labels labels_;  // of the problem at hand
  Index turn_ = 0, number_ = 0, placement_ = 0;
};

}  // namespace

Grid matrix_grid(const GridAxes& axes, const std::vector<LayoutKind>& layouts, bool full) {
  return Maker(axes, layouts, full).make();
}

}  // namespace weft::tool
