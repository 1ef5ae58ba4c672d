// A small problem drawn whole: who holds which tokens, who sees whom, and every rank's slices.
#pragma once

#include "check/cases/case.h"
#include "explain/loads.h"

namespace weft::tool {

// Fits a screen: a line for each query, a column or two for each key, a letter for each rank.
bool fits_picture(const check::Case& c, const Problem& problem, const Layouts& layouts);
std::string picture_limits();

void draw_picture(const check::Case& c, const Problem& problem, const Layouts& layouts, KeyOrder order,
                  const Loads& loads);

}  // namespace weft::tool
