#include "weft/models.h"

#include "text.h"
#include "weft/error.h"

namespace weft {
namespace {

ModelLayers full(Index count) { return {.count = count}; }
// A query sees so many keys, its own among them.
ModelLayers window(Index count, Index keys) {
  return {.count = count, .mask = {.causal = true, .left = keys - 1, .right = 0}};
}
ModelLayers chunked(Index count, Index size) { return {.count = count, .mask = {.causal = true, .chunk = size}}; }

}  // namespace

std::span<const Model> models() {
  static const std::vector<Model> all = {
      {"llama3-70b", 64, 8, 128, 128, {full(80)}, "The Llama 3 Herd of Models, arXiv 2407.21783, table 3"},
      // Every fourth layer, the one without RoPE, attends to all.
      {"llama4-scout", 40, 8, 128, 128, {chunked(36, 8192), full(12)}, "hf.co/meta-llama/Llama-4-Scout-17B-16E"},
      {"gpt-oss-120b", 64, 8, 64, 64, {window(18, 128), full(18)}, "hf.co/openai/gpt-oss-120b", true},
      // MLA as it is trained: K and V of every head are made from the latent, keys of 128 and 64 (RoPE) numbers.
      {"deepseek-v3",
       128,
       128,
       192,
       128,
       {full(61)},
       "DeepSeek-V3 Technical Report, arXiv 2412.19437, section 4.2",
       false,
       512 + 64},
      {"qwen3-235b", 64, 4, 128, 128, {full(94)}, "Qwen3 Technical Report, arXiv 2505.09388, table 2"}};
  return all;
}

const Model& model(std::string_view name) {
  std::string names;
  for (const Model& m : models()) {
    if (m.name == name) return m;
    names += text(names.empty() ? "" : ", ", m.name);
  }
  throw Error(text("there is no model '", name, "'"), text("use one of ", names));
}

}  // namespace weft
