// What a model sets of attention.
#pragma once

#include <optional>
#include <vector>

#include "tensor.h"
#include "weft/attention.h"

namespace weft::python {

// Keeps the sink's memory alive.
struct Settings {
  std::optional<double> scale;
  double softcap = 0;
  std::optional<Array> sink;
  bool off_by_one = false;
  std::vector<Index> head_map;

  Attention attention() const {
    Attention out{.scale = scale, .softcap = softcap, .head_map = head_map};
    if (sink) out.sink = Sink::learnable(per_head_view(*sink, "sink"));
    if (off_by_one) out.sink = Sink::off_by_one();
    return out;
  }
};

}  // namespace weft::python
