// Problems of every feature of attention, named, some large enough for several tiles of queries and keys.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "check/cases/random_case.h"
#include "check/cases/trees.h"
#include "kernel/kernel_problem.h"
#include "weft/plan.h"

namespace weft::test {

// The slices of a mask over whole streams.
inline AttentionProblem masked(AttentionProblem p, const Packing& packing, const Mask& mask) {
  p.tq = packing.q().tokens();
  p.tk = packing.k().tokens();
  p.slices = Problem(packing, mask).global_slices();
  return p;
}

inline KernelProblem make_problem(const AttentionProblem& base, const Packing& packing, const Mask& mask,
                                  unsigned seed) {
  AttentionProblem p = masked(base, packing, mask);
  return make_problem(p, p.slices, seed);
}

inline Stream lengths(std::vector<Index> list) { return Stream::from_lengths(list); }
// Sequences in rooms that leave padding before, between and after them.
inline Stream padded(std::vector<Index> offsets, std::vector<Index> used, Index tokens) {
  return Stream::from_used(offsets, used, tokens);
}

inline void add_dims(std::vector<KernelProblem>& to) {
  constexpr std::pair<Index, Index> kDims[] = {{1, 1},   {3, 3},   {8, 8},     {16, 16},   {31, 31},
                                               {64, 64}, {80, 80}, {96, 96},   {128, 128}, {192, 128},
                                               {5, 2},   {1, 256}, {255, 255}, {256, 256}, {256, 1}};
  for (const auto& [dqk, dv] : kDims) {
    to.push_back({"dim " + std::to_string(dqk) + ":" + std::to_string(dv),
                  {.tq = 21, .tk = 45, .dqk = dqk, .dv = dv, .slices = {{0, 19, 1, 44, -7, 30}}}});
  }
}

inline void add_heads(std::vector<KernelProblem>& to) {
  struct Heads {
    Index hq, hk;
    std::vector<Index> map = {};
  };
  const Heads list[] = {{1, 1},        {3, 3}, {8, 2}, {6, 2}, {16, 1}, {3, 2, {0, 1, 1}}, {5, 3, {2, 0, 2, 1, 2}},
                        {2, 4, {1, 3}}};
  for (const Heads& h : list) {
    to.push_back(
        {"heads " + std::to_string(h.hq) + ":" + std::to_string(h.hk) + (h.map.empty() ? "" : " by map"),
         {.tq = 23, .tk = 50, .hq = h.hq, .hk = h.hk, .dqk = 24, .dv = 20, .slices = {{0, 23, 0, 50, -kUnlimited, 27}}},
         h.map});
  }
}

inline void add_masks(std::vector<KernelProblem>& to) {
  const AttentionProblem base{.hq = 2, .hk = 1, .dqk = 40, .dv = 40};
  const auto add = [&](const std::string& name, const Packing& packing, const Mask& mask) {
    to.push_back({name, masked(base, packing, mask)});
  };
  add("causal", lengths({333}), {.causal = true});
  add("full", Packing(lengths({70}), lengths({301})), {});
  add("window", lengths({301}), {.causal = true, .left = 50});
  add("window with right", lengths({290}), {.left = 37, .right = 9});
  add("only the right", lengths({131}), {.left = 0, .right = -1});
  add("one key each", lengths({140}), {.left = 0, .right = 0});
  add("chunked", lengths({200, 131}), {.causal = true, .chunk = 67});
  add("chunked window", lengths({150, 31}), {.left = 20, .right = 3, .chunk = 64});
  add("bottom_right, more keys", Packing(lengths({71, 3}), lengths({407, 65})),
      {.causal = true, .align = Align::bottom_right});
  add("bottom_right, more queries", Packing(lengths({140}), lengths({61})),
      {.causal = true, .align = Align::bottom_right});
  add("documents", lengths({1, 2, 3, 17, 0, 64, 65, 31, 128, 1}), {.causal = true});
  add("padded documents", padded({5, 70, 80, 200}, {63, 9, 119}, 211), {.causal = true});
  add("long keys", Packing(lengths({9}), lengths({1100})), {});
  add("long queries", Packing(lengths({700}), lengths({33})), {});
  add("a window far back", Packing(lengths({40}), lengths({900})), {.align = Align::bottom_right, .left = 600});
  Random random(77);
  for (int i = 0; i < 6; ++i) {
    AttentionProblem p = base;
    p.tq = random.index(60, 180);
    p.tk = random.index(60, 260);
    p.slices = random_slices(random, p.tq, p.tk);
    to.push_back({"grid " + std::to_string(i), p});
  }
  AttentionProblem stripes = base;  // every row in 25 slices, in an order of their own
  stripes.tq = 50;
  stripes.tk = 25 * 13;
  for (Index i = 0; i < 25; ++i) {
    const Index k = 13 * (i * 7 % 25);
    stripes.slices.push_back({i % 3, 50 - i % 2, k, k + 11, -kUnlimited, i % 4 == 0 ? k : kUnlimited});
  }
  to.push_back({"stripes", stripes});
  // A slice a node, and joined as a Problem does; more than one node in a tile of rows, and in a tile of keys.
  const auto add_tree = [&](const std::string& name, const check::TreeShape& tree, Index first) {
    AttentionProblem p = base;
    p.tq = p.tk = first + tree.rows() + 3;
    p.slices = check::tree_slices(tree, first);
    to.push_back({name, p});
    add(name + ", joined", lengths({p.tq}), {.slices = p.slices});
  };
  add_tree("tree of short nodes", check::even_tree(5, 2, 9), 2);
  add_tree("prompt and answers", check::answers_tree(130, 7, 23), 0);
  to.push_back({"no slices", {.tq = 5, .tk = 7, .sink = Sink::Kind::learnable}});
  to.push_back({"no queries", {.tq = 0, .tk = 7, .sink = Sink::Kind::learnable}});
  to.push_back({"no keys", {.tq = 5, .tk = 0, .sink = Sink::Kind::learnable}});
  to.push_back({"empty slices", {.tq = 5, .tk = 7, .slices = {{1, 1, 0, 7}, {0, 5, 3, 3}, {0, 5, 0, 7, 90, 95}}}});
}

inline void add_features(std::vector<KernelProblem>& to) {
  const AttentionProblem base{.tq = 40,
                              .tk = 90,
                              .hq = 4,
                              .hk = 2,
                              .dqk = 32,
                              .dv = 24,
                              .slices = {{0, 30, 3, 84, -kUnlimited, 55}, {30, 38, 10, 60, -20, 20}}};
  const auto add = [&](const std::string& name, auto&& change) {
    AttentionProblem p = base;
    change(p);
    to.push_back({name, p});
  };
  for (const double scale : {0.0, -0.3, 1.5}) {
    add("scale " + std::to_string(scale), [&](AttentionProblem& p) { p.scale = scale; });
  }
  for (const double softcap : {0.7, 20.0}) {
    add("softcap " + std::to_string(softcap), [&](AttentionProblem& p) {
      p.softcap = softcap;
      p.scale = 0.5;
    });
  }
  for (const Sink::Kind sink : {Sink::Kind::off_by_one, Sink::Kind::learnable}) {
    add("sink " + std::to_string(static_cast<int>(sink)), [&](AttentionProblem& p) { p.sink = sink; });
  }
  for (const ViewKind view : {ViewKind::sbhd, ViewKind::gaps, ViewKind::head_major}) {
    add("view " + std::to_string(static_cast<int>(view)), [&](AttentionProblem& p) {
      p.tq = 39;  // three sequences
      p.view = view;
      p.softcap = 3;
      p.sink = Sink::Kind::learnable;
    });
  }
}

inline void fill(std::vector<KernelProblem>& problems, DType dtype) {
  Random random(5);
  for (KernelProblem& problem : problems) {
    problem.p.dtype = dtype;
    problem.p.fill(random);
  }
}

inline std::vector<KernelProblem> feature_problems(DType dtype) {
  std::vector<KernelProblem> problems;
  add_dims(problems);
  add_heads(problems);
  add_masks(problems);
  add_features(problems);
  fill(problems, dtype);
  return problems;
}

// Head dims above 256, and the absorbed queries of latent attention: all heads on one K/V head.
inline std::vector<KernelProblem> problems_above_256(DType dtype) {
  constexpr std::pair<Index, Index> kDims[] = {{257, 300}, {320, 320}, {512, 64}, {40, 264}, {576, 512}};
  std::vector<KernelProblem> problems;
  // As many rows and heads as make several tiles, which are smaller here.
  for (const auto& [dqk, dv] : kDims) {
    problems.push_back(
        {"dim " + std::to_string(dqk) + ":" + std::to_string(dv),
         {.tq = 90, .tk = 131, .hq = 6, .hk = 2, .dqk = dqk, .dv = dv, .slices = {{0, 88, 1, 130, -7, 60}}}});
  }
  const auto add = [&](const std::string& name, auto&& change) {
    AttentionProblem p{.tq = 70, .tk = 150, .hq = 3, .hk = 1, .dqk = 576, .dv = 512};
    p.slices = {{0, 33, 3, 84, -kUnlimited, 50}, {33, 68, 40, 149, -70, 60}};
    change(p);
    problems.push_back({"576:512, " + name, p});
  };
  add("16 heads on one", [](AttentionProblem& p) { p.hq = 16; });
  add("softcap and sink", [](AttentionProblem& p) { p.softcap = 3, p.sink = Sink::Kind::learnable; });
  add("negative scale", [](AttentionProblem& p) { p.scale = -0.04, p.sink = Sink::Kind::off_by_one; });
  add("gaps", [](AttentionProblem& p) { p.view = ViewKind::gaps; });
  add("sbhd", [](AttentionProblem& p) { p.tq = 69, p.view = ViewKind::sbhd; });
  add("no slices", [](AttentionProblem& p) { p.slices = {}; });
  add("a narrow band", [](AttentionProblem& p) { p.slices = {{0, 70, 0, 150, 30, 34}, {0, 70, 0, 150, 35, 36}}; });
  fill(problems, dtype);
  return problems;
}

// What one rank attends: random packings, masks, layouts, orders of keys and features.
inline std::vector<KernelProblem> planned_problems(DType dtype) {
  constexpr Index kWidths[] = {1, 3, 8, 16, 20, 31, 64};
  std::vector<KernelProblem> problems;
  Random random(6);
  for (unsigned seed = 0; problems.size() < (kSanitized ? 60 : 150); ++seed) {
    check::RandomChoices choices(seed);
    const check::Case c = check::random_case(choices);
    const Problem problem = check::problem_of(c);
    const Layouts layouts = check::layouts_of(c, problem);
    const RunList q = layouts.q.runs(random.index(0, c.ranks - 1)), ranks = layouts.k.rank_order();
    const Index first = random.index(0, c.ranks - 1), order = random.index(0, 2);
    const RunList some = layouts.k.rank_order({first, random.index(1, c.ranks - first), 1});
    const RunList keys = order == 0 ? layouts.k.sequence_order() : order == 1 ? ranks : some;
    if (q.stride() != keys.stride()) continue;
    const Plan plan = make_plan(problem, q, keys);
    AttentionProblem p{.tq = plan.q_rows, .tk = plan.k_rows, .hq = c.heads_q, .hk = c.heads_k};
    p.dqk = kWidths[random.index(0, 6)];
    p.dv = random.chance(0.5) ? p.dqk : kWidths[random.index(0, 6)];
    p.dtype = dtype;
    p.view = static_cast<ViewKind>(random.index(0, 3));
    p.scale = c.scale;
    p.softcap = c.softcap;
    p.sink = static_cast<Sink::Kind>(random.index(0, 2));
    p.slices = plan.slices;
    p.fill(random);
    problems.push_back({"weft verify " + check::flags(c), std::move(p)});
  }
  return problems;
}

// Every class of widths with several tiles of rows and keys.
inline std::vector<KernelProblem> wide_problems(DType dtype) {
  constexpr std::pair<Index, Index> kDims[] = {{40, 40},   {64, 64},   {80, 96},   {128, 128}, {192, 128},
                                               {129, 128}, {128, 192}, {200, 136}, {256, 256}, {8, 256}};
  std::vector<KernelProblem> problems;
  Random random(91);
  for (const auto& [dqk, dv] : kDims) {
    AttentionProblem p{.tq = 200, .tk = 290, .hq = 4, .hk = 2, .dqk = dqk, .dv = dv, .dtype = dtype};
    p.slices = {{3, 90, 5, 170, -kUnlimited, 60}, {90, 190, 100, 280, -70, 120}};
    p.sink = random.chance(0.5) ? Sink::Kind::learnable : Sink::Kind::none;
    p.fill(random);
    problems.push_back({"wide " + std::to_string(dqk) + ":" + std::to_string(dv), std::move(p)});
  }
  for (const auto& [dqk, dv] : {std::pair<Index, Index>{192, 128}, {256, 256}}) {
    AttentionProblem p{.tq = 200, .tk = 290, .hq = 4, .hk = 2, .dqk = dqk, .dv = dv, .dtype = dtype, .softcap = 3};
    p.slices = {{3, 190, 5, 280, -kUnlimited, 70}};
    p.fill(random);
    problems.push_back({"softcap " + std::to_string(dqk) + ":" + std::to_string(dv), std::move(p)});
  }
  return problems;
}

// Logits that grow from tile to tile of keys: in some rows beyond what exp can take, in rows beside them not at all.
template <Index kWidth>
std::vector<KernelProblem> growing_problem(DType dtype) {
  KernelProblem problem{"width " + std::to_string(kWidth),
                        {.tq = 300,
                         .tk = 900,
                         .hq = 4,
                         .hk = 2,
                         .dqk = kWidth,
                         .dv = kWidth,
                         .dtype = dtype,
                         .scale = 1.0,
                         .slices = {{0, 170, 5, 880, -kUnlimited, 700}, {180, 300, 0, 900, -120, 500}}}};
  AttentionProblem& p = problem.p;
  Random random(17);
  p.fill(random);
  std::vector<double> q = p.q.values(), k = p.k.values();
  // An error of a logit is a relative error of its probability: the limit of f32's norm holds for small logits.
  const double most = dtype == DType::f32 ? 0.5 : 30, steps[] = {0, 0.25, -1, 1, most / 4, most};
  for (Index row = 0; row < p.tq; ++row)
    for (Index head = 0; head < p.hq; ++head)
      for (Index i = 0; i < p.dqk; ++i) {
        double& x = q[at((row * p.hq + head) * p.dqk + i)];
        x = i == 0 ? steps[at((row + 2 * head) % 6)] : x / 8;
      }
  for (Index key = 0; key < p.tk; ++key)
    for (Index head = 0; head < p.hk; ++head) k[at((key * p.hk + head) * p.dqk)] = static_cast<double>(key / 64);
  p.q.set_used(q, p.q_used);
  p.k.set_used(k, p.k_used);
  std::vector<KernelProblem> problems;
  problems.push_back(std::move(problem));
  return problems;
}

// Any shape, view, mask and feature; widths to 256, or seldom above that.
inline KernelProblem random_problem(Random& random, DType dtype, bool above_256) {
  constexpr Index kWidths[] = {1, 3, 8, 16, 31, 40, 64, 72, 80, 96, 128, 136, 192, 200, 256};
  const auto width = [&] { return kWidths[random.index(0, 14)]; };
  AttentionProblem p;
  p.dtype = dtype;
  p.tq = random.index(1, random.chance(0.3) ? 300 : 90);
  const Index keys_per_split = random.chance(0.3) ? 128 : 0;
  p.tk = keys_per_split > 0 ? random.index(keys_per_split + 1, 300) : random.index(1, random.chance(0.3) ? 300 : 90);
  p.hk = random.index(1, 3);
  p.hq = p.hk * random.index(1, 3);
  p.dqk = width();
  p.dv = random.chance(0.5) ? p.dqk : width();
  if (above_256 && random.chance(0.15)) {
    p.dqk = random.chance(0.5) ? 576 : random.index(1, 576);
    p.dv = random.chance(0.5) ? 512 : p.dqk <= 256 ? random.index(257, 512) : random.index(1, 512);
  }
  p.view = static_cast<ViewKind>(random.index(0, 3));
  if (random.chance(0.3)) p.scale = random.value();
  if (random.chance(0.2)) p.softcap = 0.5 + 10 * random.unit();
  p.sink = static_cast<Sink::Kind>(random.index(0, 2));
  p.slices = random_slices(random, p.tq, p.tk);
  p.fill(random);
  KernelProblem problem{"", std::move(p)};
  if (random.chance(0.2))
    for (Index h = 0; h < problem.p.hq; ++h) problem.head_map.push_back(random.index(0, problem.p.hk - 1));
  problem.keys_per_split = keys_per_split;
  return problem;
}

}  // namespace weft::test
