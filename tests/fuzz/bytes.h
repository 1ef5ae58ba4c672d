// Problems from a fuzzer's bytes, and ways to spoil them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include "check/cases/random_case.h"
#include "index.h"

namespace weft::fuzz {

class ByteChoices : public check::Choices {
 public:
  ByteChoices(const std::uint8_t* data, std::size_t size) : data_(data), end_(data + size) {}
  Index pick(Index low, Index high) override { return low + static_cast<Index>(byte() % (high - low + 1)); }
  std::uint8_t byte() { return data_ == end_ ? 0 : *data_++; }

 private:
  const std::uint8_t *data_, *end_;
};

// Small numbers mostly, and now and then one from the edges of the type.
inline Index hostile(ByteChoices& bytes, Index near) {
  static constexpr Index kEdges[] = {-1,         -2,          INT64_MIN,     INT64_MAX,     kMaxTokens, kMaxTokens + 1,
                                     kUnlimited, -kUnlimited, INT64_MIN + 1, Index{1} << 32};
  const std::uint8_t b = bytes.byte();
  if (b < 200) return (near > -1000 && near < 1000 ? near : 0) + b % 5 - 2;
  return kEdges[b % std::size(kEdges)];
}

inline void spoil_entry(ByteChoices& bytes, std::vector<Index>& v) {
  if (v.empty()) return;
  Index& x = v[at(bytes.pick(0, static_cast<Index>(v.size()) - 1))];
  x = hostile(bytes, x);
}

inline void spoil_slice(ByteChoices& bytes, Slice& s) {
  Index* const fields[] = {&s.q_begin, &s.q_end, &s.k_begin, &s.k_end, &s.lo, &s.hi};
  Index& x = *fields[bytes.pick(0, 5)];
  x = hostile(bytes, x);
}

// Breaks one to three numbers of a valid case: the library must refuse it, or still be right.
inline void spoil(check::Case& c, ByteChoices& bytes) {
  c.tree.reset();  // what is spoiled is no longer the tree's
  for (Index n = bytes.pick(1, 3); n > 0; --n) {
    check::Side& side = c.k && bytes.one_in(2) ? *c.k : c.q;
    switch (bytes.pick(0, 9)) {
      case 0:
        spoil_entry(bytes, side.cu_seqlens);
        break;
      case 1:
        spoil_entry(bytes, side.cu_seqlens_padded);
        break;
      case 2:
        side.tokens = hostile(bytes, side.tokens.value_or(8));
        break;
      case 3:
        c.mask.left = hostile(bytes, c.mask.left);
        break;
      case 4:
        c.mask.right = hostile(bytes, c.mask.right);
        break;
      case 5:
        c.mask.chunk = hostile(bytes, c.mask.chunk.value_or(2));
        break;
      case 6:
        c.ranks = hostile(bytes, c.ranks);
        break;
      case 7:
        if (!side.cu_seqlens.empty()) side.cu_seqlens.pop_back();
        break;
      case 8:
        if (c.mask.slices && !c.mask.slices->empty()) spoil_slice(bytes, c.mask.slices->front());
        break;
      default:
        if (!c.runs.empty() && !c.runs.front().empty()) {
          Run& r = c.runs.front().front();
          Index* const fields[] = {&r.row, &r.token, &r.count, &r.stride};
          Index& x = *fields[bytes.pick(0, 3)];
          x = hostile(bytes, x);
        }
    }
  }
}

// Brute force is for small problems; a spoiled one may ask for billions of tokens or a million ranks.
inline bool small(const check::Case& c, Index most_ranks) {
  const Problem problem = check::problem_of(c);
  const bool many_ranks = c.ranks > most_ranks && c.ranks <= (Index{1} << 20);  // more are refused, worth a try
  return problem.packing().q().tokens() <= 300 && problem.packing().k().tokens() <= 300 && !many_ranks;
}

}  // namespace weft::fuzz
