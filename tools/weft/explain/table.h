// A problem of any size as a table: a line a rank, or least, mean and most of many ranks.
#pragma once

#include "check/cases/case.h"
#include "explain/shares.h"

namespace weft::tool {

void print_table(const check::Case& c, const Shares& shares);
// "balance 1.043: the busiest rank has 4.3 % more pairs than the mean"
std::string balance_words(double balance);

}  // namespace weft::tool
