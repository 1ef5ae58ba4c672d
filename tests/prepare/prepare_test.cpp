// Packer and micro-sequences: the table, random documents against a definition per token, refusals.
#include "weft/prepare.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>
#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "index.h"
#include "refusal.h"
#include "weft/plan.h"

namespace weft {
namespace {

using List = std::vector<Index>;

List lognormal(Index count, double median, double sigma, Index longest, unsigned seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<double> normal;
  List lengths;
  for (Index i = 0; i < count; ++i)
    lengths.push_back(std::clamp(static_cast<Index>(median * std::exp(sigma * normal(engine))), Index{1}, longest));
  return lengths;
}

// Every token of every document lies in exactly one piece, and every pack keeps to its budget.
void expect_whole(const Packs& packs, const List& lengths) {
  std::vector<std::vector<Piece>> by_document(lengths.size());
  Index tokens = 0, padding = 0;
  for (std::size_t p = 0; p < packs.packs.size(); ++p) {
    const Stream stream = packs.stream(static_cast<Index>(p));
    EXPECT_LE(stream.extent().end, packs.options.budget);
    EXPECT_EQ(stream.tokens(), packs.options.budget);
    EXPECT_FALSE(packs.packs[p].empty());
    for (std::size_t i = 0; i < packs.packs[p].size(); ++i) {
      const Piece& piece = packs.packs[p][i];
      by_document[at(piece.document)].push_back(piece);
      EXPECT_EQ(stream.used(static_cast<Index>(i)), piece.length);
      EXPECT_EQ(stream.offset(static_cast<Index>(i)) % packs.options.multiple, 0);
      tokens += piece.length;
      padding += stream.padded(static_cast<Index>(i)) - piece.length;
    }
  }
  Index split = 0;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    std::sort(by_document[i].begin(), by_document[i].end(), [](auto& a, auto& b) { return a.begin < b.begin; });
    Index at = 0;
    for (const Piece& piece : by_document[i]) {
      EXPECT_EQ(piece.begin, at);
      at += piece.length;
    }
    EXPECT_EQ(at, lengths[i]);
    EXPECT_FALSE(by_document[i].empty());
    split += by_document[i].size() > 1 ? 1 : 0;
  }
  const PackReport& r = packs.report;
  const Index rows = static_cast<Index>(packs.packs.size()) * packs.options.budget;
  EXPECT_EQ(r.tokens, tokens);
  EXPECT_EQ(r.padding, padding);
  EXPECT_EQ(r.empty, rows - tokens - padding);
  EXPECT_EQ(r.packs, static_cast<Index>(packs.packs.size()));
  EXPECT_EQ(r.split_documents, split);
  if (rows > 0) {
    EXPECT_DOUBLE_EQ(r.waste, static_cast<double>(padding + r.empty) / static_cast<double>(rows));
  }
  EXPECT_GE(r.token_balance, 1);
  EXPECT_GE(r.pair_balance, 1);
}

TEST(Packer, SmallOnesByHand) {
  const List lengths{5, 3, 7, 2, 3};
  const Packs best = pack_documents(lengths, {.budget = 10});
  EXPECT_EQ(best.packs, (std::vector<std::vector<Piece>>{{{1, 0, 3}, {2, 0, 7}}, {{0, 0, 5}, {3, 0, 2}, {4, 0, 3}}}));
  EXPECT_EQ(best.report.least_packs, 2);
  EXPECT_DOUBLE_EQ(best.report.token_balance, 1);
  EXPECT_DOUBLE_EQ(best.report.pair_balance, 34.0 / ((34 + 24) / 2.0));  // 28 + 6 and 15 + 3 + 6 pairs
  const Packs ordered = pack_documents(lengths, {.budget = 10, .keep_order = true});
  EXPECT_EQ(ordered.packs,
            (std::vector<std::vector<Piece>>{{{0, 0, 5}, {1, 0, 3}}, {{2, 0, 7}, {3, 0, 2}}, {{4, 0, 3}}}));
  const Packs split =
      pack_documents(List{23, 4}, {.budget = 10, .multiple = 4, .too_long = PackOptions::TooLong::split});
  EXPECT_EQ(split.packs, (std::vector<std::vector<Piece>>{{{0, 0, 8}}, {{0, 8, 8}}, {{0, 16, 7}}, {{1, 0, 4}}}));
  EXPECT_EQ(split.report.split_documents, 1);
  EXPECT_EQ(pack_documents(List{}, {.budget = 10}).report.packs, 0);
  expect_whole(pack_documents(List{0, 0}, {.budget = 10}), {0, 0});
}

TEST(Packer, RandomDocumentsAreWholeAndInOrder) {
  std::mt19937_64 engine(3);
  for (int round = 0; round < 300; ++round) {
    const PackOptions options{.budget = 40 + static_cast<Index>(engine() % 100),
                              .multiple = 1 + static_cast<Index>(engine() % 9),
                              .keep_order = engine() % 2 == 0,
                              .too_long = PackOptions::TooLong::split};
    List lengths(engine() % 60);
    for (Index& n : lengths) n = static_cast<Index>(engine() % (engine() % 5 == 0 ? 400 : 30));
    const Packs packs = pack_documents(lengths, options);
    expect_whole(packs, lengths);
    if (!options.keep_order) continue;
    Piece last{-1, 0, 0};
    for (const std::vector<Piece>& pack : packs.packs) {
      for (const Piece& piece : pack) {
        EXPECT_TRUE(piece.document > last.document || (piece.document == last.document && piece.begin > last.begin));
        last = piece;
      }
    }
  }
}

TEST(Packer, ShortDocumentsFillTheirPacks) {
  for (const unsigned seed : {1u, 2u, 3u}) {
    const List lengths = lognormal(100000, 400, 1, 4096, seed);
    const std::clock_t begin = std::clock();  // processor time: other programs do not count
    const Packs packs = pack_documents(lengths, {.budget = 65536});
    const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    expect_whole(packs, lengths);
    EXPECT_LE(static_cast<double>(packs.report.packs), 1.01 * static_cast<double>(packs.report.least_packs));
#ifdef NDEBUG
    EXPECT_LT(seconds, 1);
#else
    (void)seconds;
#endif
  }
}

// As many documents up to a length as published long-context training data has.
List published(Index count, Index longest, unsigned seed) {
  constexpr std::array<std::pair<double, double>, 10> kQuantiles{{{0, 16},
                                                                  {0.186, 200},
                                                                  {0.468, 500},
                                                                  {0.714, 1024},
                                                                  {0.870, 2048},
                                                                  {0.944, 4096},
                                                                  {0.974, 8192},
                                                                  {0.987, 16384},
                                                                  {0.996, 32768},
                                                                  {1, 196608}}};
  std::mt19937_64 engine(seed);
  List lengths;
  for (Index i = 0; i < count; ++i) {
    const double share = static_cast<double>(engine() >> 11) * 0x1p-53;
    std::size_t n = 1;
    while (kQuantiles[n].first < share) ++n;
    const auto [a, low] = kQuantiles[n - 1];
    const auto [b, high] = kQuantiles[n];
    lengths.push_back(std::min(longest, static_cast<Index>(low * std::pow(high / low, (share - a) / (b - a)))));
  }
  return lengths;
}

double pairs_in(const std::vector<Piece>& pack) {
  double pairs = 0;
  for (const Piece& piece : pack)
    pairs += static_cast<double>(piece.length) * static_cast<double>(piece.length + 1) / 2;
  return pairs;
}

// No pack has more pairs than the limit times the mean, or than the longest document.
void expect_even(const Packs& packs) {
  if (packs.packs.empty()) return;
  double sum = 0, most = 0, longest = 0;
  for (const std::vector<Piece>& pack : packs.packs) {
    sum += pairs_in(pack);
    most = std::max(most, pairs_in(pack));
    for (const Piece& piece : pack) longest = std::max(longest, pairs_in({piece}));
  }
  const double mean = sum / static_cast<double>(packs.packs.size());
  EXPECT_LE(most, std::max(packs.options.pair_limit * mean, longest) * (1 + 1e-9));
}

TEST(Packer, ALimitOfPairs) {
  for (const auto& [lengths, budget] : {std::pair{lognormal(100000, 400, 1, 4096, 1), Index{65536}},
                                        {published(100000, 16384, 1), Index{131072}},
                                        {published(100000, 131072, 2), Index{131072}}}) {
    const Index without = pack_documents(lengths, {.budget = budget}).report.packs;
    const std::clock_t begin = std::clock();  // processor time: other programs do not count
    const Packs packs = pack_documents(lengths, {.budget = budget, .pair_limit = 1.1});
    const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
    expect_whole(packs, lengths);
    expect_even(packs);
    EXPECT_LE(static_cast<double>(packs.report.packs), 1.03 * static_cast<double>(without));
#ifdef NDEBUG
    EXPECT_LT(seconds, 1);
#else
    (void)seconds;
#endif
  }
}

TEST(Packer, ALimitOfPairsOnRandomDocuments) {
  std::mt19937_64 engine(5);
  for (int round = 0; round < 300; ++round) {
    const PackOptions options{.budget = 40 + static_cast<Index>(engine() % 100),
                              .multiple = 1 + static_cast<Index>(engine() % 9),
                              .too_long = PackOptions::TooLong::split,
                              .pair_limit = 1.01 + static_cast<double>(engine() % 100) / 100};
    List lengths(engine() % 60);
    for (Index& n : lengths) n = static_cast<Index>(engine() % (engine() % 5 == 0 ? 400 : 30));
    const Packs packs = pack_documents(lengths, options);
    expect_whole(packs, lengths);
    expect_even(packs);
    EXPECT_EQ(packs.packs, pack_documents(lengths, options).packs);
  }
}

TEST(Packer, Refuses) {
  expect_refusal([] { pack_documents(List{4}, {.budget = 10, .pair_limit = 0.9}); }, {"0.9 times", "1.1"});
  expect_refusal([] { pack_documents(List{4}, {.budget = 10, .keep_order = true, .pair_limit = 1.1}); },
                 {"1.1 times", "keep_order"});
  expect_refusal([] { pack_documents(List{4, 11}, {.budget = 10}); }, {"document 1", "11", "10", "split"});
  expect_refusal([] { pack_documents(List{9}, {.budget = 10, .multiple = 4}); }, {"padded length 12"});
  expect_refusal([] { pack_documents(List{9}, {.budget = 0}); }, {"0 rows"});
  expect_refusal([] { pack_documents(List{9}, {.budget = 10, .multiple = 11}); }, {"multiple of 11", "1 to 10"});
  expect_refusal([] { pack_documents(List{-1}, {.budget = 10}); }, {"document 0", "-1"});
  expect_refusal([] { pack_documents(List{1}, {.budget = 10}).stream(1); }, {"pack 1 of 1"});
}

TEST(MicroSequences, TheTable) {
  const MicroSequences micros(Stream::from_lengths(List{5, 9, 6, 4}), {.ranks = 2, .micros = 2});
  struct Row {
    Index rank, micro, begin, end, first;
    List lengths, cu_q, cu_k, positions, index_q, index_k;
  };
  const auto numbered = [](const List& counts) {  // from 1
    List result;
    for (std::size_t i = 0; i < counts.size(); ++i)
      result.insert(result.end(), at(counts[i]), static_cast<Index>(i + 1));
    return result;
  };
  const std::vector<Row> table = {
      {0, 0, 0, 6, 0, {5, 1}, {0, 5, 6}, {0, 5, 6}, {0, 1, 2, 3, 4, 0}, numbered({5, 1}), numbered({5, 1})},
      {1, 0, 6, 12, 5, {6}, {0, 6}, {0, 7}, {1, 2, 3, 4, 5, 6}, numbered({6}), numbered({7})},
      {0, 1, 12, 18, 5, {2, 4}, {0, 2, 6}, {0, 9, 13}, {7, 8, 0, 1, 2, 3}, numbered({2, 4}), numbered({9, 4})},
      {1, 1, 18, 24, 14, {2, 4}, {0, 2, 6}, {0, 6, 10}, {4, 5, 0, 1, 2, 3}, numbered({2, 4}), numbered({6, 4})}};
  for (const Row& row : table) {
    const Window w = micros.window(row.rank, row.micro);
    EXPECT_EQ(w.begin, row.begin);
    EXPECT_EQ(w.end, row.end);
    EXPECT_EQ(w.first_document_begin, row.first);
    EXPECT_EQ(w.lengths, row.lengths);
    EXPECT_EQ(w.cu_seqlens_q, row.cu_q);
    EXPECT_EQ(w.cu_seqlens_k, row.cu_k);
    EXPECT_EQ(w.position_index(), row.positions);
    EXPECT_EQ(w.document_index_q(), row.index_q);
    EXPECT_EQ(w.document_index_k(), row.index_k);
  }
}

// What each token is, said for itself; windows are then put together from tokens.
struct Token {
  Index document, position, rank, micro;
};
struct Naive {
  Naive(const List& lengths, const List& padded, Index begin, Index past, Index ranks, Index micros) : begin_(begin) {
    Index tokens = std::accumulate(padded.begin(), padded.end(), Index{0});
    while (tokens % (ranks * micros) != 0) ++tokens;
    std::size_t d = 0;
    Index in_document = 0, nobody = 0;
    for (Index t = 0; t < tokens; ++t) {
      while (d < lengths.size() && in_document == padded[d]) ++d, in_document = 0;
      const bool real = d < lengths.size() && in_document < lengths[d];
      nobody = real ? 0 : nobody + 1;
      all.push_back({real ? static_cast<Index>(d) : kNoDocument, real ? in_document + (d == 0 ? past : 0) : nobody - 1,
                     t % (tokens / micros) / (tokens / micros / ranks), t / (tokens / micros)});
      ++in_document;
    }
  }
  const Token& at(Index t) const { return all[static_cast<std::size_t>(t - begin_)]; }
  bool sees(Index q, Index k, const Mask& m) const {  // k may be in the past, where only the first document is
    const Token& a = at(q);
    if (a.document == kNoDocument) return false;
    const Index start = q - a.position, j = k - start;
    if (j < 0 || (k >= begin_ && at(k).document != a.document)) return false;
    if (m.causal && j > a.position) return false;
    if (m.left >= 0 && j < a.position - m.left) return false;
    if (m.right >= 0 && j > a.position + m.right) return false;
    return !m.chunk || j / *m.chunk == a.position / *m.chunk;
  }
  std::vector<Token> all;

 private:
  Index begin_;
};

void check_window(const Naive& naive, const Window& w, Index begin) {
  List tokens;
  for (std::size_t i = 0; i < naive.all.size(); ++i)
    if (naive.all[i].rank == w.rank && naive.all[i].micro == w.micro) tokens.push_back(begin + static_cast<Index>(i));
  ASSERT_EQ(static_cast<Index>(tokens.size()), w.rows());
  if (tokens.empty()) return;
  EXPECT_EQ(tokens.front(), w.begin);
  EXPECT_EQ(tokens.back(), w.end - 1);
  const Index first = w.begin - naive.at(w.begin).position;
  EXPECT_EQ(w.first_document_begin, first);
  List lengths, documents, index_q, positions, keys;
  for (const Index t : tokens) {
    const Token& token = naive.at(t);
    if (t == w.begin || token.position == 0) {
      lengths.push_back(0);
      documents.push_back(token.document);
      keys.push_back(0);
    }
    ++lengths.back();
    index_q.push_back(static_cast<Index>(lengths.size()));
    positions.push_back(token.position);
  }
  List index_k(at(w.begin - first), 1);
  index_k.insert(index_k.end(), index_q.begin(), index_q.end());
  for (const Index i : index_k) ++keys[at(i - 1)];
  List cu_q{0}, cu_k{0};
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    cu_q.push_back(cu_q.back() + lengths[i]);
    cu_k.push_back(cu_k.back() + keys[i]);
  }
  EXPECT_EQ(w.lengths, lengths);
  EXPECT_EQ(w.documents, documents);
  EXPECT_EQ(w.document_index_q(), index_q);
  EXPECT_EQ(w.document_index_k(), index_k);
  EXPECT_EQ(w.position_index(), positions);
  EXPECT_EQ(w.cu_seqlens_q, cu_q);
  EXPECT_EQ(w.cu_seqlens_k, cu_k);
  EXPECT_EQ(w.max_length_q, *std::max_element(lengths.begin(), lengths.end()));
  EXPECT_EQ(w.min_length_q, *std::min_element(lengths.begin(), lengths.end()));
  EXPECT_EQ(w.max_length_k, *std::max_element(keys.begin(), keys.end()));
  EXPECT_EQ(w.min_length_k, *std::min_element(keys.begin(), keys.end()));
}

void check_dense(const Naive& naive, const MicroSequences& micros, const Window& w, const Mask& mask) {
  bool there = true;  // all keys that the window's queries see
  std::vector<std::uint8_t> want;
  for (Index q = w.begin; q < w.end; ++q) {
    for (Index k = w.first_document_begin; k < w.end; ++k) want.push_back(naive.sees(q, k, mask) ? 1 : 0);
    for (Index k = w.end; k < micros.rows().end; ++k) there = there && !naive.sees(q, k, mask);
  }
  const Problem problem = micros.problem(mask);
  if (there) {
    EXPECT_EQ(micros.dense_mask(problem, w.rank, w.micro), want);
  } else {
    expect_refusal([&] { micros.dense_mask(problem, w.rank, w.micro); }, {"the mask shows keys", "causal"});
  }
}

TEST(MicroSequences, RandomDocumentsTokenByToken) {
  std::mt19937_64 engine(11);
  const auto draw = [&](Index low, Index high) {
    return low + static_cast<Index>(engine() % static_cast<std::uint64_t>(high - low + 1));
  };
  Index refused = 0, padded_windows = 0;
  for (int round = 0; round < 1500; ++round) {
    const Index ranks = draw(1, 5), count = draw(0, 8), begin = draw(0, 1) * draw(0, 20), multiple = draw(0, 2) * 2 + 1;
    const Index micro_count = draw(1, 5);
    List lengths, padded, offsets{begin};
    for (Index i = 0; i < count; ++i) {
      lengths.push_back(draw(0, 5) == 0 ? 0 : draw(1, 30));
      padded.push_back(ceil_div(lengths.back(), multiple) * multiple);
      offsets.push_back(offsets.back() + padded.back());
    }
    const Index past = count > 0 && lengths[0] > 0 ? draw(0, begin) : 0;
    const MicroSequences micros(Stream::from_used(offsets, lengths), {.ranks = ranks,
                                                                      .micros = micro_count,
                                                                      .remainder = MicroSplit::Remainder::pad,
                                                                      .first_document_begin = begin - past});
    const Naive naive(lengths, padded, begin, past, ranks, micro_count);
    EXPECT_EQ(micros.rows().size(), static_cast<Index>(naive.all.size()));
    EXPECT_EQ(micros.padding(), micros.rows().end - offsets.back());
    const std::vector<Mask> masks = {{.causal = true},
                                     {.causal = true, .align = Align::bottom_right, .left = draw(0, 12)},
                                     {.causal = true, .chunk = draw(1, 9)},
                                     {.left = draw(0, 9), .right = draw(0, 3)},
                                     {}};
    for (Index m = 0; m < micro_count; ++m) {
      for (Index r = 0; r < ranks; ++r) {
        const Window w = micros.window(r, m);
        check_window(naive, w, begin);
        check_dense(naive, micros, w, masks[at(round) % masks.size()]);
        padded_windows += !w.documents.empty() && w.documents.back() == kNoDocument ? 1 : 0;
      }
    }
    refused += micros.padding() > 0 ? 1 : 0;
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(padded_windows, 500);
}

TEST(MicroSequences, PaddingIsALastDocumentOfNobody) {
  const MicroSequences micros(Stream::from_lengths(List{5, 4}),
                              {.ranks = 2, .micros = 2, .remainder = MicroSplit::Remainder::pad});
  EXPECT_EQ(micros.padding(), 3);
  const Window w = micros.window(0, 1), last = micros.window(1, 1);
  EXPECT_EQ(w.lengths, (List{3}));
  EXPECT_EQ(last.lengths, (List{3}));
  EXPECT_EQ(last.documents, (List{kNoDocument}));
  EXPECT_EQ(last.first_document_begin, 9);
  EXPECT_EQ(last.cu_seqlens_k, (List{0, 3}));
  EXPECT_EQ(last.position_index(), (List{0, 1, 2}));
  const Problem problem = micros.problem({.causal = true});
  EXPECT_TRUE(micros.slices(problem, 1, 1, {0, 12}).empty());
  EXPECT_EQ(micros.dense_mask(problem, 1, 1), std::vector<std::uint8_t>(9, 0));
}

// Visible pairs of each window, and cuts that make them even, by counting.
TEST(MicroSequences, EvenWork) {
  std::mt19937_64 engine(13);
  for (int round = 0; round < 200; ++round) {
    const Index ranks = 1 + static_cast<Index>(engine() % 4), micros = 1 + static_cast<Index>(engine() % 5);
    List lengths(1 + engine() % 6);
    for (Index& n : lengths) n = static_cast<Index>(engine() % 60);
    lengths.push_back(ranks * micros);
    Mask mask{.causal = true};
    if (engine() % 2 == 0) mask.left = static_cast<Index>(engine() % 20);
    const Stream stream = Stream::from_lengths(lengths);
    const MicroSequences sequence(
        stream, {.ranks = ranks, .micros = micros, .remainder = MicroSplit::Remainder::pad, .even_work = mask});
    const Problem problem = sequence.problem(mask);
    const List work = sequence.work(problem);
    ASSERT_EQ(work.size(), at(ranks * micros));
    EXPECT_EQ(std::accumulate(work.begin(), work.end(), Index{0}), problem.visible_pairs());
    Index token = 0, largest = 0, costliest = 0;
    for (Index m = 0; m < micros; ++m) {
      Index pairs = 0;
      for (Index r = 0; r < ranks; ++r) {
        const Range rows = sequence.rows(r, m);
        EXPECT_EQ(rows.begin, token);
        EXPECT_GT(rows.size(), 0);
        EXPECT_EQ(rows.size(), sequence.local(m));
        for (Index t = rows.begin; t < rows.end; ++t) EXPECT_EQ(sequence.micro_of(t), m);
        token = rows.end;
        largest = max_of(largest, rows.size());
        Index counted = 0;
        for (const std::uint8_t seen : sequence.dense_mask(problem, r, m)) counted += seen;
        EXPECT_EQ(work[at(m * ranks + r)], counted);
        pairs += counted;
      }
      costliest = max_of(costliest, pairs);
    }
    EXPECT_EQ(token, sequence.rows().end);
    EXPECT_EQ(sequence.local(), largest);
    EXPECT_LT(sequence.padding(), ranks);
    // A micro-sequence is above its share by less than a step of one row a rank, and those before it made no room.
    const Index step = ranks * (mask.left >= 0 ? mask.left + 1 : *std::max_element(lengths.begin(), lengths.end()));
    EXPECT_LE(costliest, problem.visible_pairs() / micros + 2 * step + 1);
  }
}

TEST(MicroSequences, Refuses) {
  const Stream stream = Stream::from_lengths(List{5, 9, 6, 3});
  expect_refusal([&] { MicroSequences(stream, {.ranks = 2, .micros = 2}); },
                 {"23 tokens", "2 micro-sequences on 2 ranks", "pad to 24"});
  expect_refusal([&] { MicroSequences(stream, {.ranks = 0}); }, {"0 ranks"});
  expect_refusal([&] { MicroSequences(stream, {.first_document_begin = 3}); }, {"first_document_begin 3", "row 0"});
  const MicroSequences micros(stream, {.ranks = 1});
  expect_refusal([&] { micros.window(1, 0); }, {"rank 1 of 1"});
  expect_refusal([&] { micros.window(0, 1); }, {"micro-sequence 1 of 1"});
  // A full mask: all keys are there in one micro-sequence on one rank, and where documents end with windows.
  EXPECT_EQ(micros.slices(micros.problem({}), 0, 0, micros.rows()).size(), 4u);
  const MicroSequences even(Stream::from_lengths(List{4, 8, 4, 8}), {.ranks = 2});
  EXPECT_EQ(even.slices(even.problem({}), 0, 0, {0, 12}).size(), 2u);
}

TEST(MicroSequences, OfMoreRowsOrPartsThanThereCanBe) {
  const MicroSplit even{.micros = 5, .even_work = Mask{.causal = true}};
  expect_refusal([&] { MicroSequences(Stream::from_lengths(List{3}), even); },
                 {"5 micro-sequences of even work from 3 tokens on 1 ranks", "give at most 3"});
  const MicroSplit padded{.ranks = 3, .remainder = MicroSplit::Remainder::pad};
  expect_refusal([&] { MicroSequences(Stream::from_lengths(List{kMaxTokens}), padded); },
                 {"are past the limit of 2147483647", "split the pack"});
}

}  // namespace
}  // namespace weft
