// One forward and one backward of a schedule on ranks that share a GPU, as the driver saw them: which calls were made,
// when they returned, and what of the exchange ran under the ranks' own compute.
//   trace [ring | all_gather | exact]     exit 1 if a call waited for the GPU, or if nothing overlapped
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/kept.h"
#include "recorder.h"
#include "tensor.h"
#include "weft/executor.h"

namespace {

using namespace weft;
using bench::Called;
using bench::Ran;
using bench::Recorder;
using bench::Tensor;

constexpr Index kRanks = 4, kHeadsQ = 32, kHeadsK = 8, kDim = 128;

// What a rank has: its tensors, its stream, and that of what comes to it.
struct Rank {
  Rank(Index rows, std::uint32_t seed)
      : q(DType::bf16, rows, kHeadsQ, kDim, seed),
        k(DType::bf16, rows, kHeadsK, kDim, seed + 1),
        v(DType::bf16, rows, kHeadsK, kDim, seed + 2),
        dout(DType::bf16, rows, kHeadsQ, kDim, seed + 3),
        out(DType::bf16, rows, kHeadsQ, kDim),
        lse(DType::f32, rows, kHeadsQ, 1),
        dq(DType::bf16, rows, kHeadsQ, kDim),
        dk(DType::bf16, rows, kHeadsK, kDim),
        dv(DType::bf16, rows, kHeadsK, kDim) {}

  Tensor q, k, v, dout, out, lse, dq, dk, dv;
  cuda::Stream compute;
  cudaStream_t exchange = nullptr;
  std::uint64_t begin[2] = {}, end[2] = {};  // of the calls, by pass
  double alone[2] = {};                      // us of the calls before anything was recorded
};

Place place_of(const Rank& r) { return {DeviceKind::cuda, 0, r.compute.get()}; }

void call(Executor& executor, const Rank& r, Pass pass) {
  if (pass == Pass::forward)
    executor.forward({.q = r.q.view(), .k = r.k.view(), .v = r.v.view(), .out = r.out.view(), .lse = r.lse.view(),
                      .place = place_of(r)});
  else
    executor.backward({.q = r.q.view(), .k = r.k.view(), .v = r.v.view(), .dout = r.dout.view(), .out = r.out.view(),
                       .lse = r.lse.view(), .dq = r.dq.view(), .dk = r.dk.view(), .dv = r.dv.view(),
                       .place = place_of(r)});
}

// The streams that the communicators will take, one rank after another: kept ones come back, the last one first.
std::vector<cudaStream_t> coming_streams() {
  std::vector<std::unique_ptr<cuda::Stream>> some;
  std::vector<cudaStream_t> handles;
  for (Index r = 0; r < kRanks; ++r) some.push_back(std::make_unique<cuda::Stream>(true));
  for (const auto& s : some) handles.push_back(s->get());
  while (!some.empty()) some.pop_back();
  return handles;
}

void meet(Communicator& comm) {
  float token = 0;
  comm.all_reduce(&token, DType::f32, 1, Reduce::sum).wait();
}

bool is_compute(const Ran& r) { return r.name.ends_with("_kernel"); }
bool is_exchange(const Ran& r) { return r.name == "move_segments"; }
double us(std::uint64_t ns) { return static_cast<double>(ns) / 1000; }

// Nanoseconds of `what` during which one of `under` ran; those do not overlap each other.
std::uint64_t covered(const Ran& what, const std::vector<const Ran*>& under) {
  std::uint64_t sum = 0;
  for (const Ran* u : under) {
    const std::uint64_t begin = std::max(what.begin, u->begin), end = std::min(what.end, u->end);
    if (begin < end) sum += end - begin;
  }
  return sum;
}

bool waits(const Called& c) {
  for (const char* part : {"Synchronize", "cudaMemcpy_", "cudaMemset_", "cudaMalloc_", "cudaFree_", "cudaHostAlloc",
                           "cudaFreeHost", "cudaEventQuery", "cudaStreamQuery"})
    if (c.name.find(part) != std::string::npos) return true;
  return false;
}

class Report {
 public:
  Report(const Recorder& recorder, const std::vector<std::unique_ptr<Rank>>& ranks,
         const std::map<std::uint32_t, std::pair<Index, bool>>& streams)
      : recorder_(recorder), ranks_(ranks), streams_(streams) {}

  bool print(Pass pass) {
    const int p = pass == Pass::forward ? 0 : 1;
    first_ = ~std::uint64_t{0};
    std::uint64_t last = 0;
    for (const auto& r : ranks_) first_ = std::min(first_, r->begin[p]), last = std::max(last, r->end[p]);
    const std::uint64_t until = p == 0 ? ranks_.front()->begin[1] : ~std::uint64_t{0};  // streams are empty in between
    std::printf("%s\n", p == 0 ? "forward" : "backward");
    return calls(last) && timeline(p, until);
  }

 private:
  bool calls(std::uint64_t last) const {
    std::map<std::string, int> count;
    bool fine = true;
    for (const Called& c : recorder_.called) {
      if (c.begin < first_ || c.begin > last) continue;
      ++count[c.name.substr(0, c.name.rfind("_v"))];
      fine = fine && !waits(c);
    }
    std::printf("  calls of the CUDA runtime by all ranks:");
    for (const auto& [name, n] : count) std::printf(" %s %d", name.c_str(), n);
    std::printf("\n  that wait for the GPU: %s; the longest:", fine ? "none" : "SOME");
    std::vector<const Called*> longest;
    for (const Called& c : recorder_.called)
      if (c.begin >= first_ && c.begin <= last) longest.push_back(&c);
    std::sort(longest.begin(), longest.end(), [](const Called* a, const Called* b) {
      return a->end - a->begin > b->end - b->begin;
    });
    for (std::size_t i = 0; i < std::min<std::size_t>(longest.size(), 4); ++i)
      std::printf(" %s %.0f us at %.0f", longest[i]->name.c_str(), us(longest[i]->end - longest[i]->begin),
                  us(longest[i]->begin - first_));
    std::printf("\n");
    return fine;
  }

  bool timeline(int p, std::uint64_t until) const {
    std::uint64_t gpu_end = 0;
    bool overlapped = true;
    for (Index rank = 0; rank < kRanks; ++rank) {
      std::vector<const Ran*> compute, exchange, all;
      for (const Ran& r : recorder_.ran) {
        const auto at = streams_.find(r.stream);
        if (at == streams_.end() || at->second.first != rank || r.begin < first_ || r.begin >= until) continue;
        gpu_end = std::max(gpu_end, r.end);
        if (is_exchange(r) && at->second.second) exchange.push_back(&r), all.push_back(&r);
        if (is_compute(r)) compute.push_back(&r), all.push_back(&r);
      }
      std::uint64_t moved = 0, hidden = 0;
      for (const Ran* r : exchange) moved += r->end - r->begin, hidden += covered(*r, compute);
      std::printf("  rank %d: the call took %.0f us on the CPU (%.0f unobserved); exchange %.0f us, %.0f us of it under its own compute\n",
                  static_cast<int>(rank), us(ranks_[static_cast<std::size_t>(rank)]->end[p] -
                                             ranks_[static_cast<std::size_t>(rank)]->begin[p]),
                  ranks_[static_cast<std::size_t>(rank)]->alone[p], us(moved), us(hidden));
      overlapped = overlapped && hidden > 0;
      if (rank > 0) continue;
      std::sort(all.begin(), all.end(), [](const Ran* a, const Ran* b) { return a->begin < b->begin; });
      for (const Ran* r : all)
        std::printf("    %10.1f .. %10.1f us  %-10s %-18s %5.0f %% under compute\n", us(r->begin - first_),
                    us(r->end - first_), is_exchange(*r) ? "exchange" : "compute", r->name.c_str(),
                    is_exchange(*r) ? 100.0 * static_cast<double>(covered(*r, compute)) /
                                          static_cast<double>(std::max<std::uint64_t>(r->end - r->begin, 1))
                                    : 0.0);
    }
    std::printf("  the GPU was done after %.0f us; exchange under compute on every rank: %s\n", us(gpu_end - first_),
                overlapped ? "yes" : "NO");
    return overlapped;
  }

  const Recorder& recorder_;
  const std::vector<std::unique_ptr<Rank>>& ranks_;
  const std::map<std::uint32_t, std::pair<Index, bool>>& streams_;
  std::uint64_t first_ = 0;
};

int run(ScheduleKind kind) {
  const std::vector<Index> lengths = {16384, 8192, 4096, 4096};
  const Problem problem(Stream::from_lengths(lengths), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::dual_chunk, problem, kRanks);  // every rank has work in every step
  const ScheduleOptions options{.kind = kind, .head_groups = kind == ScheduleKind::all_gather ? 4 : 1};
  std::vector<std::unique_ptr<Rank>> ranks;
  for (Index r = 0; r < kRanks; ++r)
    ranks.push_back(std::make_unique<Rank>(layouts.q.rows(), static_cast<std::uint32_t>(10 * r + 1)));
  const std::vector<cudaStream_t> exchange = coming_streams();
  std::printf("%s of 32,768 tokens on %d ranks, causal, heads %d:%d, width %d, bf16\n", std::string(name(kind)).c_str(),
              static_cast<int>(kRanks), static_cast<int>(kHeadsQ), static_cast<int>(kHeadsK), static_cast<int>(kDim));

  void* scratch = nullptr;
  WEFT_CUDA(cudaMalloc(&scratch, 4096));
  std::unique_ptr<Recorder> recorder;
  std::atomic<Index> turn = 0;
  run_ranks(kRanks, [&](Communicator& comm) {
    Rank& mine = *ranks[static_cast<std::size_t>(comm.rank())];
    std::unique_ptr<Executor> executor;
    while (turn != comm.rank()) std::this_thread::yield();  // so that each has the stream that is known to come
    mine.exchange = exchange[static_cast<std::size_t>(comm.rank())];
    executor = std::make_unique<Executor>(
        comm, make_schedule(problem, layouts, comm.rank(), {kHeadsQ, kHeadsK}, options),
        ExecutorOptions{.kernel = "cuda.portable", .place = place_of(mine)});
    ++turn;
    for (int i = 0; i < 3; ++i) {  // the last one to be timed without the recorder
      for (int p = 0; p < 2; ++p) {
        const auto begin = std::chrono::steady_clock::now();
        call(*executor, mine, p == 0 ? Pass::forward : Pass::backward);
        mine.alone[p] = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
        meet(comm);
        if (comm.rank() == 0) WEFT_CUDA(cudaDeviceSynchronize());
        meet(comm);
      }
    }
    if (comm.rank() == 0) {
      WEFT_CUDA(cudaDeviceSynchronize());
      recorder = std::make_unique<Recorder>();
      for (std::size_t r = 0; r < ranks.size(); ++r) {  // so that streams are known by their memsets' sizes
        WEFT_CUDA(cudaMemsetAsync(scratch, 0, 1001 + 2 * r, ranks[r]->compute.get()));
        WEFT_CUDA(cudaMemsetAsync(scratch, 0, 1002 + 2 * r, ranks[r]->exchange));
      }
      WEFT_CUDA(cudaDeviceSynchronize());
    }
    meet(comm);
    for (int p = 0; p < 2; ++p) {
      mine.begin[p] = Recorder::now();
      call(*executor, mine, p == 0 ? Pass::forward : Pass::backward);
      mine.end[p] = Recorder::now();
      meet(comm);
      if (comm.rank() == 0) WEFT_CUDA(cudaDeviceSynchronize());
      meet(comm);
    }
    if (comm.rank() == 0) recorder->stop();
    meet(comm);
  });
  WEFT_CUDA(cudaFree(scratch));

  std::map<std::uint32_t, std::pair<Index, bool>> streams;  // rank, of exchanges
  for (const Ran& r : recorder->ran)
    if (r.name == "memset" && r.bytes >= 1001 && r.bytes < 1001 + 2 * kRanks)
      streams[r.stream] = {static_cast<Index>(r.bytes - 1001) / 2, (r.bytes - 1001) % 2 == 1};
  if (streams.size() != 2 * kRanks) {
    std::printf("only %zu of %d streams were seen\n", streams.size(), static_cast<int>(2 * kRanks));
    return 1;
  }
  Report report(*recorder, ranks, streams);
  const bool forward = report.print(Pass::forward), backward = report.print(Pass::backward);
  return forward && backward ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);  // streams that share a connection wait for each other
  try {
    return run(schedule_kind(argc > 1 ? argv[1] : "ring"));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "trace: %s\n", error.what());
    return 2;
  }
}
