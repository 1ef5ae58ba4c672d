// A problem of any size as a table: a line a rank, or least, mean and most of many ranks.
#pragma once

#include "check/cases/case.h"
#include "explain/loads.h"

namespace weft::tool {

void print_table(const check::Case& c, const Loads& loads);
// "imbalance 1.043: the busiest rank has 4.3 % more pairs than the mean"
std::string imbalance_words(double imbalance);

}  // namespace weft::tool
