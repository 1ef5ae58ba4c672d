// A problem in words, for headings.
#pragma once

#include <string>

#include "check/cases/case.h"
#include "draw/figure.h"

namespace weft::tool {

std::string documents_words(const Packing& packing);  // "3 documents (8, 5, 11 tokens)"
using draw::mask_words;                               // "causal, window (512, 0)"
// The heading of every verb: documents, ranks, layout, mask.
std::string problem_words(const check::Case& c, const Problem& problem);
std::string attention_words(const check::Case& c);  // "heads 32:8, dim 128:128, bf16"

}  // namespace weft::tool
