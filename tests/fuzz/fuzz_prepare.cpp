// Bytes to what lies between a data loader and attention: documents in packs, a problem in micro-sequences through a
// K/V buffer, calls of a K/V cache. Right by a definition of a few lines, or a weft::Error; nothing else.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "bytes.h"
#include "check/attend.h"
#include "check/by_micro.h"
#include "check/by_schedule.h"
#include "index.h"
#include "weft/error.h"
#include "weft/kv_cache.h"
#include "weft/prepare.h"

namespace {

using weft::at;
using weft::Index;
using weft::fuzz::ByteChoices;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// Every token of every document once, in order, and no pack longer than it may be.
void check_packs(const std::vector<Index>& lengths, const weft::Packs& packs) {
  std::vector<Index> next(lengths.size(), 0);
  std::vector<std::vector<weft::Piece>> by_document(lengths.size());
  for (std::size_t p = 0; p < packs.packs.size(); ++p) {
    Index rows = 0, last = -1;
    for (const weft::Piece& piece : packs.packs[p]) {
      require(piece.document >= 0 && at(piece.document) < lengths.size(), "a piece of no document");
      require(piece.document >= last, "pieces of a pack are not in the order of their documents");
      last = piece.document;
      by_document[at(piece.document)].push_back(piece);
      rows += weft::ceil_div(piece.length, packs.options.multiple) * packs.options.multiple;
    }
    require(rows <= packs.options.budget, "a pack is longer than its budget");
    require(packs.stream(static_cast<Index>(p)).tokens() == packs.options.budget, "a stream of another length");
  }
  for (std::size_t d = 0; d < lengths.size(); ++d) {
    std::vector<bool> seen(at(lengths[d]), false);
    for (const weft::Piece& piece : by_document[d]) {
      require(piece.begin >= 0 && piece.length >= 0 && piece.begin + piece.length <= lengths[d],
              "a piece past its document");
      for (Index t = piece.begin; t < piece.begin + piece.length; ++t) {
        require(!seen[at(t)], "a token is packed twice");
        seen[at(t)] = true;
      }
    }
    for (const bool once : seen) require(once, "a token is not packed");
  }
}

void fuzz_packer(ByteChoices& bytes) {
  const bool spoiled = bytes.one_in(2);
  weft::PackOptions o{.budget = bytes.pick(8, 64),
                      .multiple = bytes.pick(1, 8),
                      .keep_order = bytes.one_in(4),
                      .too_long = weft::PackOptions::TooLong::split,
                      .pair_limit = 0};
  if (!o.keep_order && bytes.one_in(2)) o.pair_limit = 1 + static_cast<double>(bytes.pick(0, 20)) / 10;
  std::vector<Index> lengths(at(bytes.pick(0, 40)));
  for (Index& n : lengths) n = bytes.pick(0, o.budget / o.multiple * o.multiple);
  if (spoiled) {
    if (bytes.one_in(2)) o.too_long = weft::PackOptions::TooLong::refuse;
    weft::fuzz::spoil_entry(bytes, lengths);
    Index* const fields[] = {&o.budget, &o.multiple};
    if (Index& x = *fields[bytes.pick(0, 1)]; bytes.one_in(2)) x = weft::fuzz::hostile(bytes, x);
    if (bytes.one_in(8)) o.pair_limit = static_cast<double>(weft::fuzz::hostile(bytes, 1));
  }
  constexpr Index kMost = 1 << 16;  // packs of hostile sizes may be many
  for (const Index n : lengths)
    if (n > kMost && o.budget > 0 && n / o.budget > kMost) return;
  Index total = 0;
  for (const Index n : lengths) total += n > kMost ? kMost : n;
  if (total >= kMost) return;
  try {
    check_packs(lengths, pack_documents(lengths, o));
  } catch (const weft::Error& e) {
    if (!spoiled) require(false, e.what());
  }
}

void fuzz_micros(ByteChoices& bytes) {
  const bool spoiled = bytes.one_in(2);
  weft::check::Case c = in_micro_sequences(random_case(bytes));
  c.ranks = bytes.pick(1, 3);
  c.layout = weft::LayoutKind::contiguous;
  c.runs.clear();
  c.k_runs.clear();
  if (spoiled) weft::fuzz::spoil(c, bytes);
  weft::check::MicroWay way{.micros = bytes.pick(1, 5),
                            .kernel = bytes.one_in(2) ? "cpu.scalar" : "reference",
                            .checked = bytes.one_in(4),
                            .even_work = bytes.one_in(2),
                            .ahead = bytes.one_in(2),
                            .recomputed = bytes.one_in(2)};
  if (spoiled && bytes.one_in(4)) way.micros = weft::fuzz::hostile(bytes, way.micros);
  constexpr Index kMostMicros = 64;
  if (way.micros > kMostMicros) return;
  try {
    if (!weft::fuzz::small(c, 4) || c.ranks > 4) return;
    if (micro_refusal(c, problem_of(c), way) || refusal(c, way.kernel)) return;
    weft::check::Oracle oracle(c, weft::check::executor_arithmetic(c));
    const weft::check::AttendReport report = check_micro(oracle, way);
    for (const weft::check::Measure& m : report.measures)
      if (!(m.worst < 1)) {
        std::fprintf(stderr, "%s: %g of its bound at %s\nreproduce: weft verify %s --micro %lld\n", m.tensor.c_str(),
                     m.worst, m.where.c_str(), flags(c).c_str(), static_cast<long long>(way.micros));
        std::abort();
      }
  } catch (const weft::Error& e) {
    if (!spoiled) require(false, e.what());
  }
}

// Calls of a cache, some of them hostile, beside a list of what each sequence should hold.
void fuzz_cache(ByteChoices& bytes) {
  const Index sequences = bytes.pick(1, 4);
  std::vector<Index> offsets{0};
  for (Index i = 0; i < sequences; ++i) offsets.push_back(offsets.back() + bytes.pick(0, 9));
  std::vector<float> k(at(offsets.back()) + 1, -1), v(k);
  const auto view = [](std::vector<float>& x, Index rows) {
    return weft::thd(static_cast<void*>(x.data()), weft::DType::f32, rows, 1, 1);
  };
  weft::KvCache cache(view(k, offsets.back()), view(v, offsets.back()), offsets);
  std::vector<std::vector<float>> held(at(sequences));
  float next = 1;
  for (Index call = bytes.pick(1, 12); call > 0; --call) {
    const Index which = bytes.pick(0, sequences - 1);
    try {
      if (bytes.one_in(4)) {
        const Index used = bytes.one_in(4) ? weft::fuzz::hostile(bytes, 0) : bytes.pick(0, 9);
        cache.keep(which, used);
        require(used >= 0 && used <= static_cast<Index>(held[at(which)].size()), "rows are kept that are not there");
        held[at(which)].resize(at(used));
        continue;
      }
      std::vector<Index> counts(at(sequences));
      for (Index& n : counts) n = bytes.pick(0, 3);
      if (bytes.one_in(8)) weft::fuzz::spoil_entry(bytes, counts);
      Index rows = 0;
      for (const Index n : counts) rows += n > 0 && n < 100 ? n : 0;
      std::vector<float> fresh_k(at(rows) + 1), fresh_v(fresh_k);
      for (std::size_t i = 0; i < fresh_k.size(); ++i) fresh_k[i] = next++, fresh_v[i] = -fresh_k[i];
      cache.append(counts, view(fresh_k, rows), view(fresh_v, rows));
      std::size_t row = 0;
      for (std::size_t i = 0; i < counts.size(); ++i)
        for (Index n = 0; n < counts[i]; ++n) held[i].push_back(fresh_k[row++]);
      const std::vector<weft::Slice> slices = cache.slices(counts);
      for (const weft::Slice& s : slices)
        require(s.q_begin >= 0 && s.q_end <= rows && s.k_begin >= 0 && s.k_end <= offsets.back(),
                "a slice past the cache");
    } catch (const weft::Error&) {
    }
  }
  for (std::size_t i = 0; i < held.size(); ++i) {
    require(cache.used(static_cast<Index>(i)) == static_cast<Index>(held[i].size()),
            "a cache holds another number of rows");
    require(cache.room(static_cast<Index>(i)) == offsets[i + 1] - offsets[i] - static_cast<Index>(held[i].size()),
            "other room");
    for (std::size_t n = 0; n < held[i].size(); ++n)
      require(k[at(offsets[i]) + n] == held[i][n] && v[at(offsets[i]) + n] == -held[i][n], "a cache holds other rows");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  ByteChoices bytes(data, size);
  switch (bytes.pick(0, 2)) {
    case 0:
      fuzz_packer(bytes);
      break;
    case 1:
      fuzz_micros(bytes);
      break;
    default:
      fuzz_cache(bytes);
  }
  return 0;
}
