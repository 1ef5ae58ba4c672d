// Row kernels beside a plain copy of as many bytes, and the time to plan. Prints tables; see docs/performance.md.
#include <cstdio>
#include <string>
#include <vector>

#include "kernel/cuda/work/list.h"
#include "rows/cuda/row_launch.h"
#include "timing.h"
#include "weft/device_rows.h"

namespace weft::bench {
namespace {

constexpr Index kHeads = 16, kDim = 64, kRowBytes = kHeads * kDim * 2;  // bf16
constexpr int kBuffers = 3;  // in turn, so that no call finds its input in the L2 cache

struct Memory {
  char* data = nullptr;
  explicit Memory(std::size_t bytes) {
    WEFT_CUDA(cudaMalloc(reinterpret_cast<void**>(&data), bytes));
    std::vector<unsigned> values(bytes / 4);
    unsigned x = 12345;
    for (unsigned& v : values) v = (x = x * 1664525u + 1013904223u) & 0x3fffffffu;
    WEFT_CUDA(cudaMemcpy(data, values.data(), bytes, cudaMemcpyHostToDevice));
  }
  ~Memory() { cudaFree(data); }
  Memory(const Memory&) = delete;
};

struct Offsets {
  std::int32_t* data = nullptr;
  Index sequences, tokens;
  explicit Offsets(const std::vector<std::int32_t>& cu)
      : sequences(static_cast<Index>(cu.size()) - 1), tokens(cu.back()) {
    WEFT_CUDA(cudaMalloc(reinterpret_cast<void**>(&data), cu.size() * 4));
    WEFT_CUDA(cudaMemcpy(data, cu.data(), cu.size() * 4, cudaMemcpyHostToDevice));
  }
  ~Offsets() { cudaFree(data); }
  Offsets(const Offsets&) = delete;
  DeviceStream stream() const { return {data, nullptr, OffsetType::i32, sequences, tokens}; }
};

std::vector<std::int32_t> equal_documents(Index sequences, Index length) {
  std::vector<std::int32_t> cu{0};
  for (Index i = 0; i < sequences; ++i) cu.push_back(cu.back() + static_cast<std::int32_t>(length));
  return cu;
}

struct Bench {
  cudaStream_t stream = nullptr;
  Bench() { WEFT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)); }
};

// Each row to its own place: what the copying costs without the looking up.
struct NoMap {
  struct Known {};
  __device__ Known known() const { return {}; }
  __device__ RowPair at(Known, int row) const { return {row, row}; }
  __device__ void check(const Reporter&) const {}
};

void rows(Bench& b, DeviceContext& context, Index sequences, Index length) {
  const Offsets offsets(equal_documents(sequences, length));
  const Index tokens = offsets.tokens;
  const auto bytes = static_cast<std::size_t>(tokens * kRowBytes);
  Memory from[kBuffers]{Memory(bytes), Memory(bytes), Memory(bytes)},
      to[kBuffers]{Memory(bytes), Memory(bytes), Memory(bytes)};
  const double moved = 2.0 * static_cast<double>(bytes);
  const auto in = [&](int i) { return RowTensor{from[i % kBuffers].data, tokens, kRowBytes}; };
  const auto out = [&](int i) { return RowTensor{to[i % kBuffers].data, tokens, kRowBytes}; };
  std::printf("\n%lld sequences of %lld tokens, %lld heads, width %lld, bf16: %.0f MiB\n\n",
              static_cast<long long>(sequences), static_cast<long long>(length), static_cast<long long>(kHeads),
              static_cast<long long>(kDim), static_cast<double>(bytes) / 1048576);
  std::printf("| rows | | us | GB/s | copy, us | of copy |\n|---|---|---:|---:|---:|---:|\n");
  const auto copy = [&](int i) {
    WEFT_CUDA(cudaMemcpyAsync(out(i).data, in(i).data, bytes, cudaMemcpyDeviceToDevice, b.stream));
  };
  Replay plain(b.stream, copy);
  // `part`: bytes moved over those of the copy.
  const auto line = [&](const char* what, const std::string& detail, auto&& work, double part = 1) {
    const Beside t = microseconds_beside(b.stream, plain, work);
    std::printf("| %s | %s | %.1f | %.0f | %.1f | %.1f %% |\n", what, detail.c_str(), t.us, part * moved / t.us / 1e3,
                t.other_us, 100 * part * t.share);
  };
  line("cudaMemcpyAsync", "", copy);
  line("no map", "", [&](int i) { launch_copy<Replace>(context.data(), NoMap{}, tokens, in(i), out(i)); });
  const DeviceStream s = offsets.stream();
  for (const LayoutKind kind : {LayoutKind::dual_chunk, LayoutKind::zigzag, LayoutKind::striped}) {
    for (const Index ranks : {2, 4, 8}) {
      const DeviceLayout layout{kind, ranks};
      const std::string detail = std::string(name(kind)) + ", " + std::to_string(ranks) + " ranks";
      line("sequence_to_rank_order", detail, [&](int i) { sequence_to_rank_order(context, s, layout, in(i), out(i)); });
      line("rank_to_sequence_order", detail, [&](int i) { rank_to_sequence_order(context, s, layout, in(i), out(i)); });
    }
  }
  line("copy_valid_rows", "", [&](int i) { copy_valid_rows(context, s, in(i), out(i)); });
  const DeviceRanges ranges{offsets.data, offsets.data, nullptr, sequences, tokens};
  line("copy_row_ranges", "gather", [&](int i) { copy_row_ranges(context, ranges, in(i), out(i)); });
  const Index half = tokens / 2;
  const auto f32 = [&](int i) { return thd(static_cast<float*>(in(i).data), DType::f32, half, kHeads, kDim); };
  const auto bf = [&](int i) { return thd(static_cast<bf16*>(out(i).data), DType::bf16, half, kHeads, kDim); };
  const auto f32_out = [&](int i) { return thd(static_cast<float*>(out(i).data), DType::f32, half, kHeads, kDim); };
  line("round_rows", "f32 to bf16", [&](int i) { round_rows(context, f32(i), bf(i)); }, 0.75);
  line("round_rows", "f32 added to bf16", [&](int i) { round_rows(context, f32(i), bf(i), true); });
  line("round_rows", "f32 to f32, a plain copy", [&](int i) { round_rows(context, f32(i), f32_out(i)); });
}

void planning(Bench& b, DeviceContext& context) {
  std::printf(
      "\n| sequences | plan of rank 3 of 8, causal | capacity | slices | us | with the work of tiles of 128, us |\n"
      "|---:|---|---:|---:|---:|---:|\n");
  for (const Index count : {Index{16}, Index{4096}, Index{100000}}) {
    std::vector<std::int32_t> cu{0};
    for (Index i = 0; i < count; ++i) cu.push_back(cu.back() + static_cast<std::int32_t>(16 * (1 + i * 7919 % 61)));
    const Offsets offsets(cu);
    struct Case {
      const char* name;
      LayoutKind kind;
      bool sequence_order;
      Index chunk;
    };
    for (const Case& c : {Case{"dual_chunk, rank order", LayoutKind::dual_chunk, false, 0},
                          Case{"dual_chunk, sequence order", LayoutKind::dual_chunk, true, 0},
                          Case{"dual_chunk, rank order, chunks of 256", LayoutKind::dual_chunk, false, 256},
                          Case{"zigzag, rank order", LayoutKind::zigzag, false, 0},
                          Case{"zigzag, sequence order", LayoutKind::zigzag, true, 0},
                          Case{"striped, rank order", LayoutKind::striped, false, 0}}) {
      const DeviceLayout layout{c.kind, 8};
      Mask mask{.causal = true};
      if (c.chunk > 0) mask.chunk = c.chunk;
      const DevicePlanArgs args{offsets.stream(),
                                {},
                                mask,
                                layout.runs(3),
                                c.sequence_order ? DeviceLayout::sequence_order() : layout.rank_order()};
      const Index capacity = device_plan_capacity(args);
      DevicePlan plan(context, capacity);
      const double us = microseconds(b.stream, [&](int) { plan.plan(args); });
      const cuda::Tiling rows[] = {{cuda::Side::query, plan.slices().q_rows, 128}};
      const double with_work = microseconds(b.stream, [&](int) {
        plan.plan(args);
        cuda::build_lists(plan, rows, {1, 1, {}}, b.stream);
      });
      std::printf("| %lld | %s | %lld | %zu | %.1f | %.1f |\n", static_cast<long long>(count), c.name,
                  static_cast<long long>(capacity), plan.download().size(), us, with_work);
    }
  }
}

}  // namespace
}  // namespace weft::bench

int main() {
  using namespace weft;
  bench::Bench b;
  DeviceContext context({DeviceKind::cuda, 0, b.stream});
  bench::planning(b, context);
  bench::rows(b, context, 16, 4096);
  bench::rows(b, context, 4096, 16);
  WEFT_CUDA(cudaStreamSynchronize(b.stream));
  context.check();
  return 0;
}
