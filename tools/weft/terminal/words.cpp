#include "terminal/words.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "terminal/numbers.h"

namespace weft::tool {
namespace {

std::string lengths_words(const Stream& stream) {
  constexpr std::size_t kListed = 8;
  const std::span<const Index> lengths = stream.used_lengths();
  std::string words;
  if (lengths.size() <= kListed) {
    words = fmt::format("{} tokens", fmt::join(lengths, ", "));
  } else {
    const auto [least, most] = std::minmax_element(lengths.begin(), lengths.end());
    words = fmt::format("{} tokens: {} to {} each", grouped(stream.used_tokens()), grouped(*least), grouped(*most));
  }
  const Index padding = stream.tokens() - stream.used_tokens();
  return padding > 0 ? fmt::format("{}, padding {}", words, grouped(padding)) : words;
}

}  // namespace

std::string documents_words(const Packing& packing) {
  const Index n = packing.sequences();
  const std::string count = draw::counted(n, "document");
  if (n == 0) return count;
  if (packing.self()) return fmt::format("{} ({})", count, lengths_words(packing.q()));
  return fmt::format("{} (queries {}; keys {})", count, lengths_words(packing.q()), lengths_words(packing.k()));
}

std::string problem_words(const check::Case& c, const Problem& problem) {
  return fmt::format("{} on {} rank{}: layout {}, mask {}", documents_words(problem.packing()), grouped(c.ranks),
                     c.ranks == 1 ? "" : "s", name(c.layout), mask_words(c.mask));
}

std::string attention_words(const check::Case& c) {
  return fmt::format("heads {}:{}, dim {}:{}, {}", c.heads_q, c.heads_k, c.dim_qk, c.dim_v, name(c.dtype));
}

}  // namespace weft::tool
