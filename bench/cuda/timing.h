// How long work takes in a stream, without the launches' own time on the host: captured, replayed, timed by events.
#pragma once

#include <algorithm>
#include <vector>

#include <cuda_runtime.h>

#include "cuda/runtime.h"

namespace weft::bench {

// `calls` calls of work(i), i = 0, 1, ..., as a graph.
class Replay {
 public:
  template <class F>
  Replay(cudaStream_t stream, F&& work, int calls = 20) : stream_(stream), calls_(calls) {
    work(0);
    WEFT_CUDA(cudaStreamSynchronize(stream));
    cudaGraph_t graph = nullptr;
    WEFT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) work(i);
    WEFT_CUDA(cudaStreamEndCapture(stream, &graph));
    WEFT_CUDA(cudaGraphInstantiate(&exec_, graph, 0));
    WEFT_CUDA(cudaGraphDestroy(graph));
    WEFT_CUDA(cudaEventCreate(&begin_));
    WEFT_CUDA(cudaEventCreate(&end_));
  }
  ~Replay() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaGraphExecDestroy(exec_);
  }
  Replay(const Replay&) = delete;

  // Microseconds a call.
  double once() {
    WEFT_CUDA(cudaEventRecord(begin_, stream_));
    WEFT_CUDA(cudaGraphLaunch(exec_, stream_));
    WEFT_CUDA(cudaEventRecord(end_, stream_));
    WEFT_CUDA(cudaEventSynchronize(end_));
    float ms = 0;
    WEFT_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return 1000.0 * static_cast<double>(ms) / calls_;
  }

 private:
  cudaStream_t stream_;
  int calls_;
  cudaGraphExec_t exec_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

inline constexpr int kWarmUps = 3;

// Microseconds of one call: the median of `rounds` replays.
template <class F>
double microseconds(cudaStream_t stream, F&& work, int rounds = 15) {
  Replay replay(stream, work);
  std::vector<double> times;
  for (int r = 0; r < rounds + kWarmUps; ++r) {
    const double us = replay.once();
    if (r >= kWarmUps) times.push_back(us);
  }
  return median(times);
}

struct Beside {
  double us, other_us, share;  // share: other_us / us, the median of each round's own
};

// The same in turns with something else, so that both see the same state of the machine.
template <class F>
Beside microseconds_beside(cudaStream_t stream, Replay& other, F&& work, int rounds = 15) {
  Replay replay(stream, work);
  std::vector<double> times, others, shares;
  for (int r = 0; r < rounds + kWarmUps; ++r) {
    const double b = other.once(), a = replay.once();
    if (r < kWarmUps) continue;
    times.push_back(a);
    others.push_back(b);
    shares.push_back(b / a);
  }
  return {median(times), median(others), median(shares)};
}

}  // namespace weft::bench
