// Valid rows, chunks, and the steps of all-gather and ring: each against the definition, row by row and pair by pair.
#include "weft/rows.h"

#include <algorithm>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "check/definition.h"
#include "index.h"
#include "refusal.h"
#include "rows/dual_chunk_case.h"

namespace weft {
namespace {

using test::dual_chunk_case;
using test::piece_of;
using test::ring_case;
using Indices = std::vector<Index>;

// --- What a step says, written out ---

using Pairs = std::map<std::pair<Index, Index>, int>;  // (query token, key token) -> how often

// The entries' pairs; `q` and `k` are the tokens of the two buffers' rows.
Pairs pairs_of(const VarlenStep& step, const Indices& q, const Indices& k) {
  Pairs pairs;
  for (std::size_t e = 0; e < at(step.entries()); ++e)
    for (Index a = 0; a < step.seqused_q[e]; ++a)
      for (Index b = 0; b < step.seqused_k[e]; ++b)
        if (step.lo[e] <= b - a && b - a <= step.hi[e])
          ++pairs[{q.at(at(step.cu_seqlens_q_padded[e] + a)), k.at(at(step.cu_seqlens_k_padded[e] + b))}];
  return pairs;
}

Pairs pairs_of(const std::vector<Slice>& slices, const Indices& q, const Indices& k) {
  Pairs pairs;
  for (const Slice& s : slices) {
    EXPECT_LT(s.q_begin, s.q_end);
    for (Index a = s.q_begin; a < s.q_end; ++a)
      for (Index b = s.k_begin; b < s.k_end; ++b)
        if (sees(s, a, b)) ++pairs[{q.at(at(a)), k.at(at(b))}];
  }
  return pairs;
}

Pairs visible_pairs_of(const check::Definition& definition, const std::set<Index>& q, const std::set<Index>& k) {
  Pairs pairs;
  for (const Index a : q)
    for (const Index b : k)
      if (definition.visible(a, b)) pairs[{a, b}] = 1;
  return pairs;
}

std::set<Index> all_tokens(Index n) {
  std::set<Index> out;
  for (Index t = 0; t < n; ++t) out.insert(t);
  return out;
}

std::set<Index> held(const Indices& rows) {
  std::set<Index> out(rows.begin(), rows.end());
  out.erase(kNoToken);
  return out;
}

Indices iota(Index n) {
  Indices out;
  for (Index t = 0; t < n; ++t) out.push_back(t);
  return out;
}

std::set<Index> both(std::set<Index> a, const std::set<Index>& b) {
  a.insert(b.begin(), b.end());
  return a;
}

// What every step keeps: consistent arrays, valid query rows in one entry each, no other rows.
void expect_sound(const VarlenStep& step, const check::Definition& definition, const Indices& q, const Indices& k,
                  const std::set<Index>& wanted_queries, const Stream& stream) {
  const std::size_t n = at(step.entries());
  for (const Indices* v :
       {&step.cu_seqlens_q, &step.cu_seqlens_k, &step.cu_seqlens_q_padded, &step.cu_seqlens_k_padded})
    ASSERT_EQ(v->size(), n + 1);
  for (const Indices* v : {&step.seqused_q, &step.seqused_k, &step.lo, &step.hi}) ASSERT_EQ(v->size(), n);
  EXPECT_EQ(step.cu_seqlens_q[0], 0);
  EXPECT_EQ(step.cu_seqlens_k[0], 0);
  Index max_q = 0, max_k = 0;
  std::map<Index, int> met;
  std::set<Index> sequences;
  for (std::size_t e = 0; e < n; ++e) {
    EXPECT_EQ(step.cu_seqlens_q[e + 1] - step.cu_seqlens_q[e], step.seqused_q[e]);
    EXPECT_EQ(step.cu_seqlens_k[e + 1] - step.cu_seqlens_k[e], step.seqused_k[e]);
    EXPECT_GE(step.seqused_q[e], 0);
    EXPECT_GE(step.seqused_k[e], 0);
    // Entries follow one another in both buffers.
    EXPECT_LE(step.cu_seqlens_q_padded[e] + step.seqused_q[e], step.cu_seqlens_q_padded[e + 1]);
    EXPECT_LE(step.cu_seqlens_k_padded[e] + step.seqused_k[e], step.cu_seqlens_k_padded[e + 1]);
    if (step.seqused_q[e] == 0) {
      EXPECT_EQ(step.seqused_k[e], 0);
    }
    max_q = std::max(max_q, step.seqused_q[e]);
    max_k = std::max(max_k, step.seqused_k[e]);
    sequences.insert(step.sequence[e]);
    for (Index a = 0; a < step.seqused_q[e]; ++a) {
      const Index token = q.at(at(step.cu_seqlens_q_padded[e] + a));
      EXPECT_EQ(definition.q(token).sequence, step.sequence[e]);  // -1 for padding
      ++met[token];
    }
    for (Index b = 0; b < step.seqused_k[e]; ++b)
      EXPECT_EQ(definition.k(k.at(at(step.cu_seqlens_k_padded[e] + b))).sequence, step.sequence[e]);
  }
  EXPECT_EQ(step.max_seqlen_q, max_q);
  EXPECT_EQ(step.max_seqlen_k, max_k);
  EXPECT_EQ(static_cast<Index>(sequences.size()), stream.sequences());
  std::map<Index, int> wanted;
  for (const Index t : wanted_queries)
    if (definition.q(t).real()) wanted[t] = 1;
  EXPECT_EQ(met, wanted);
}

// One entry a sequence; with chunks, rows share an entry iff they are of one sequence and look at one chunk (all chunks
// without keys on one side count as one).
void expect_grouped(const VarlenStep& step, const check::Case& c, const check::Definition& definition,
                    const Packing& packing, const Indices& q) {
  std::map<std::pair<Index, Index>, std::set<std::size_t>> entries_of;
  std::map<std::size_t, std::set<Index>> chunks_of;
  for (std::size_t e = 0; e < at(step.entries()); ++e) {
    for (Index a = 0; a < step.seqused_q[e]; ++a) {
      const check::Place place = definition.q(q.at(at(step.cu_seqlens_q_padded[e] + a)));
      const Index len_q = packing.q().used(place.sequence), len_k = packing.k().used(place.sequence);
      Index group = 0;
      if (c.mask.chunk) {
        const Index at_key = place.position + (c.mask.align == Align::bottom_right ? len_k - len_q : 0);
        group = std::clamp<Index>(floor_div(at_key, *c.mask.chunk), -1, ceil_div(len_k, *c.mask.chunk));
      }
      entries_of[{place.sequence, group}].insert(e);
      chunks_of[e].insert(group);
    }
  }
  for (const auto& [key, entries] : entries_of) EXPECT_EQ(entries.size(), 1u);
  for (const auto& [entry, chunks] : chunks_of) EXPECT_EQ(chunks.size(), 1u);
  if (!c.mask.chunk) {
    EXPECT_EQ(step.sequence, iota(packing.sequences()));
  }
}

// What the steps of all ranks show, and how often an entry goes on in the next.
struct Shown {
  // The step's arrays and its slices have the visible pairs of `from`, whose entries hold `queries`.
  void add(const VarlenStep& step, const check::Case& c, const Problem& problem, const Indices& q, const Indices& k,
           const std::set<Index>& queries, const std::set<Index>& from) {
    const check::Definition definition(c);
    expect_sound(step, definition, q, k, queries, problem.packing().q());
    expect_grouped(step, c, definition, problem.packing(), q);
    const Pairs pairs = pairs_of(step, q, k);
    EXPECT_EQ(pairs, visible_pairs_of(definition, from, held(k)));
    EXPECT_EQ(pairs_of(slices(step), q, k), pairs);
    for (const auto& [pair, times] : pairs) all[pair] += times;
    for (std::size_t e = 1; e < at(step.entries()); ++e) straddling += step.sequence[e] == step.sequence[e - 1];
  }
  Pairs all;
  Index straddling = 0;
};

// --- All-gather ---

TEST(AllGatherStep, Example) {
  // Two sequences of 7 and 4 real tokens, padded to 8 and 4, on two ranks: pieces of 2 and 1.
  const Indices padded{1, 9, 13}, used{7, 4};
  const Problem problem(Stream::from_used(padded, used), {.causal = true});
  const Layout layout = Layout::dual_chunk(problem.packing().q(), 2);
  ASSERT_EQ(layout.tokens(0), (Indices{1, 2, 7, 8, 9, 12}));  // token 8 is padding
  const VarlenStep second = all_gather_step(problem, layout, 0, 1);
  EXPECT_EQ(second.cu_seqlens_q, (Indices{0, 1, 2}));
  EXPECT_EQ(second.cu_seqlens_q_padded, (Indices{2, 5, 6}));
  EXPECT_EQ(second.seqused_q, (Indices{1, 1}));
  EXPECT_EQ(second.cu_seqlens_k, (Indices{0, 7, 11}));
  EXPECT_EQ(second.cu_seqlens_k_padded, (Indices{1, 9, 13}));
  EXPECT_EQ(second.seqused_k, (Indices{7, 4}));
  EXPECT_EQ(second.hi, (Indices{6, 3}));
  EXPECT_EQ(second.max_seqlen_q, 1);
  EXPECT_EQ(second.max_seqlen_k, 7);
  EXPECT_EQ(slices(second), (std::vector<Slice>{{2, 3, 1, 8, -kUnlimited, 5}, {5, 6, 9, 13, -kUnlimited, 7}}));
  // The first step's keys end at its last query.
  EXPECT_EQ(all_gather_step(problem, layout, 0, 0).seqused_k, (Indices{2, 1}));
}

TEST(AllGatherStep, CoversEachVisiblePairOnce) {
  Index visible = 0, straddling = 0, keyless = 0;
  for (unsigned long long seed = 0; seed < 3000; ++seed) {
    const check::Case c = dual_chunk_case(seed);
    SCOPED_TRACE(flags(c));
    const Problem problem = problem_of(c);
    const Stream& stream = problem.packing().q();
    const Layout layout = Layout::dual_chunk(stream, c.ranks);
    const Indices k = iota(problem.packing().k().tokens());
    Shown shown;
    for (Index rank = 0; rank < c.ranks; ++rank) {
      const Indices q = layout.tokens(rank);
      for (Index s = 0; s < 2; ++s) {
        const VarlenStep step = all_gather_step(problem, layout, rank, s);
        const std::set<Index> queries = piece_of(stream, c.ranks, s == 0 ? rank : 2 * c.ranks - 1 - rank);
        shown.add(step, c, problem, q, k, queries, queries);
        for (std::size_t e = 0; e < at(step.entries()); ++e) keyless += step.seqused_q[e] > 0 && step.seqused_k[e] == 0;
        EXPECT_EQ(step.cu_seqlens_q_padded.back(), layout.rows());
        EXPECT_EQ(step.cu_seqlens_k_padded.back(), problem.packing().k().extent().end);
      }
    }
    EXPECT_EQ(shown.all, visible_pairs_of(check::Definition(c), all_tokens(stream.tokens()), held(k)));
    visible += static_cast<Index>(shown.all.size());
    straddling += shown.straddling;
    if (HasFailure()) return;
  }
  EXPECT_GT(visible, 100000);
  EXPECT_GT(straddling, 1000);
  EXPECT_GT(keyless, 100);
}

// The arrays themselves, counted per sequence: without chunks entry i is sequence i.
TEST(AllGatherStep, ArraysByCounting) {
  for (unsigned long long seed = 0; seed < 1500; ++seed) {
    check::Case c = dual_chunk_case(seed);
    c.mask.chunk.reset();
    SCOPED_TRACE(flags(c));
    const check::Definition definition(c);
    const Problem problem = problem_of(c);
    const Stream &qs = problem.packing().q(), &ks = problem.packing().k();
    const Layout layout = Layout::dual_chunk(qs, c.ranks);
    for (Index rank = 0; rank < c.ranks; ++rank) {
      const Indices tokens = layout.tokens(rank);
      for (Index s = 0; s < 2; ++s) {
        const VarlenStep step = all_gather_step(problem, layout, rank, s);
        for (Index i = 0; i < qs.sequences(); ++i) {
          const Index piece = qs.padded(i) / (2 * c.ranks), which = s == 0 ? rank : 2 * c.ranks - 1 - rank;
          const Index diag = c.mask.align == Align::bottom_right ? ks.used(i) - qs.used(i) : 0;
          const Index right = c.mask.causal ? 0 : c.mask.right;
          Index queries = 0, row = -1, last = 0;
          for (Index r = layout.rows() - 1; r >= 0; --r) {
            const Index position = tokens[at(r)] - qs.offset(i);
            if (position < which * piece || position >= (which + 1) * piece) continue;
            row = r;
            if (!definition.q(tokens[at(r)]).real()) continue;
            last = std::max(last, position);
            ++queries;
          }
          Index keys = 0;
          for (Index j = 0; j < ks.used(i); ++j) keys += queries > 0 && (right < 0 || j - last - diag <= right);
          EXPECT_EQ(step.seqused_q[at(i)], queries);
          EXPECT_EQ(step.seqused_k[at(i)], keys);
          EXPECT_EQ(step.cu_seqlens_k_padded[at(i)], ks.offset(i));
          if (row >= 0) {
            EXPECT_EQ(step.cu_seqlens_q_padded[at(i)], row);
          }
        }
      }
    }
    if (HasFailure()) return;
  }
}

// A kernel that knows causal (and a left window) from the bottom right corner alone can be given these steps.
TEST(AllGatherStep, CausalSelfAttentionIsBottomRight) {
  for (unsigned long long seed = 0; seed < 1000; ++seed) {
    check::Case c = ring_case(seed);
    c.mask.left = seed % 2 ? 3 : -1;
    const Problem problem = problem_of(c);
    const Layout layout = Layout::dual_chunk(problem.packing().q(), c.ranks);
    for (Index rank = 0; rank < c.ranks; ++rank)
      for (Index s = 0; s < 2; ++s) {
        const VarlenStep step = all_gather_step(problem, layout, rank, s);
        for (std::size_t e = 0; e < at(step.entries()); ++e) {
          if (step.seqused_q[e] == 0) continue;
          EXPECT_EQ(step.hi[e], step.seqused_k[e] - step.seqused_q[e]) << flags(c);
          EXPECT_EQ(step.lo[e], seed % 2 ? step.hi[e] - 3 : -kUnlimited);
        }
      }
  }
}

// --- Ring ---

TEST(RingTile, Kinds) {
  EXPECT_EQ(ring_tile(4, 2, 0).kind, RingTile::diagonal);
  EXPECT_EQ(ring_tile(4, 2, 1).kind, RingTile::below);
  EXPECT_EQ(ring_tile(4, 2, 1).keys_rank, 1);
  EXPECT_EQ(ring_tile(4, 2, 3).kind, RingTile::above);
  EXPECT_EQ(ring_tile(4, 2, 3).keys_rank, 3);
}

TEST(RingStep, Example) {
  const Problem problem(Stream::from_lengths(Indices{8, 4}), {.causal = true});
  const Layout layout = Layout::dual_chunk(problem.packing().q(), 2);  // 4 rows of the first, 2 of the second
  const VarlenStep diagonal = ring_step(problem, layout, 1, 0);
  EXPECT_EQ(diagonal.seqused_q, (Indices{4, 2}));
  EXPECT_EQ(diagonal.seqused_k, (Indices{4, 2}));
  EXPECT_EQ(diagonal.hi, (Indices{0, 0}));
  const VarlenStep below = ring_step(problem, layout, 1, 1);
  EXPECT_EQ(below.cu_seqlens_q, (Indices{0, 4, 6}));
  EXPECT_EQ(below.cu_seqlens_q_padded, (Indices{0, 4, 6}));
  EXPECT_EQ(below.cu_seqlens_k, (Indices{0, 2, 3}));
  EXPECT_EQ(below.cu_seqlens_k_padded, (Indices{0, 4, 6}));
  EXPECT_EQ(below.hi, (Indices{kUnlimited, kUnlimited}));
  const VarlenStep above = ring_step(problem, layout, 0, 1);
  EXPECT_EQ(above.cu_seqlens_q, (Indices{0, 2, 3}));
  EXPECT_EQ(above.cu_seqlens_q_padded, (Indices{2, 5, 6}));
  EXPECT_EQ(above.cu_seqlens_k, (Indices{0, 4, 6}));
  EXPECT_EQ(above.cu_seqlens_k_padded, (Indices{0, 4, 6}));
}

TEST(RingStep, CoversEachVisiblePairOnce) {
  Index visible = 0, straddling = 0;
  for (unsigned long long seed = 0; seed < 3000; ++seed) {
    const check::Case c = ring_case(seed);
    SCOPED_TRACE(flags(c));
    const Problem problem = problem_of(c);
    const Stream& stream = problem.packing().q();
    const Layout layout = Layout::dual_chunk(stream, c.ranks);
    Shown shown;
    for (Index rank = 0; rank < c.ranks; ++rank) {
      const Indices q = layout.tokens(rank);
      const std::set<Index> first = piece_of(stream, c.ranks, rank);
      const std::set<Index> second = piece_of(stream, c.ranks, 2 * c.ranks - 1 - rank);
      for (Index s = 0; s < c.ranks; ++s) {
        const Index from = (rank - s + c.ranks) % c.ranks;
        const RingTile tile = ring_tile(c.ranks, rank, s);
        EXPECT_EQ(tile.keys_rank, from);
        const Indices k = layout.tokens(from);
        const VarlenStep step = ring_step(problem, layout, rank, s);
        shown.add(step, c, problem, q, k, tile.kind == RingTile::above ? second : both(first, second), held(q));
        for (std::size_t e = 0; e < at(step.entries()) && tile.kind != RingTile::diagonal; ++e)
          EXPECT_TRUE(is_unlimited(step.lo[e]) && is_unlimited(step.hi[e]));
      }
    }
    const std::set<Index> tokens = all_tokens(stream.tokens());
    EXPECT_EQ(shown.all, visible_pairs_of(check::Definition(c), tokens, tokens));
    visible += static_cast<Index>(shown.all.size());
    straddling += shown.straddling;
    if (HasFailure()) return;
  }
  EXPECT_GT(visible, 100000);
  EXPECT_GT(straddling, 1000);
}

// Offsets and lengths of unchunked tiles, counted from the tokens.
TEST(RingStep, ArraysByCounting) {
  for (unsigned long long seed = 0; seed < 1000; ++seed) {
    check::Case c = ring_case(seed);
    c.mask.chunk.reset();
    SCOPED_TRACE(flags(c));
    const Problem problem = problem_of(c);
    const Stream& stream = problem.packing().q();
    const Layout layout = Layout::dual_chunk(stream, c.ranks);
    const auto count = [&](Index rank, Index sequence, const std::set<Index>& from) {
      Index valid = 0, row = -1;
      const Indices tokens = layout.tokens(rank);
      for (Index r = layout.rows() - 1; r >= 0; --r) {
        const Index position = tokens[at(r)] - stream.offset(sequence);
        if (position < 0 || position >= stream.padded(sequence) || !from.contains(tokens[at(r)])) continue;
        row = r;
        valid += position < stream.used(sequence);
      }
      return std::pair(row, valid);
    };
    for (Index rank = 0; rank < c.ranks; ++rank)
      for (Index s = 0; s < c.ranks; ++s) {
        const VarlenStep step = ring_step(problem, layout, rank, s);
        const Index from = (rank - s + c.ranks) % c.ranks;
        std::set<Index> q = held(layout.tokens(rank)), k = held(layout.tokens(from));
        if (from > rank) q = piece_of(stream, c.ranks, 2 * c.ranks - 1 - rank);
        if (from < rank) k = piece_of(stream, c.ranks, from);
        for (Index i = 0; i < stream.sequences(); ++i) {
          const auto [q_row, q_valid] = count(rank, i, q);
          const auto [k_row, k_valid] = count(from, i, k);
          EXPECT_EQ(step.seqused_q[at(i)], q_valid);
          EXPECT_EQ(step.seqused_k[at(i)], q_valid == 0 ? 0 : k_valid);
          if (q_row >= 0) {
            EXPECT_EQ(step.cu_seqlens_q_padded[at(i)], q_row);
          }
          if (k_row >= 0) {
            EXPECT_EQ(step.cu_seqlens_k_padded[at(i)], k_row);
          }
        }
      }
    if (HasFailure()) return;
  }
}

// --- Valid rows, chunks ---

TEST(ValidRows, OfStreamsAndRanks) {
  for (unsigned long long seed = 0; seed < 600; ++seed) {
    check::RandomChoices choices(seed);
    const check::Case c = random_case(choices);
    const check::Definition definition(c);
    const Layout layout = layouts_of(c, problem_of(c)).q;
    const std::vector<std::uint8_t> stream = valid_rows(layout.stream());
    ASSERT_EQ(stream.size(), at(definition.q_tokens()));
    for (Index t = 0; t < definition.q_tokens(); ++t) EXPECT_EQ(stream[at(t)], definition.q(t).real()) << flags(c);
    for (Index rank = 0; rank < c.ranks; ++rank) {
      const std::vector<std::uint8_t> valid = valid_rows(layout, rank);
      const Indices tokens = layout.tokens(rank);
      ASSERT_EQ(valid.size(), tokens.size());
      for (std::size_t r = 0; r < valid.size(); ++r)
        EXPECT_EQ(valid[r], tokens[r] != kNoToken && definition.q(tokens[r]).real()) << flags(c);
    }
  }
}

TEST(Chunks, Example) {
  const Indices padded{2, 10, 10, 14}, used{7, 0, 2};
  const Chunks chunks = sequences_to_chunks(Stream::from_used(padded, used, 20), 3);
  EXPECT_EQ(chunks.cu_seqlens, (Indices{0, 3, 6, 7, 7, 9}));
  EXPECT_EQ(chunks.cu_seqlens_padded, (Indices{2, 5, 8, 10, 10, 14}));
  EXPECT_EQ(chunks.sequence, (Indices{0, 0, 0, 1, 2}));
}

// Full attention over the chunks is chunked attention over the sequences.
TEST(Chunks, ByDefinition) {
  for (unsigned long long seed = 0; seed < 1000; ++seed) {
    check::Case c = ring_case(seed);
    c.mask = {.chunk = 1 + static_cast<Index>(seed % 15)};
    SCOPED_TRACE(flags(c));
    const check::Definition definition(c);
    const Stream stream = problem_of(c).packing().q();
    const Chunks chunks = sequences_to_chunks(stream, *c.mask.chunk);
    const Stream cut = Stream::from_cu_seqlens(
        {.cu_seqlens = chunks.cu_seqlens, .cu_seqlens_padded = chunks.cu_seqlens_padded, .tokens = stream.tokens()});
    EXPECT_EQ(valid_rows(cut), valid_rows(stream));
    EXPECT_EQ(cut.extent(), stream.extent());
    Pairs pairs;
    for (Index i = 0; i < cut.sequences(); ++i)
      for (Index a = 0; a < cut.used(i); ++a)
        for (Index b = 0; b < cut.used(i); ++b) {
          ++pairs[{cut.offset(i) + a, cut.offset(i) + b}];
          EXPECT_EQ(definition.q(cut.offset(i) + a).sequence, chunks.sequence[at(i)]);
        }
    const std::set<Index> tokens = all_tokens(stream.tokens());
    EXPECT_EQ(pairs, visible_pairs_of(definition, tokens, tokens));
    EXPECT_EQ(std::set<Index>(chunks.sequence.begin(), chunks.sequence.end()), all_tokens(stream.sequences()));
    if (HasFailure()) return;
  }
}

// --- Edges and refusals ---

TEST(Steps, NoSequences) {
  const Problem problem(Stream{}, {.causal = true});
  const Layout layout = Layout::dual_chunk(problem.packing().q(), 3);
  EXPECT_EQ(all_gather_step(problem, layout, 2, 1).cu_seqlens_q, (Indices{0}));
  EXPECT_EQ(ring_step(problem, layout, 2, 2).cu_seqlens_k_padded, (Indices{0}));
  EXPECT_TRUE(slices(ring_step(problem, layout, 0, 1)).empty());
  const Chunks none = sequences_to_chunks(Stream{}, 4);
  EXPECT_EQ(none.cu_seqlens_padded, (Indices{0}));
  EXPECT_TRUE(none.sequence.empty());
}

TEST(Steps, WindowsAndChunksLongerThanAnyStream) {
  const Stream stream = Stream::from_lengths(Indices{8});
  const Problem wide(stream, {.left = INT64_MAX, .right = INT64_MAX, .chunk = INT64_MAX}), full(stream, {});
  const Layout layout = Layout::dual_chunk(stream, 2);
  const Indices q = layout.tokens(1), k = iota(8);
  EXPECT_EQ(pairs_of(all_gather_step(wide, layout, 1, 1), q, k), pairs_of(all_gather_step(full, layout, 1, 1), q, k));
  EXPECT_EQ(sequences_to_chunks(stream, INT64_MAX).cu_seqlens, (Indices{0, 8}));
}

TEST(Steps, Refusals) {
  const Stream stream = Stream::from_lengths(Indices{8, 16});
  const Problem causal(stream, {.causal = true});
  const Layout layout = Layout::dual_chunk(stream, 2);
  expect_refusal([&] { (void)all_gather_step(causal, layout, 2, 0); }, {"rank 2 of 2", "0 to 1"});
  expect_refusal([&] { (void)all_gather_step(causal, layout, -1, 0); }, {"rank -1 of 2"});
  expect_refusal([&] { (void)all_gather_step(causal, layout, 0, 2); }, {"step 2", "piece 2*ranks-1-rank"});
  expect_refusal([&] { (void)all_gather_step(causal, Layout::zigzag(stream, 2), 0, 0); }, {"zigzag", "dual_chunk"});
  const Problem other(Stream::from_lengths(Indices{8}), {.causal = true});
  expect_refusal([&] { (void)all_gather_step(other, layout, 0, 0); },
                 {"2 sequences, 24 tokens", "1 sequences, 8 tokens"});
  const Problem own(stream, {.slices = std::vector<Slice>{{0, 8, 0, 8}}});
  expect_refusal([&] { (void)all_gather_step(own, layout, 0, 0); }, {"1 slices of its own", "make_plan"});
  expect_refusal([&] { (void)ring_step(own, layout, 0, 0); }, {"1 slices of its own", "make_plan"});

  expect_refusal([&] { (void)ring_step(causal, layout, 0, 2); }, {"step 2 of a ring of 2 ranks", "0 to 1"});
  expect_refusal([&] { (void)ring_step(causal, layout, 2, 0); }, {"rank 2 of 2"});
  expect_refusal([&] { (void)ring_step(Problem(stream, {}), layout, 0, 0); }, {"causal = false", "make_plan"});
  expect_refusal([&] { (void)ring_step(Problem(stream, {.causal = true, .left = 4}), layout, 0, 0); },
                 {"left = 4", "all_gather_step"});
  const Problem cross(Packing(stream, Stream::from_lengths(Indices{8, 8})), {.causal = true});
  expect_refusal([&] { (void)ring_step(cross, layout, 0, 0); }, {"self-attention", "16 tokens", "24"});
  expect_refusal([&] { (void)ring_tile(0, 0, 0); }, {"0 ranks"});
  expect_refusal([&] { (void)ring_tile(4, 1, -1); }, {"step -1", "0 to 3"});

  expect_refusal([&] { (void)sequences_to_chunks(stream, 0); }, {"chunk size 0", "1 or more"});
  expect_refusal([&] { (void)valid_rows(layout, 2); }, {"rank 2 of 2"});
}

}  // namespace
}  // namespace weft
