// Attention layers of published models, for predictions: heads, widths, layers and their masks.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "weft/config.h"
#include "weft/mask.h"

namespace weft {

// Layers of a model that attend alike.
struct ModelLayers {
  Index count = 1;
  Mask mask = {.causal = true};
};

// The attention of a published model.
struct Model {
  std::string_view name;
  Index heads_q = 1, heads_k = 1, dim_qk = 128, dim_v = 128;
  std::vector<ModelLayers> layers;
  std::string_view source;  // hf.co/..: config.json of that model
  bool sink = false;        // learnable, one number a query head
  Index latent = 0;         // numbers a token that K and V of all heads are made of; 0: they are not

  Index layer_count() const {
    Index count = 0;
    for (const ModelLayers& l : layers) count += l.count;
    return count;
  }
};

// The models that Weft knows; src/cost/models.cpp has a line for each.
WEFT_API std::span<const Model> models();
// One of them by its name; the Error for another name lists them.
WEFT_API const Model& model(std::string_view name);

}  // namespace weft
