#include "kernel/sink_gradient.h"

#include <cmath>
#include <vector>

#include "device/device.h"
#include "index.h"
#include "kernel/check_args.h"
#include "kernel/reference/block.h"

namespace weft {

void sink_gradient(const BackwardArgs& rows, std::span<const Range> seeing, double* gradient) {
  const Index dim = rows.out.dim;
  if (rows.place.kind != DeviceKind::cpu)
    return device::sink_gradient(rows.place, rows.attention.sink, rows.lse, rows.out, rows.dout, gradient);
  std::vector<double> out(at(dim)), dout(out);
  for (const Range& range : seeing)
    for (Index row = range.begin; row < range.end; ++row)
      for (Index head = 0; head < rows.out.heads; ++head) {
        load_row(rows.out, row, head, out.data());
        load_row(rows.dout, row, head, dout.data());
        const double p = std::exp(sink_logit(rows.attention.sink, head) - load_one(rows.lse, row, head));
        gradient[head] -= p * reference::dot(out.data(), dout.data(), dim);
      }
}

}  // namespace weft
