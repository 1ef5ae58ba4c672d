// The core's errors name functions and fields of C++; this replaces them by what they are called in Python.
#include <array>
#include <string>
#include <string_view>

#include "module.h"

namespace weft::python {
namespace {

struct Word {
  std::string_view core, here;
};

constexpr std::array kWords = {
    Word{"give Attention::head_map", "give head_map"},
    Word{"give make_schedule the same Heads::map", "give every call the same head_map"},
    Word{"sink.logits", "sink"},
    Word{"Sink::learnable(logits)", "an array as the sink"},
    Word{"Packing::padded_to", "Packing.padded_to"},
    Word{"Stream::padded_to", "Packing.padded_to"},
    Word{"Layout::explicit_runs", "weft.Layout.explicit"},
    Word{"Layout::dual_chunk", "layout dual_chunk"},
    Word{"Layout::shard", "weft.shard"},
    Word{"KvBuffer::begin", "KvBuffer.begin"},
    Word{"give KvBufferOptions::rows = ", "give the buffer rows = "},
    Word{"PackOptions::TooLong::split", "split=True"},
    Word{"MicroSplit::Remainder::pad", "pad=True"},
    Word{"KeyOrder::rank", "key_order='rank'"},
    Word{"Tree::separate_tokens", "tree.separate_tokens"},
    Word{"Mask::slices", "Mask(slices=...)"},
};

}  // namespace

std::string in_python(std::string said) {
  if (said.find("::") == said.npos && said.find("sink.logits") == said.npos) return said;
  for (const Word& word : kWords)
    for (std::size_t at = said.find(word.core); at != said.npos; at = said.find(word.core, at + word.here.size()))
      said.replace(at, word.core.size(), word.here);
  return said;
}

}  // namespace weft::python
