#include "calibrate/kernel_cases.h"

#include "weft/layout.h"
#include "weft/plan.h"

namespace weft::tool {
namespace {

// Figures of other libraries are told on these documents: 65,536 tokens.
const std::vector<Index> kPacked = {1456, 1952, 704,  4320, 2624,  1280, 4560, 1008, 16384,
                                    4176, 2432, 2288, 2704, 12384, 2464, 3248, 1040, 512};

std::vector<Index> short_documents() {
  std::vector<Index> all(64, 512);
  all.insert(all.end(), 16, 1024);
  all.insert(all.end(), 8, 2048);
  return all;
}

KernelCase from_plan(std::string name, Plan plan, Index heads_q, Index heads_k) {
  return {.name = std::move(name),
          .slices = std::move(plan.slices),
          .q_rows = plan.q_rows,
          .k_rows = plan.k_rows,
          .heads_q = heads_q,
          .heads_k = heads_k};
}

}  // namespace

KernelCase documents_case(std::string name, const std::vector<Index>& lengths, Index heads_q, Index heads_k,
                          bool causal, Index window) {
  const Problem problem(Stream::from_lengths(lengths), {.causal = causal, .left = window > 0 ? window : -1});
  const RunList all = RunList::sequence_order(problem.packing().q().tokens());
  return from_plan(std::move(name), make_plan(problem, all, all), heads_q, heads_k);
}

KernelCase rank_case(std::string name, const std::vector<Index>& lengths, Index heads_q, Index heads_k, Index rank,
                     Index ranks) {
  const Problem problem(Stream::from_lengths(lengths), {.causal = true});
  const Layout layout = Layout::dual_chunk(problem.packing().q(), ranks);
  return from_plan(std::move(name), make_plan(problem, layout.runs(rank), layout.sequence_order()), heads_q, heads_k);
}

// Keys in rank order: many small slices.
KernelCase pieces_case(std::string name, const std::vector<Index>& lengths, Index heads_q, Index heads_k,
                       LayoutKind kind, Index rank, Index ranks) {
  const Problem problem(Stream::from_lengths(lengths), {.causal = true});
  const Layouts layouts = make_layouts(kind, problem, ranks);
  return from_plan(std::move(name), make_plan(problem, layouts.q.runs(rank), layouts.k.rank_order()), heads_q, heads_k);
}

// The same keys, by the calls of a ring.
KernelCase ring_case(std::string name, const std::vector<Index>& lengths, Index heads_q, Index heads_k, Index rank,
                     Index ranks) {
  KernelCase c = pieces_case(std::move(name), lengths, heads_q, heads_k, LayoutKind::dual_chunk, rank, ranks);
  const Problem problem(Stream::from_lengths(lengths), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::dual_chunk, problem, ranks);
  c.steps.emplace(make_schedule(problem, layouts, rank, {heads_q, heads_k}, {.kind = ScheduleKind::ring}));
  return c;
}

std::vector<KernelCase> learned_cases(bool gpu) {
  const auto docs = [](std::size_t count, Index length) { return std::vector<Index>(count, length); };
  const auto joined = [](std::vector<Index> a, const std::vector<Index>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  if (gpu)
    return {documents_case("causal 1 x 8192", {8192}, 32, 8, true, 0),
            documents_case("causal 1 x 24576", {24576}, 32, 8, true, 0),
            documents_case("causal 8 x 3072", docs(8, 3072), 32, 8, true, 0),
            documents_case("causal 48 x 640", docs(48, 640), 32, 8, true, 0),
            documents_case("causal 200 x 160", docs(200, 160), 32, 8, true, 0),
            documents_case("causal 1 x 2048", {2048}, 32, 8, true, 0),
            documents_case("causal, 9 mixed, heads 16:2", {5000, 800, 9000, 300, 2200, 1100, 450, 7000, 150}, 16, 2,
                           true, 0),
            documents_case("causal 2 x 6000, heads 16", docs(2, 6000), 16, 16, true, 0),
            documents_case("full 1 x 8192, heads 16", {8192}, 16, 16, false, 0),
            documents_case("full 12 x 1000, heads 16", docs(12, 1000), 16, 16, false, 0),
            documents_case("window 1024, 1 x 16384", {16384}, 32, 8, true, 1024),
            rank_case("rank 1 of 4, 12 x 4096", docs(12, 4096), 32, 8, 1, 4),
            rank_case("rank 6 of 8, 40 x 768, 8 x 3072", joined(docs(40, 768), docs(8, 3072)), 32, 8, 6, 8),
            rank_case("rank 2 of 16, 1 x 65536", {65536}, 32, 8, 2, 16),
            pieces_case("zigzag, rank 5 of 8", {9000, 3000, 20000, 768}, 32, 8, LayoutKind::zigzag, 5, 8)};
  return {documents_case("causal 1 x 768", {768}, 4, 2, true, 0),
          documents_case("causal 24 x 32", docs(24, 32), 4, 2, true, 0),
          documents_case("causal 100 x 9", docs(100, 9), 4, 2, true, 0),
          documents_case("causal 8 x 96, heads 4", docs(8, 96), 4, 4, true, 0),
          documents_case("full 1 x 256, heads 4:1", {256}, 4, 1, false, 0),
          documents_case("window 48, 1 x 768", {768}, 4, 2, true, 48),
          documents_case("full 1 x 48, heads 2:1", {48}, 2, 1, false, 0),
          documents_case("full 1 x 8, 1 head", {8}, 1, 1, false, 0),
          rank_case("rank 1 of 4, 4 x 256", docs(4, 256), 4, 2, 1, 4),
          pieces_case("striped, rank 3 of 8", {700, 61, 40, 300, 250, 185}, 4, 2, LayoutKind::striped, 3, 8),
          pieces_case("balanced, rank 2 of 4", {90, 400, 30, 248}, 2, 2, LayoutKind::balanced, 2, 4),
          pieces_case("zigzag, rank 5 of 8", {500, 200, 300, 24}, 4, 4, LayoutKind::zigzag, 5, 8)};
}

std::vector<KernelCase> ring_cases() {
  return {ring_case("rank 3 of 8 of packed", kPacked, 32, 8, 3, 8),
          ring_case("rank 3 of 8 of short documents", short_documents(), 32, 8, 3, 8),
          ring_case("rank 3 of 8 of 1 x 131072", {131072}, 32, 8, 3, 8)};
}

std::vector<KernelCase> anchor_cases() {
  std::vector<KernelCase> all = {
      documents_case("causal 1 x 16384", {16384}, 32, 8, true, 0),
      documents_case("packed: 18 documents, 65,536 tokens", kPacked, 32, 8, true, 0),
      documents_case("window (4096, 0): 1 x 32768", {32768}, 32, 8, true, 4096),
      documents_case("causal 1 x 16384, heads 16", {16384}, 16, 16, true, 0),
      documents_case("full 1 x 16384, heads 16", {16384}, 16, 16, false, 0),
      rank_case("rank 3 of 8 of packed", kPacked, 32, 8, 3, 8),
      rank_case("rank 3 of 8 of short documents", short_documents(), 32, 8, 3, 8),
      rank_case("rank 1 of 2 of packed", kPacked, 32, 8, 1, 2),
      rank_case("rank 1 of 4 of packed", kPacked, 32, 8, 1, 4),
      rank_case("rank 3 of 8 of 1 x 131072", {131072}, 32, 8, 3, 8),
      documents_case("causal 16 x 4096, heads 16", std::vector<Index>(16, 4096), 16, 16, true, 0)};
  for (KernelCase& c : all) c.dim = 128;
  all.back().dim = 64;
  return all;
}

}  // namespace weft::tool
