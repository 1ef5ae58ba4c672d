// Lengths of documents, as `--docs` gives them: a list, or a distribution.
#pragma once

#include <string_view>
#include <vector>

#include "weft/config.h"

namespace weft::tool {

// "256,512,1024", or "lognormal:count=64,median=2400,sigma=1,min=16,max=16384": exp(normal) around the median, kept
// inside [min, max]. Or "published:tokens=1048576,max=196608": documents as in published long-context training data
// until they make up so many tokens; the last one is cut. The same seed gives the same lengths on every platform.
std::vector<Index> parse_lengths(std::string_view flag, std::string_view text, unsigned long long seed);

}  // namespace weft::tool
