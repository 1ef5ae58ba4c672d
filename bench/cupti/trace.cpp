// One forward and one backward of a schedule on ranks that share a GPU, as CUPTI records them: which calls were made,
// when they returned, and how much of the exchange overlapped with the ranks' own compute.
//   trace [ring | all_gather | exact] [HQ:HK]
// Exits with 1 if a call waited for the GPU, if the exchange of a rank overlapped with no compute, or if that of no
// rank overlapped with its own. With the default of few heads the kernels of all ranks run concurrently, as if each
// rank had a smaller GPU of its own; with many heads the ranks' kernels run one after another.
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

#include "cuda/handle_pool.h"
#include "recorder.h"
#include "tensor.h"
#include "weft/executor.h"

namespace {

using namespace weft;
using bench::Called;
using bench::Ran;
using bench::Recorder;
using bench::Tensor;

constexpr Index kRanks = 4, kDim = 128;

struct Question {
  ScheduleKind kind = ScheduleKind::ring;
  Index heads_q = 1, heads_k = 1;
};

// A rank's tensors, its compute stream and its exchange stream.
struct Rank {
  Rank(const Question& of, Index rows, std::uint32_t seed)
      : q(DType::bf16, rows, of.heads_q, kDim, seed),
        k(DType::bf16, rows, of.heads_k, kDim, seed + 1),
        v(DType::bf16, rows, of.heads_k, kDim, seed + 2),
        dout(DType::bf16, rows, of.heads_q, kDim, seed + 3),
        out(DType::bf16, rows, of.heads_q, kDim),
        lse(DType::f32, rows, of.heads_q, 1),
        dq(DType::bf16, rows, of.heads_q, kDim),
        dk(DType::bf16, rows, of.heads_k, kDim),
        dv(DType::bf16, rows, of.heads_k, kDim) {}

  Tensor q, k, v, dout, out, lse, dq, dk, dv;
  cuda::PooledStream compute;
  cudaStream_t exchange = nullptr;
  std::uint64_t begin[2] = {}, end[2] = {};  // of the calls, by pass
  double alone[2] = {};                      // us of the calls without the recorder
};

Place place_of(const Rank& r) { return {DeviceKind::cuda, 0, r.compute.get()}; }

void call(Executor& executor, const Rank& r, Pass pass) {
  if (pass == Pass::forward)
    executor.forward({.q = r.q.view(),
                      .k = r.k.view(),
                      .v = r.v.view(),
                      .out = r.out.view(),
                      .lse = r.lse.view(),
                      .place = place_of(r)});
  else
    executor.backward({.q = r.q.view(),
                       .k = r.k.view(),
                       .v = r.v.view(),
                       .dout = r.dout.view(),
                       .out = r.out.view(),
                       .lse = r.lse.view(),
                       .dq = r.dq.view(),
                       .dk = r.dk.view(),
                       .dv = r.dv.view(),
                       .place = place_of(r)});
}

// The streams that the communicators will get, rank by rank: the pool returns the last one first.
std::vector<cudaStream_t> coming_streams() {
  std::vector<std::unique_ptr<cuda::PooledStream>> some;
  std::vector<cudaStream_t> handles;
  for (Index r = 0; r < kRanks; ++r) some.push_back(std::make_unique<cuda::PooledStream>(true));
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

// Nanoseconds of `what` that overlap at least one of `under`, which are sorted by begin.
std::uint64_t covered(const Ran& what, const std::vector<const Ran*>& under) {
  std::uint64_t sum = 0, at = what.begin;
  for (const Ran* u : under) {
    const std::uint64_t begin = std::max(at, u->begin), end = std::min(what.end, u->end);
    if (begin >= end) continue;
    sum += end - begin;
    at = end;
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
    std::sort(longest.begin(), longest.end(),
              [](const Called* a, const Called* b) { return a->end - a->begin > b->end - b->begin; });
    for (std::size_t i = 0; i < std::min<std::size_t>(longest.size(), 4); ++i)
      std::printf(" %s %.0f us at %.0f", longest[i]->name.c_str(), us(longest[i]->end - longest[i]->begin),
                  us(longest[i]->begin - first_));
    std::printf("\n");
    return fine;
  }

  bool timeline(int p, std::uint64_t until) const {
    std::vector<std::vector<const Ran*>> compute(kRanks), exchange(kRanks);
    std::vector<const Ran*> all;  // compute of all ranks
    std::uint64_t done = 0;
    for (const Ran& r : recorder_.ran) {
      const auto at = streams_.find(r.stream);
      if (at == streams_.end() || r.begin < first_ || r.begin >= until) continue;
      const auto rank = static_cast<std::size_t>(at->second.first);
      done = std::max(done, r.end);
      if (is_exchange(r) && at->second.second) exchange[rank].push_back(&r);
      if (!is_compute(r)) continue;
      compute[rank].push_back(&r);
      all.push_back(&r);
    }
    const auto by_begin = [](const Ran* a, const Ran* b) { return a->begin < b->begin; };
    for (auto* list : {&compute, &exchange})
      for (auto& some : *list) std::sort(some.begin(), some.end(), by_begin);
    std::sort(all.begin(), all.end(), by_begin);
    bool every = true, some = false;
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank) {
      std::uint64_t moved = 0, own = 0, any = 0;
      for (const Ran* r : exchange[rank])
        moved += r->end - r->begin, own += covered(*r, compute[rank]), any += covered(*r, all);
      std::printf(
          "  rank %zu: the call took %.0f us on the CPU (%.0f unobserved); exchange %.0f us, overlapped by its own "
          "compute %.0f us, by any %.0f us\n",
          rank, us(ranks_[rank]->end[p] - ranks_[rank]->begin[p]), ranks_[rank]->alone[p], us(moved), us(own), us(any));
      every = every && any > 0;
      some = some || own > 0;
    }
    std::vector<const Ran*> first = compute[0];
    first.insert(first.end(), exchange[0].begin(), exchange[0].end());
    std::sort(first.begin(), first.end(), by_begin);
    std::printf("  rank 0, from .. to in us:\n");
    for (const Ran* r : first) {
      std::printf("    %9.1f .. %9.1f  %s", us(r->begin - first_), us(r->end - first_), r->name.c_str());
      if (is_exchange(*r))
        std::printf(", %.0f %% overlapped by its own compute",
                    100 * us(covered(*r, compute[0])) / us(r->end - r->begin));
      std::printf("\n");
    }
    std::printf("  the GPU was done after %.0f us; exchange overlapped by compute: %s\n", us(done - first_),
                every && some ? "yes" : "NO");
    return every && some;
  }

  const Recorder& recorder_;
  const std::vector<std::unique_ptr<Rank>>& ranks_;
  const std::map<std::uint32_t, std::pair<Index, bool>>& streams_;
  std::uint64_t first_ = 0;
};

int run(const Question& of) {
  const std::vector<Index> lengths = {16384, 8192, 4096, 4096};
  const Problem problem(Stream::from_lengths(lengths), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::dual_chunk, problem, kRanks);  // every rank has work in every step
  const ScheduleOptions options{.kind = of.kind, .head_groups = of.kind == ScheduleKind::all_gather ? 4 : 1};
  std::vector<std::unique_ptr<Rank>> ranks;
  for (Index r = 0; r < kRanks; ++r)
    ranks.push_back(std::make_unique<Rank>(of, layouts.q.rows(), static_cast<std::uint32_t>(10 * r + 1)));
  const std::vector<cudaStream_t> exchange = coming_streams();
  std::printf("%s, 32,768 tokens in 4 documents on 4 ranks, causal, heads %d:%d, width 128, bf16\n",
              std::string(name(of.kind)).c_str(), static_cast<int>(of.heads_q), static_cast<int>(of.heads_k));

  void* scratch = nullptr;
  WEFT_CUDA(cudaMalloc(&scratch, 4096));
  std::unique_ptr<Recorder> recorder;
  std::atomic<Index> turn = 0;
  run_ranks(kRanks, [&](Communicator& comm) {
    Rank& mine = *ranks[static_cast<std::size_t>(comm.rank())];
    std::unique_ptr<Executor> executor;
    while (turn != comm.rank()) std::this_thread::yield();  // so that each rank gets the expected stream
    mine.exchange = exchange[static_cast<std::size_t>(comm.rank())];
    executor = std::make_unique<Executor>(
        comm, make_schedule(problem, layouts, comm.rank(), {of.heads_q, of.heads_k}, options),
        ExecutorOptions{.kernel = "cuda.portable", .place = place_of(mine)});
    ++turn;
    for (int i = 0; i < 3; ++i) {  // the last iteration is timed without the recorder
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
    }
    meet(comm);
    for (const Pass pass : {Pass::forward, Pass::backward}) call(*executor, mine, pass);  // warm-up with the recorder
    meet(comm);
    if (comm.rank() == 0) {
      WEFT_CUDA(cudaDeviceSynchronize());
      for (std::size_t r = 0; r < ranks.size(); ++r) {  // identifies streams by the sizes of their memsets
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

  std::map<std::uint32_t, std::pair<Index, bool>> streams;  // rank, and whether it is the exchange stream
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
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32",
         0);  // one connection per stream, so that streams do not wait for each other
  try {
    Question of{.kind = schedule_kind(argc > 1 ? argv[1] : "ring")};
    if (of.kind == ScheduleKind::all_gather) of.heads_q = of.heads_k = 4;  // as many heads as head groups
    if (argc > 2) {
      long long q = 0, k = 0;
      if (std::sscanf(argv[2], "%lld:%lld", &q, &k) != 2 || k < 1 || q % k != 0)
        throw Error(std::string("heads ") + argv[2], "write e.g. 32:8");
      of = {of.kind, q, k};
    }
    return run(of);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "trace: %s\n", error.what());
    return 2;
  }
}
