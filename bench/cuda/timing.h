// How long work takes in a stream, without the launches' own time on the host: captured, replayed, timed by events.
#pragma once

#include <algorithm>
#include <vector>

#include <cuda_runtime.h>

#include "cuda/check.h"

namespace weft::bench {

// Microseconds of one call of `work(i)`, i = 0, 1, ...: the median of `rounds` replays of a graph of `calls` of them.
template <class F>
double microseconds(cudaStream_t stream, F&& work, int calls = 20, int rounds = 15) {
  work(0);
  WEFT_CUDA(cudaStreamSynchronize(stream));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  WEFT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) work(i);
  WEFT_CUDA(cudaStreamEndCapture(stream, &graph));
  WEFT_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin = nullptr, end = nullptr;
  WEFT_CUDA(cudaEventCreate(&begin));
  WEFT_CUDA(cudaEventCreate(&end));
  std::vector<double> times;
  for (int r = 0; r < rounds + 3; ++r) {
    WEFT_CUDA(cudaEventRecord(begin, stream));
    WEFT_CUDA(cudaGraphLaunch(exec, stream));
    WEFT_CUDA(cudaEventRecord(end, stream));
    WEFT_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    WEFT_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (r >= 3) times.push_back(1000.0 * static_cast<double>(ms) / calls);  // the first ones warm up
  }
  std::sort(times.begin(), times.end());
  WEFT_CUDA(cudaEventDestroy(begin));
  WEFT_CUDA(cudaEventDestroy(end));
  WEFT_CUDA(cudaGraphExecDestroy(exec));
  WEFT_CUDA(cudaGraphDestroy(graph));
  return times[times.size() / 2];
}

}  // namespace weft::bench
