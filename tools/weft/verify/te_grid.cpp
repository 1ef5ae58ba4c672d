#include <array>
#include <numeric>

#include <fmt/format.h>

#include "check/cases/random_case.h"
#include "verify/documents.h"
#include "verify/grids.h"

namespace weft::tool {
namespace {

using check::Case;

constexpr Index kBatch = 2, kTokens = 4096;
// With more pairs of rows a dense softmax takes seconds, and there are hundreds of problems: only some rows are
// compared.
constexpr Index kMaxPairs = Index{1} << 19, kSampledRows = 64;

struct Heads2 {
  Index q, k;
};
constexpr std::array kHeads = {Heads2{12, 12}, Heads2{32, 4}, Heads2{12, 2}};
constexpr Heads2 kSinkHeads = {64, 8};

struct Widths {
  Index qk, v;
};
constexpr std::array kWidths = {Widths{128, 128}, Widths{64, 64}, Widths{128, 64}, Widths{192, 128}};
constexpr Widths kSinkWidths = {64, 64};

const std::vector<Mask>& masks() {
  static const std::vector<Mask> all = {{.causal = true},
                                        {},
                                        {.causal = true, .left = 512, .right = 0},
                                        {.causal = true, .left = 128, .right = 0},
                                        {.causal = true, .left = 512, .right = 512},
                                        {.left = 512, .right = 512}};
  return all;
}

// 128 divides 4096 tokens, 100 does not.
const std::vector<Mask>& chunked_masks() {
  static const std::vector<Mask> all = {{.causal = true, .chunk = 128}, {.causal = true, .chunk = 100}};
  return all;
}

Index smaller(Index value, Index times) { return value <= 0 ? value : max_of(1, ceil_div(value, times)); }

// Query and K/V heads by the same factor, so that their ratio stays.
Heads2 smaller(const Heads2& heads, Index times) {
  Index by = min_of(times, 4);
  while (std::gcd(heads.q, heads.k) % by != 0) --by;
  return {heads.q / by, heads.k / by};
}

Widths smaller(const Widths& widths, Index times) {
  const Index by = min_of(times, 8);
  return {smaller(widths.qk, by), smaller(widths.v, by)};
}

Mask smaller(Mask mask, Index times) {
  mask.left = smaller(mask.left, times);
  mask.right = smaller(mask.right, times);
  if (mask.chunk) mask.chunk = smaller(*mask.chunk, times);
  return mask;
}

std::string words(const Mask& m) {
  std::string out = m.causal ? "causal" : "full";
  if (m.left != -1) out += fmt::format(" {},{}", m.left, m.right);
  if (m.chunk) out += fmt::format(" chunk {}", *m.chunk);
  return out;
}

enum class Padding { between, none, batch };  // batch: bshd and sbhd, documents of the whole length

class Maker {
 public:
  Maker(const GridAxes& axes, Index scale) : axes_(axes), scale_(scale) {}

  Grid make() {
    grid_ = {.title = fmt::format("Transformer Engine's grid, {} times smaller", scale_),
             .row_axes = {"mask", "heads"},
             .other_axes = {"widths", "sink", "dtype", "format", "padding", "ranks"}};
    for (const DType dtype : axes_.dtypes) {
      for (const Mask& mask : masks()) {
        for (const Heads2& heads : kHeads)
          for (const Widths& widths : kWidths) add(mask, heads, widths, Case::SinkKind::none, dtype);
        for (const auto sink : {Case::SinkKind::off_by_one, Case::SinkKind::learnable})
          add(mask, kSinkHeads, kSinkWidths, sink, dtype);
      }
      for (const Mask& mask : chunked_masks())
        for (const Heads2& heads : kHeads) add(mask, heads, kWidths[0], Case::SinkKind::none, dtype);
    }
    return std::move(grid_);
  }

 private:
  void add(const Mask& mask, const Heads2& heads, const Widths& widths, Case::SinkKind sink, DType dtype) {
    for (const Index ranks : axes_.ranks) {
      for (const Padding padding : {Padding::between, Padding::none, Padding::batch}) {
        GridProblem problem;
        Case& c = problem.question;
        c.seed = axes_.seed + static_cast<unsigned long long>(number_++);
        c.q = documents(c.seed, ranks, padding);
        c.mask = smaller(mask, scale_);
        const Heads2 h = smaller(heads, scale_);
        const Widths w = smaller(widths, scale_);
        c.heads_q = h.q;
        c.heads_k = h.k;
        c.dim_qk = w.qk;
        c.dim_v = w.v;
        c.sink = sink;
        c.dtype = dtype;
        c.layout = LayoutKind::dual_chunk;
        c.ranks = ranks;
        const Index tokens = kBatch * smaller(kTokens, scale_);
        if (tokens * tokens > kMaxPairs) problem.rows = kSampledRows;
        add_cells(problem, padding,
                  {{"mask", words(mask)},
                   {"heads", fmt::format("{}:{}", heads.q, heads.k)},
                   {"widths", fmt::format("{}:{}", widths.qk, widths.v)},
                   {"sink", kSinkNames[static_cast<std::size_t>(sink)]},
                   {"dtype", std::string(name(dtype))},
                   {"padding", padding == Padding::between ? "between documents" : "none"},
                   {"ranks", std::to_string(ranks)}});
        grid_.problems.push_back(std::move(problem));
      }
    }
  }

  check::Side documents(unsigned long long seed, Index ranks, Padding padding) const {
    check::RandomChoices choices(seed);
    const Index multiple = 2 * ranks, most = ceil_div(smaller(kTokens, scale_), multiple) * multiple;
    std::vector<Room> rooms;
    for (Index i = 0; i < kBatch; ++i) {
      const Index length = choices.pick(1, most), room = ceil_div(length, multiple) * multiple;
      rooms.push_back(padding == Padding::between ? Room{length, room}
                      : padding == Padding::none  ? Room{room, room}
                                                  : Room{most, most});
    }
    return side_of_rooms(rooms, multiple);
  }

  void add_cells(GridProblem& problem, Padding padding, const Labels& labels) {
    const std::vector<Case::Format> formats = padding == Padding::batch
                                                  ? std::vector{Case::Format::bshd, Case::Format::sbhd}
                                                  : std::vector{Case::Format::thd};
    for (const Case::Format format : formats) {
      Case placed = problem.question;
      placed.format = format;
      ++placement_;
      for (const ScheduleOptions& schedule : axes_.schedules) {
        problem.cells.push_back({placed, by_turn(schedule, placed, placement_), labels});
        problem.cells.back().labels.emplace_back("format", std::string(name(format)));
      }
    }
  }

  const GridAxes& axes_;
  Index scale_;
  Grid grid_;
  Index number_ = 0, placement_ = 0;
};

}  // namespace

Grid te_grid(const GridAxes& axes, Index scale) { return Maker(axes, scale).make(); }

}  // namespace weft::tool
