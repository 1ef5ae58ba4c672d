// Random problems, drawn from any source of choices: a random engine, a shrinking property test, a fuzzer's bytes.
#pragma once

#include <functional>
#include <optional>
#include <random>
#include <vector>

#include "check/cases/case.h"

namespace weft::check {

class Choices {
 public:
  virtual ~Choices() = default;
  virtual Index pick(Index low, Index high) = 0;  // both inclusive; shrinking and running out both tend to `low`

  bool one_in(Index n) { return pick(0, n - 1) == n - 1; }
};

class RandomChoices : public Choices {
 public:
  explicit RandomChoices(unsigned long long seed) : engine_(seed) {}
  Index pick(Index low, Index high) override {
    // Not uniform_int_distribution: its results differ between standard libraries, and a seed should not.
    const auto span = static_cast<unsigned long long>(high - low) + 1;
    return low + static_cast<Index>(engine_() % span);
  }

 private:
  std::mt19937_64 engine_;
};

// Parts of a case. Each makes the same choices in the same order for small and for large problems.

// At most so many rows before the first document and after the last, and behind each document.
struct Gaps {
  Index ends, padding;
};
// Sequences of the given lengths, padded by nothing, by anything, or to a multiple that the layout asks for.
Side random_side(Choices& choices, Index sequences, const std::function<Index(Index)>& length_of, Index multiple,
                 const Gaps& gaps);
// Tokens of the documents that are not empty.
std::vector<Range> documents_of(const Side& side);
// Runs of an explicit layout: blocks of the stream in random order on random ranks, rows with gaps between them; or
// residue classes of a stride.
std::vector<std::vector<Run>> random_runs(Choices& choices, const Side& side, Index ranks, Index stride,
                                          Index longest = 12);
// Those of the case, if its layout is explicit.
void choose_runs(Choices& choices, Case& to, Index longest);
// Heads, dims, dtype, scale, softcap and sink; at most so many query heads for each K/V head.
void choose_attention(Choices& choices, Case& to, Index largest_group);
// Slices anywhere, across sequences too, no two of which share a pair. Looks at the case's documents.
std::vector<Slice> random_slices(Choices& choices, const Case& from);

// A valid case of some tens of tokens: any packing, mask, layout (or the one given) and attention feature.
Case random_case(Choices& choices, std::optional<LayoutKind> layout = {});

// Random problems of thousands of tokens: those whose sums are long. Few heads and narrow ones, so that many can be
// tried.

// Both inclusive.
struct Sizes {
  Index least = 4000, most = 20000;
};

// A valid case with so many tokens on the query side, padding aside: one document, some, or many; any mask, layout (or
// the one given) and attention feature.
Case random_large_case(Choices& choices, const Sizes& sizes, std::optional<LayoutKind> layout = {});

}  // namespace weft::check
