// The gradient of the sink, which enters the softmax of whole rows: it is made of finished rows, not of parts of keys.
#pragma once

#include <span>

#include "weft/attention.h"

namespace weft {

// gradient[head] = -sum over rows of exp(sink - lse)·(out·dout), f64, in the place of `rows`; it must be zeros. On the
// CPU over `seeing` alone, the rows that see keys; on a GPU over all, because rows without keys have out = 0 and their
// dout is not used.
void sink_gradient(const BackwardArgs& rows, std::span<const Range> seeing, double* gradient);

}  // namespace weft
