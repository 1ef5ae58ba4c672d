// A number a head: made by this rank, reduced over all of them, written into a tensor [heads].
#pragma once

#include "run/workspace.h"
#include "weft/communicator.h"
#include "weft/device.h"

namespace weft::run {

class HeadNumbers {
 public:
  // All of them `value` at first. Lies in the workspace, so there is one at a time.
  HeadNumbers(const Place& place, Workspace& workspace, Index heads, Index ranks, double value);

  TensorView view() const;  // [heads] f64
  void reduce_into(Communicator& communicator, Reduce how, const TensorView& to);

 private:
  Place place_;
  Index heads_;
  double* numbers_;  // [heads], and where all ranks' come together [ranks, heads]
};

}  // namespace weft::run
