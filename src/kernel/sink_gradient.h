// The gradient of the sink, which enters the softmax of whole rows: it is made of finished rows, not of parts of keys.
#pragma once

#include <span>

#include "weft/attention.h"

namespace weft {

// Finished rows of a backward, all in `place`.
struct SinkRows {
  Sink sink;
  ConstTensorView dout, out, lse;  // [tq, hq, dv], [tq, hq, dv], [tq, hq]
  Place place;
};

// gradient[head] = -sum over rows of exp(sink - lse)·(out·dout), f64, in `place`; it must be zeros. On the CPU over
// `seeing` alone, the rows that see keys; on a GPU over all, because rows without keys have out = 0 and their dout is
// not used.
void sink_gradient(const SinkRows& rows, std::span<const Range> seeing, double* gradient);

}  // namespace weft
