// Bytes to documents that are packed, cut into micro-sequences and go through a K/V buffer; to trees of shared
// prefixes, padded, joined, split and packed; and to caches of keys that grow. What comes out is counted token by
// token, or it is a weft::Error; nothing else.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "bytes.h"
#include "check/by_micro.h"
#include "check/by_schedule.h"
#include "check/tensors.h"
#include "index.h"
#include "weft/error.h"
#include "weft/kv_buffer.h"
#include "weft/kv_cache.h"
#include "weft/prepare.h"
#include "weft/tree.h"

namespace {

using weft::at;
using weft::Index;
using weft::max_of;
using weft::min_of;
using weft::fuzz::ByteChoices;
using weft::fuzz::hostile;
using List = std::vector<Index>;

constexpr Index kMostRows = 400;  // of anything that is counted

void expect(bool right, const char* what) {
  if (right) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::abort();
}

List numbers(ByteChoices& bytes, Index most, Index largest) {
  List all(at(bytes.pick(0, most)));
  for (Index& n : all) n = bytes.pick(0, largest);
  return all;
}

Index sum(const List& all) { return std::accumulate(all.begin(), all.end(), Index{0}); }
bool are_small(const List& all, Index largest) {
  return std::all_of(all.begin(), all.end(), [&](Index n) { return n <= largest; });
}

// ---- packs

weft::PackOptions pack_options(ByteChoices& bytes, bool spoiled) {
  constexpr double kLimits[] = {0, 0, 0, 1.1, 1, 3, -1, 1e300, std::numeric_limits<double>::quiet_NaN()};
  weft::PackOptions o{.budget = bytes.pick(1, 80), .multiple = bytes.pick(1, 9), .keep_order = bytes.one_in(3)};
  if (bytes.one_in(2)) o.too_long = weft::PackOptions::TooLong::split;
  if (bytes.one_in(3)) o.pair_limit = kLimits[bytes.pick(0, 8)];
  if (spoiled) (bytes.one_in(2) ? o.budget : o.multiple) = hostile(bytes, o.budget);
  return o;
}

// Each token of each document lies in one piece, pieces lie in their packs one behind the other, and the report counts.
void check_packs(const weft::Packs& packs, const List& lengths) {
  std::vector<std::vector<bool>> met;
  for (const Index n : lengths) met.emplace_back(at(n));
  Index tokens = 0, padding = 0;
  for (std::size_t p = 0; p < packs.packs.size(); ++p) {
    const weft::Stream stream = packs.stream(static_cast<Index>(p));
    expect(stream.tokens() == packs.options.budget && stream.extent().end <= packs.options.budget, "a pack's budget");
    expect(!packs.packs[p].empty(), "a pack without a document");
    for (std::size_t i = 0; i < packs.packs[p].size(); ++i) {
      const weft::Piece& piece = packs.packs[p][i];
      const auto n = static_cast<Index>(i);
      expect(stream.used(n) == piece.length && stream.offset(n) % packs.options.multiple == 0, "a piece's place");
      for (Index t = piece.begin; t < piece.begin + piece.length; ++t) {
        expect(t >= 0 && t < lengths[at(piece.document)] && !met[at(piece.document)][at(t)], "a token met twice");
        met[at(piece.document)][at(t)] = true;
      }
      tokens += piece.length;
      padding += stream.padded(n) - piece.length;
    }
  }
  expect(tokens == sum(lengths) && tokens == packs.report.tokens && padding == packs.report.padding, "the tokens");
  const Index rows = static_cast<Index>(packs.packs.size()) * packs.options.budget;
  expect(packs.report.empty == rows - tokens - padding, "the empty rows of a report");
}

void pack(ByteChoices& bytes) {
  const bool spoiled = bytes.one_in(2);
  List lengths = numbers(bytes, 14, 90);
  const weft::PackOptions options = pack_options(bytes, spoiled);
  if (spoiled && bytes.one_in(2)) weft::fuzz::spoil_entry(bytes, lengths);
  // A billion tokens may be packed, and brute force is for few.
  const bool fit = are_small(lengths, kMostRows) && options.budget <= kMostRows;
  if (!fit && options.budget > 0 && options.budget < weft::kMaxTokens / 1000) return;
  try {
    const weft::Packs packs = pack_documents(lengths, options);
    if (fit) check_packs(packs, lengths);
  } catch (const weft::Error&) {
    const bool may_refuse = options.pair_limit != 0 || options.too_long == weft::PackOptions::TooLong::refuse ||
                            options.multiple > options.budget;
    expect(spoiled || may_refuse, "documents that can be packed are refused");
  }
}

// ---- micro-sequences

// Windows of all ranks and micro-sequences hold each row once, with the document and the position that it has.
void check_windows(const weft::MicroSequences& micros, const weft::Stream& documents) {
  const weft::Range rows = micros.rows();
  std::vector<int> met(at(rows.size()));
  for (Index rank = 0; rank < micros.ranks(); ++rank) {
    for (Index m = 0; m < micros.micros(); ++m) {
      const weft::Window w = micros.window(rank, m);
      expect(w.rows() == micros.local(m) && w.begin >= rows.begin && w.end <= rows.end, "the size of a window");
      const List entry = w.document_index_q(), position = w.position_index();
      expect(sum(w.lengths) == w.rows() && static_cast<Index>(entry.size()) == w.rows(), "the rows of a window");
      expect(w.cu_seqlens_q.back() == w.rows() && w.cu_seqlens_k.back() == w.keys() && w.cu_seqlens_k.front() == 0,
             "the offsets of a window");
      for (Index token = w.begin; token < w.end; ++token) {
        ++met[at(token - rows.begin)];
        expect(micros.micro_of(token) == m, "the micro-sequence of a token");
        const Index n = w.documents[at(entry[at(token - w.begin)] - 1)];
        if (n == weft::kNoDocument) continue;
        expect(token >= documents.offset(n) && token < documents.offset(n) + documents.used(n), "a token's document");
        if (n > 0) expect(position[at(token - w.begin)] == token - documents.offset(n), "a token's position");
      }
    }
  }
  expect(std::all_of(met.begin(), met.end(), [](int n) { return n == 1; }), "a row in no window, or in two");
}

void cut(ByteChoices& bytes) {
  const weft::Stream documents = weft::Stream::from_lengths(numbers(bytes, 8, 30));
  weft::MicroSplit split{.ranks = bytes.pick(1, 4), .micros = bytes.pick(1, 5)};
  if (bytes.one_in(2)) split.remainder = weft::MicroSplit::Remainder::pad;
  if (bytes.one_in(3)) split.even_work = weft::Mask{.causal = true, .left = bytes.pick(-1, 20)};
  const bool spoiled = bytes.one_in(3);
  if (spoiled && bytes.one_in(2)) split.first_document_begin = hostile(bytes, 0);
  if (spoiled && bytes.one_in(2)) (bytes.one_in(2) ? split.ranks : split.micros) = hostile(bytes, split.micros);
  try {
    const weft::MicroSequences micros(documents, split);
    if (micros.rows().size() > 20 * kMostRows || micros.ranks() * micros.micros() > 64) return;
    check_windows(micros, documents);
    const weft::Mask mask{.causal = true, .left = spoiled ? hostile(bytes, 3) : bytes.pick(-1, 20)};
    static_cast<void>(key_rows(micros, mask, {.drop = bytes.one_in(2), .ahead = bytes.one_in(2)}));
    static_cast<void>(micros.work(micros.problem(mask)));
  } catch (const weft::Error&) {  // rows that do not divide, and even work wants a token a rank
    const bool may_refuse = split.remainder != weft::MicroSplit::Remainder::pad || split.even_work;
    expect(spoiled || may_refuse, "documents that can be cut are refused");
  }
}

// Through a K/V buffer on one to three ranks, against the dense softmax.
void attend(ByteChoices& bytes) {
  const bool spoiled = bytes.one_in(3);
  weft::check::Case c = weft::check::in_micro_sequences(weft::check::random_case(bytes));
  weft::check::MicroWay way{.micros = bytes.pick(1, 4),
                            .checked = bytes.one_in(6),
                            .even_work = bytes.one_in(3),
                            .ahead = bytes.one_in(3),
                            .recomputed = bytes.one_in(3)};
  if (spoiled) {
    weft::fuzz::spoil(c, bytes);
    if (bytes.one_in(3)) way.micros = hostile(bytes, way.micros);
  }
  if (c.ranks < 1 || c.ranks > 3 || way.micros > 6) return;
  try {
    if (!weft::fuzz::small(c, 3) || c.k || micro_refusal(c, problem_of(c), way)) return;
  } catch (const weft::Error&) {  // even work wants a token a rank
    return;
  }
  try {
    weft::check::Oracle oracle(c, weft::check::executor_arithmetic(c));
    const weft::check::AttendReport report = check_micro(oracle, way);
    if (report.ok()) return;
    std::fprintf(stderr, "weft verify %s --micro %lld\n", flags(c).c_str(), static_cast<long long>(way.micros));
    expect(false, "numbers of micro-sequences");
  } catch (const weft::Error& e) {
    if (!spoiled) std::fprintf(stderr, "%s\nweft verify %s\n", e.what(), flags(c).c_str());
    expect(spoiled, "a valid problem is refused");
  }
}

// ---- trees

// What every row sees is what its sequence by itself would see: the rows of its ancestors and of its node before it.
void check_tree(const weft::Tree& tree, const List& parents, const weft::Mask& mask) {
  const List node_of = tree.node_of_row(), positions = tree.positions();
  std::map<Index, List> rows_of;
  for (std::size_t row = 0; row < node_of.size(); ++row)
    if (node_of[row] != weft::kNoNode) rows_of[node_of[row]].push_back(static_cast<Index>(row));
  std::vector<std::multiset<Index>> seen(at(tree.rows()));
  for (const weft::Slice& s : tree.slices(mask))
    for (Index q = s.q_begin; q < s.q_end; ++q)
      for (Index k = s.k_begin; k < s.k_end; ++k)
        if (sees(s, q, k)) seen[at(q)].insert(k);
  for (std::size_t row = 0; row < node_of.size(); ++row) {
    List path;
    for (Index node = node_of[row]; node != weft::kNoNode; node = parents[at(node)])
      path.insert(path.begin(), rows_of[node].begin(), rows_of[node].end());
    std::multiset<Index> alone;
    const auto self = std::find(path.begin(), path.end(), static_cast<Index>(row)) - path.begin();
    for (Index i = 0; i <= self && !path.empty(); ++i)
      if ((mask.left < 0 || self - i <= mask.left) && (!mask.chunk || self / *mask.chunk == i / *mask.chunk))
        alone.insert(path[at(i)]);
    expect(alone == seen[row], "what a row of a tree sees");
    expect(path.empty() || positions[row] == self, "the position of a row of a tree");
  }
}

void check_packed(const weft::TreePacks& packs, const std::vector<weft::Tree>& trees, Index budget) {
  std::multiset<List> in, out;  // sequences, by the numbers of their tree and of themselves
  for (std::size_t t = 0; t < trees.size(); ++t)
    for (Index s = 0; s < trees[t].sequences(); ++s) in.insert({static_cast<Index>(t), s, trees[t].length(s)});
  for (std::size_t p = 0; p < packs.packs.size(); ++p) {
    expect(packs.trees[p].rows() == budget, "the rows of a pack of trees");
    Index sequence = 0;
    for (const weft::TreePiece& piece : packs.packs[p]) {
      List all = piece.sequences;
      if (all.empty()) {
        all.resize(at(trees[at(piece.tree)].sequences()));
        std::iota(all.begin(), all.end(), Index{0});
      }
      for (const Index s : all) out.insert({piece.tree, s, packs.trees[p].length(sequence++)});
    }
  }
  expect(in == out, "the sequences of a pack of trees");
}

weft::Tree tree_of(ByteChoices& bytes, bool spoiled, List& parents) {
  List lengths = numbers(bytes, 9, 12);
  parents.resize(lengths.size());
  for (std::size_t i = 0; i < parents.size(); ++i)
    parents[i] = i == 0 || bytes.one_in(4) ? weft::kNoNode : bytes.pick(0, static_cast<Index>(i) - 1);
  if (spoiled) weft::fuzz::spoil_entry(bytes, bytes.one_in(2) ? parents : lengths);
  if (!are_small(lengths, 100)) {  // refused, or more rows than can be counted
    static_cast<void>(weft::Tree::from_nodes({.parents = parents, .lengths = lengths}).packing());
    throw weft::Error("many rows", "count fewer");
  }
  List ends(parents.size());
  std::iota(ends.begin(), ends.end(), Index{0});
  if (spoiled && bytes.one_in(2)) weft::fuzz::spoil_entry(bytes, ends);
  if (bytes.one_in(2)) return weft::Tree::from_nodes({.parents = parents, .lengths = lengths});
  return weft::Tree::from_nodes({.parents = parents, .lengths = lengths, .sequence_end = ends});
}

void grow_tree(ByteChoices& bytes) {
  const bool spoiled = bytes.one_in(2);
  bool may_refuse = spoiled;
  try {
    List parents;
    weft::Tree tree = tree_of(bytes, spoiled, parents);
    if (bytes.one_in(2)) {
      const Index multiple = spoiled ? hostile(bytes, 4) : bytes.pick(1, 9);
      std::optional<Index> rows;
      if (bytes.one_in(2)) rows = spoiled ? hostile(bytes, tree.rows()) : tree.rows() + bytes.pick(0, 60);
      may_refuse |= rows.has_value();  // too few for the padding
      tree = tree.padded_to(multiple, rows);
      may_refuse = spoiled;
    }
    if (tree.rows() > kMostRows) return;
    weft::Mask mask{.causal = true};
    if (bytes.one_in(2)) mask.left = bytes.pick(0, 12);
    if (bytes.one_in(3)) mask.chunk = bytes.pick(1, 9);
    check_tree(tree, parents, mask);
    static_cast<void>(tree.problem(mask));
    List other;
    const std::vector<weft::Tree> trees{tree, tree_of(bytes, false, other)};
    const weft::Tree both = weft::Tree::joined(trees);
    expect(both.used_rows() == trees[0].used_rows() + trees[1].used_rows(), "the rows of joined trees");
    List some = numbers(bytes, 5, max_of(both.sequences() - 1, 0));
    if (spoiled) weft::fuzz::spoil_entry(bytes, some);
    may_refuse = true;  // a sequence asked for twice, a budget that is too small
    Index tokens = 0;
    const weft::Tree part = both.subset(some);
    for (const Index s : some) tokens += both.length(s);
    expect(part.separate_tokens() == tokens && part.rows() <= tokens, "the rows of a part of a tree");
    const weft::PackOptions options = pack_options(bytes, spoiled);
    if (options.budget <= kMostRows) check_packed(pack_trees(trees, options), trees, options.budget);
  } catch (const weft::Error&) {
    expect(may_refuse, "a tree is refused");
  }
}

// Sequences come back from their tree, and each edge goes from a token to the one behind it.
void tree_of_sequences(ByteChoices& bytes) {
  List tokens = numbers(bytes, 60, 2), cu_seqlens{0};
  const auto total = static_cast<Index>(tokens.size());
  for (Index n = bytes.pick(0, 20); n > 0; --n)
    cu_seqlens.push_back(min_of(cu_seqlens.back() + bytes.pick(0, 12), total));
  cu_seqlens.push_back(total);
  const bool spoiled = bytes.one_in(3);
  if (spoiled) weft::fuzz::spoil_entry(bytes, cu_seqlens);
  try {
    const weft::Tree tree = weft::Tree::from_sequences(tokens, cu_seqlens);
    const List rows = tree.rows_of_tokens(), edges = tree.edge_of_token(), cu = tree.cu_seqlens();
    expect(cu.back() - cu.front() == static_cast<Index>(rows.size()), "the tokens of a tree's sequences");
    const weft::TreeEdges all = tree.edges();
    for (std::size_t i = 0; i < rows.size(); ++i) {
      expect(tree.tokens()[at(rows[i])] == tokens[i + at(cu_seqlens.front())], "a token of a tree");
      const bool first = std::find(cu.begin(), cu.end(), static_cast<Index>(i)) != cu.end();
      expect((edges[i] == weft::kNoEdge) == first, "which tokens nobody predicts");
      if (!first)
        expect(all.rows[at(edges[i])] == rows[i - 1] && all.next_rows[at(edges[i])] == rows[i], "the edge of a token");
    }
  } catch (const weft::Error&) {
    expect(spoiled, "sequences are refused");
  }
}

// ---- caches of keys

void cache(ByteChoices& bytes) {
  List rooms = numbers(bytes, 5, 14), offsets{bytes.pick(0, 3)};
  for (const Index room : rooms) offsets.push_back(offsets.back() + room);
  const Index rows = offsets.back() + bytes.pick(0, 3);
  weft::check::Tensor k(weft::DType::f32, rows, 1, 8), v(weft::DType::f32, rows, 1, 8);
  List kept(rooms.size());  // rows of each sequence, as this function counts them
  try {
    weft::KvCache cache(k.view, v.view, offsets);
    for (Index step = bytes.pick(1, 6); step > 0; --step) {
      List counts;
      for (std::size_t i = 0; i < rooms.size(); ++i) counts.push_back(bytes.pick(0, 5));
      if (bytes.one_in(6)) weft::fuzz::spoil_entry(bytes, counts);
      weft::check::Tensor more(weft::DType::f32, min_of(max_of(sum(are_small(counts, 100) ? counts : List{}), 0), 200),
                               1, 8);
      try {
        cache.append(counts, more.view, more.view);
        for (std::size_t i = 0; i < kept.size(); ++i) kept[i] += counts[i];
      } catch (const weft::Error&) {  // nothing is written then
      }
      if (!rooms.empty() && bytes.one_in(3)) {
        const Index which = bytes.pick(0, static_cast<Index>(rooms.size()) - 1), left = hostile(bytes, kept[at(which)]);
        try {
          cache.keep(which, left);
          kept[at(which)] = left;
        } catch (const weft::Error&) {
        }
      }
      for (std::size_t i = 0; i < kept.size(); ++i) {
        const auto n = static_cast<Index>(i);
        expect(cache.used(n) == kept[i] && cache.room(n) == rooms[i] - kept[i] && kept[i] >= 0, "the rows of a cache");
        counts[i] = min_of(max_of(counts[i], 0), kept[i]);
      }
      const weft::Mask mask{.causal = true, .left = bytes.pick(-1, 6)};
      std::multiset<std::pair<Index, Index>> seen, wanted;
      for (const weft::Slice& s : cache.slices(counts, mask))
        for (Index q = s.q_begin; q < s.q_end; ++q)
          for (Index key = s.k_begin; key < s.k_end; ++key)
            if (sees(s, q, key)) seen.insert({q, key});
      Index q = 0;
      for (std::size_t i = 0; i < kept.size(); ++i)
        for (Index n = kept[i] - counts[i]; n < kept[i]; ++n, ++q)
          for (Index key = 0; key <= n; ++key)
            if (mask.left < 0 || n - key <= mask.left) wanted.insert({q, offsets[i] + key});
      expect(seen == wanted, "what queries on a cache see");
    }
  } catch (const weft::Error&) {
    expect(rows == 0, "a cache is refused");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  ByteChoices bytes(data, size);
  switch (bytes.pick(0, 5)) {
    case 0:
      pack(bytes);
      break;
    case 1:
      cut(bytes);
      break;
    case 2:
      attend(bytes);
      break;
    case 3:
      grow_tree(bytes);
      break;
    case 4:
      tree_of_sequences(bytes);
      break;
    default:
      cache(bytes);
  }
  return 0;
}
