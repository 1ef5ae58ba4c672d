// The bf16 tensors of one rank, random where they are inputs, and their copies on its GPU.
#pragma once

#include "ranks.h"

namespace weft::test {

struct RankStep : RankTensors<> {
  RankStep(const RankSizes& s, const Place& place, Index rank)
      : RankTensors<>(s, static_cast<unsigned>(rank)), mirror(place), on_gpu(args(mirror)) {
    on_gpu.forward.max_logit = mirror.out(max_logit.view);
    mirror.send();
  }
  void run_both(Executor& executor) const {
    executor.forward(on_gpu.forward);
    executor.backward(on_gpu.backward);
  }

  check::DeviceMirror mirror;
  RankArgs on_gpu;
};

// All ranks have come here.
inline void meet(Communicator& comm) {
  float token = 0;
  comm.all_reduce(&token, DType::f32, 1, Reduce::sum).wait();
}

}  // namespace weft::test
