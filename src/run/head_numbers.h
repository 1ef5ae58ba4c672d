// One number per head (max_logit, dsink): computed by each rank, all-reduced, and stored into a tensor [heads].
#pragma once

#include "run/workspace.h"
#include "weft/communicator.h"
#include "weft/device.h"

namespace weft::run {

class HeadNumbers {
 public:
  // Numbers start as `value`. They lie in one slot of the workspace, so only one object may exist at a time.
  HeadNumbers(const Place& place, Workspace& workspace, Index heads, Index ranks, double value);

  TensorView view() const;  // [heads] f64
  void reduce_into(Communicator& communicator, Reduce how, const TensorView& to);

 private:
  Place place_;
  Index heads_;
  double* numbers_;  // [heads], then [ranks, heads] for the all-gather of a GPU
};

}  // namespace weft::run
