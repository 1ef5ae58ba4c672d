// Random problems of thousands of tokens: those whose sums are long. Few heads and narrow ones, so that many can be
// tried.
#pragma once

#include "check/cases/random_case.h"

namespace weft::check {

// Both inclusive.
struct Sizes {
  Index least = 4000, most = 20000;
};

// A valid case with so many tokens on the query side, padding aside: one document, some, or many; any mask, layout (or
// the one given) and attention feature.
Case random_large_case(Choices& choices, const Sizes& sizes, std::optional<LayoutKind> layout = {});

}  // namespace weft::check
