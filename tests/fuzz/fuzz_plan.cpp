// Bytes to problem to plan to law. Whatever the bytes say, the library gives a right plan or a weft::Error.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>

#include "check/law.h"
#include "check/random_case.h"
#include "weft/error.h"

namespace {

using weft::Index;
using weft::check::Case;

class ByteChoices : public weft::check::Choices {
 public:
  ByteChoices(const std::uint8_t* data, std::size_t size) : data_(data), end_(data + size) {}
  Index pick(Index low, Index high) override { return low + static_cast<Index>(byte() % (high - low + 1)); }
  std::uint8_t byte() { return data_ == end_ ? 0 : *data_++; }

 private:
  const std::uint8_t *data_, *end_;
};

// Small numbers mostly, and now and then one from the edges of the type.
Index hostile(ByteChoices& bytes, Index near) {
  static constexpr Index kEdges[] = {-1, -2, INT64_MIN, INT64_MAX, weft::kMaxTokens, weft::kMaxTokens + 1,
                                     weft::kUnlimited, -weft::kUnlimited, INT64_MIN + 1, Index{1} << 32};
  const std::uint8_t b = bytes.byte();
  if (b < 200) return (near > -1000 && near < 1000 ? near : 0) + b % 5 - 2;
  return kEdges[b % std::size(kEdges)];
}

// Breaks one to three numbers of a valid case: the library must refuse it, or still be right.
void spoil(Case& c, ByteChoices& bytes) {
  for (Index n = bytes.pick(1, 3); n > 0; --n) {
    weft::check::Side& side = c.k && bytes.one_in(2) ? *c.k : c.q;
    const auto spoil_entry = [&](std::vector<Index>& v) {
      if (v.empty()) return;
      Index& x = v[static_cast<std::size_t>(bytes.pick(0, static_cast<Index>(v.size()) - 1))];
      x = hostile(bytes, x);
    };
    switch (bytes.pick(0, 9)) {
      case 0: spoil_entry(side.cu_seqlens); break;
      case 1: spoil_entry(side.cu_seqlens_padded); break;
      case 2: side.tokens = hostile(bytes, side.tokens.value_or(8)); break;
      case 3: c.mask.left = hostile(bytes, c.mask.left); break;
      case 4: c.mask.right = hostile(bytes, c.mask.right); break;
      case 5: c.mask.chunk = hostile(bytes, c.mask.chunk.value_or(2)); break;
      case 6: c.ranks = hostile(bytes, c.ranks); break;
      case 7:
        if (!side.cu_seqlens.empty()) side.cu_seqlens.pop_back();
        break;
      case 8:
        if (c.mask.slices && !c.mask.slices->empty()) {
          weft::Slice& s = c.mask.slices->front();
          Index* const fields[] = {&s.q_begin, &s.q_end, &s.k_begin, &s.k_end, &s.lo, &s.hi};
          Index& x = *fields[bytes.pick(0, 5)];
          x = hostile(bytes, x);
        }
        break;
      default:
        if (!c.runs.empty() && !c.runs.front().empty()) {
          weft::Run& r = c.runs.front().front();
          Index* const fields[] = {&r.row, &r.token, &r.count, &r.stride};
          Index& x = *fields[bytes.pick(0, 3)];
          x = hostile(bytes, x);
        }
    }
  }
}

// The brute-force check is for small problems; a spoiled one may ask for billions of tokens or a million ranks.
bool small(const Case& c) {
  const weft::Problem problem = weft::check::problem_of(c);
  const bool many_ranks = c.ranks > 64 && c.ranks <= (Index{1} << 20);  // more are refused, which is worth a try
  return problem.packing().q().tokens() <= 300 && problem.packing().k().tokens() <= 300 && !many_ranks;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  ByteChoices bytes(data, size);
  const bool spoiled = bytes.one_in(2);
  Case c = weft::check::random_case(bytes);
  if (spoiled) spoil(c, bytes);
  try {
    if (!small(c)) return 0;
    const weft::check::LawReport report = weft::check::check_law(c);
    if (report.violation) {
      std::fprintf(stderr, "%s\nreproduce: weft verify %s\n", report.violation->c_str(), flags(c).c_str());
      std::abort();
    }
  } catch (const weft::Error& e) {
    if (!spoiled) {
      std::fprintf(stderr, "a valid problem is refused: %s\nreproduce: weft verify %s\n", e.what(), flags(c).c_str());
      std::abort();
    }
  }
  return 0;
}
