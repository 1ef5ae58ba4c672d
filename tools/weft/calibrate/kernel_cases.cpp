#include "calibrate/kernel_cases.h"

#include "weft/plan.h"

namespace weft::tool {
namespace {

// Figures of other libraries are published for these documents: 65,536 tokens.
const std::vector<Index> kPacked = {1456, 1952, 704,  4320, 2624,  1280, 4560, 1008, 16384,
                                    4176, 2432, 2288, 2704, 12384, 2464, 3248, 1040, 512};

std::vector<Index> repeated(std::initializer_list<std::pair<std::size_t, Index>> counts) {
  std::vector<Index> lengths;
  for (const auto& [count, length] : counts) lengths.insert(lengths.end(), count, length);
  return lengths;
}

CaseSpec of_rank(Index rank, Index ranks, std::vector<Index> lengths, Index heads_q = 32, Index heads_k = 8) {
  return {.lengths = std::move(lengths),
          .heads_q = heads_q,
          .heads_k = heads_k,
          .layout = LayoutKind::dual_chunk,
          .rank = rank,
          .ranks = ranks};
}

CaseSpec by_steps(CaseSpec spec, const ScheduleOptions& schedule) {
  spec.schedule = schedule;
  return spec;
}

CaseSpec of_tree(check::TreeShape tree) { return {.lengths = {tree.rows()}, .tree = std::move(tree)}; }

CaseSpec in_window(CaseSpec spec, Index left) {
  spec.window = left;
  return spec;
}

std::vector<KernelCase> learned_on_gpu() {
  return {make_case("causal 1 x 8192", {.lengths = {8192}}),
          make_case("causal 1 x 24576", {.lengths = {24576}}),
          make_case("causal 8 x 3072", {.lengths = repeated({{8, 3072}})}),
          make_case("causal 48 x 640", {.lengths = repeated({{48, 640}})}),
          make_case("causal 200 x 160", {.lengths = repeated({{200, 160}})}),
          make_case("causal 1 x 2048", {.lengths = {2048}}),
          make_case("causal, 9 mixed, heads 16:2",
                    {.lengths = {5000, 800, 9000, 300, 2200, 1100, 450, 7000, 150}, .heads_q = 16, .heads_k = 2}),
          make_case("causal 2 x 6000, heads 16", {.lengths = {6000, 6000}, .heads_q = 16, .heads_k = 16}),
          make_case("full 1 x 8192, heads 16", {.lengths = {8192}, .heads_q = 16, .heads_k = 16, .causal = false}),
          make_case("full 12 x 1000, heads 16",
                    {.lengths = repeated({{12, 1000}}), .heads_q = 16, .heads_k = 16, .causal = false}),
          make_case("window 1024, 1 x 16384", in_window({.lengths = {16384}}, 1024)),
          make_case("rank 1 of 4, 12 x 4096", of_rank(1, 4, repeated({{12, 4096}}))),
          make_case("rank 6 of 8, 40 x 768, 8 x 3072", of_rank(6, 8, repeated({{40, 768}, {8, 3072}}))),
          make_case("rank 2 of 16, 1 x 65536", of_rank(2, 16, {65536})),
          make_case("zigzag, rank 5 of 8", {.lengths = {9000, 3000, 20000, 768},
                                            .layout = LayoutKind::zigzag,
                                            .rank = 5,
                                            .ranks = 8,
                                            .rank_order = true})};
}

std::vector<KernelCase> learned_on_cpu() {
  const auto docs = [](std::vector<Index> lengths, Index heads_q = 4, Index heads_k = 2) {
    return CaseSpec{.lengths = std::move(lengths), .heads_q = heads_q, .heads_k = heads_k};
  };
  const auto full = [&](Index length, Index heads_q, Index heads_k) {
    return CaseSpec{.lengths = {length}, .heads_q = heads_q, .heads_k = heads_k, .causal = false};
  };
  const auto in_rank_order = [](CaseSpec spec, LayoutKind layout, Index rank, Index ranks) {
    spec.layout = layout;
    spec.rank = rank;
    spec.ranks = ranks;
    spec.rank_order = true;
    return spec;
  };
  return {
      make_case("causal 1 x 768", docs({768})),
      make_case("causal 24 x 32", docs(repeated({{24, 32}}))),
      make_case("causal 100 x 9", docs(repeated({{100, 9}}))),
      make_case("causal 8 x 96, heads 4", docs(repeated({{8, 96}}), 4, 4)),
      make_case("full 1 x 256, heads 4:1", full(256, 4, 1)),
      make_case("window 48, 1 x 768", in_window(docs({768}), 48)),
      make_case("full 1 x 48, heads 2:1", full(48, 2, 1)),
      make_case("full 1 x 8, 1 head", full(8, 1, 1)),
      make_case("rank 1 of 4, 4 x 256", of_rank(1, 4, repeated({{4, 256}}), 4, 2)),
      make_case("striped, rank 3 of 8", in_rank_order(docs({700, 61, 40, 300, 250, 185}), LayoutKind::striped, 3, 8)),
      make_case("balanced, rank 2 of 4", in_rank_order(docs({90, 400, 30, 248}, 2, 2), LayoutKind::balanced, 2, 4)),
      make_case("zigzag, rank 5 of 8", in_rank_order(docs({500, 200, 300, 24}, 4, 4), LayoutKind::zigzag, 5, 8))};
}

}  // namespace

Mask mask_of(const CaseSpec& spec) {
  if (spec.tree) return {.slices = check::tree_slices(*spec.tree)};
  return {.causal = spec.causal, .left = spec.window};
}

KernelCase make_case(std::string name, const CaseSpec& spec) {
  const Problem problem(Stream::from_lengths(spec.lengths), mask_of(spec));
  const Layouts layouts = make_layouts(spec.layout, problem, spec.ranks);
  const bool rank_order = spec.rank_order || spec.schedule.has_value();
  Plan plan =
      make_plan(problem, layouts.q.runs(spec.rank), rank_order ? layouts.k.rank_order() : layouts.k.sequence_order());
  KernelCase c{.name = std::move(name),
               .slices = std::move(plan.slices),
               .q_rows = plan.q_rows,
               .k_rows = plan.k_rows,
               .heads_q = spec.heads_q,
               .heads_k = spec.heads_k,
               .spec = spec};
  if (spec.schedule)
    c.steps.emplace(make_schedule(problem, layouts, spec.rank, {spec.heads_q, spec.heads_k}, *spec.schedule));
  return c;
}

std::vector<KernelCase> learned_cases(bool gpu) { return gpu ? learned_on_gpu() : learned_on_cpu(); }

const std::vector<GpuCase>& gpu_cases() {
  const std::vector<Index> short_documents = repeated({{64, 512}, {16, 1024}, {8, 2048}});
  const CaseSpec mha{.lengths = {16384}, .heads_q = 16, .heads_k = 16};
  const ScheduleOptions ring{.kind = ScheduleKind::ring}, ring_1{.kind = ScheduleKind::ring, .ranks_per_step = 1},
      exact_2{.kind = ScheduleKind::exact, .stages = 2};
  CaseSpec mha_full = mha;
  mha_full.causal = false;
  static const std::vector<GpuCase> cases = {
      {"dense", "causal 1 x 16384", {.lengths = {16384}}},
      {"packed", "packed: 18 documents, 65,536 tokens", {.lengths = kPacked}},
      {"window", "window (4096, 0): 1 x 32768", in_window({.lengths = {32768}}, 4096)},
      {"mha-causal", "causal 1 x 16384, heads 16", mha},
      {"mha-full", "full 1 x 16384, heads 16", mha_full},
      {"rank-of-8", "rank 3 of 8 of packed", of_rank(3, 8, kPacked)},
      {"short-rank-of-8", "rank 3 of 8 of short documents", of_rank(3, 8, short_documents)},
      {"rank-of-2", "rank 1 of 2 of packed", of_rank(1, 2, kPacked)},
      {"rank-of-4", "rank 1 of 4 of packed", of_rank(1, 4, kPacked)},
      {"long-rank-of-8", "rank 3 of 8 of 1 x 131072", of_rank(3, 8, {131072})},
      {"width-64", "causal 16 x 4096, heads 16", {.lengths = repeated({{16, 4096}}), .heads_q = 16, .heads_k = 16}, 64},
      {"width-128", "", {.lengths = {8192}, .heads_q = 16, .heads_k = 4}},
      {"width-192", "", {.lengths = {8192}, .heads_q = 16, .heads_k = 16}, 192, 128},
      {"width-256", "", {.lengths = {8192}, .heads_q = 16, .heads_k = 4}, 256},
      {"documents-of-32", "", {.lengths = repeated({{2048, 32}})}},
      // Multi-head latent attention: keys and values of all heads.
      {"mla-packed", "", {.lengths = kPacked, .heads_q = 128, .heads_k = 128}, 192, 128},
      // Queries of latent attention that have absorbed the projection of K: all heads on one K/V head.
      {"mla-absorbed", "", {.lengths = kPacked, .heads_q = 16, .heads_k = 1}, 576, 512, 0, true},
      {"mla-absorbed-128", "", {.lengths = {4096, 2048, 1024, 1024}, .heads_q = 128, .heads_k = 1}, 576, 512, 0, true},
      {"ring-rank-of-8", "", by_steps(of_rank(3, 8, kPacked), ring)},
      {"ring-1-rank-of-8", "", by_steps(of_rank(3, 8, kPacked), ring_1)},
      {"exact-rank-of-8", "", by_steps(of_rank(3, 8, kPacked), exact_2)},
      {"short-ring-of-8", "", by_steps(of_rank(3, 8, short_documents), ring)},
      {"long-ring-of-8", "", by_steps(of_rank(3, 8, {131072}), ring)},
      // Fewer tiles than multiprocessors.
      {"few-heads", "", {.lengths = {65536}, .heads_q = 4, .heads_k = 1}},
      {"few-heads-of-8", "", of_rank(3, 8, {16384}, 8, 1)},
      {"few-heads-of-64", "", of_rank(3, 64, {131072}, 4, 1)},
      {"few-heads-window", "", in_window(of_rank(3, 64, {131072}, 4, 1), 4096)},
      {"few-heads-256", "", of_rank(3, 16, {32768}, 8, 4), 256, 0, 50},
      // Trees, and sequences that such a tree stands for, each with its own copy of what they share.
      {"answers-tree", "", of_tree(check::answers_tree(8192, 16, 1024))},
      {"answers-apart", "", {.lengths = repeated({{16, 9216}})}},
      {"answers-32-tree", "", of_tree(check::answers_tree(16384, 32, 2048))},
      {"answers-32-apart", "", {.lengths = repeated({{8, 18432}})}},
      {"nodes-256-tree", "", of_tree(check::even_tree(10, 2, 256))},
      {"nodes-256-apart", "", {.lengths = repeated({{64, 2560}})}},
      {"nodes-64-tree", "", of_tree(check::even_tree(10, 2, 64))},
      {"nodes-64-apart", "", {.lengths = repeated({{128, 640}})}},
      {"short-prompt-tree", "", of_tree(check::answers_tree(256, 128, 1024))},
      {"short-prompt-apart", "", {.lengths = repeated({{128, 1280}})}}};
  return cases;
}

std::vector<KernelCase> anchor_cases() {
  std::vector<KernelCase> anchors;
  for (const GpuCase& c : gpu_cases()) {
    if (c.anchor.empty()) continue;
    anchors.push_back(make_case(c.anchor, c.spec));
    anchors.back().dim = c.dim;
  }
  return anchors;
}

}  // namespace weft::tool
