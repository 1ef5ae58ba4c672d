// Machines that come with the library. Each number says where it comes from; where somebody measured, that counts, and
// where only a data sheet is at hand, the source says so.
#include <algorithm>

#include "text.h"
#include "weft/cost.h"
#include "weft/error.h"

namespace weft {
namespace {

constexpr double kGiga = 1e9, kTera = 1e12, kMicro = 1e-6;
constexpr Pass kForward = Pass::forward, kBackward = Pass::backward;

// A kernel: TFLOP/s of full tiles, and microseconds that a tile, a row and a call cost.
struct Rate {
  Pass pass;
  std::vector<DType> dtypes;
  Index dim, tile_q, tile_k;
  double tflops, tile, row, call;
};
void add(Machine& m, Index units, const char* source, std::initializer_list<Rate> rates) {
  for (const Rate& r : rates)
    for (const DType dtype : r.dtypes)
      m.kernels.push_back({.pass = r.pass,
                           .dtype = dtype,
                           .dim = r.dim,
                           .flops = r.tflops * kTera,
                           .tile_q = r.tile_q,
                           .tile_k = r.tile_k,
                           .tile_seconds = r.tile * kMicro,
                           .row_seconds = r.row * kMicro,
                           .call_seconds = r.call * kMicro,
                           .units = units,
                           .source = source});
}
const std::vector<DType> kHalf = {DType::bf16, DType::f16}, kF32 = {DType::f32};

// What tiles of Hopper's and Ampere's best kernels cost; TFLOP/s at width 128.
void add_gpu(Machine& m, double forward, double backward, Index units, const char* source) {
  const double tile = 1.5 / static_cast<double>(units);
  add(m, units, source,
      {{kForward, kHalf, 64, 128, 128, 0.64 * forward, tile, 0, 8},
       {kBackward, kHalf, 64, 64, 128, 0.87 * backward, tile, 0, 20},
       {kForward, kHalf, 128, 128, 128, forward, tile, 0, 8},
       {kBackward, kHalf, 128, 64, 128, backward, tile, 0, 20},
       {kForward, kHalf, 256, 128, 128, forward, tile, 0, 8},
       {kBackward, kHalf, 256, 64, 128, 0.55 * backward, tile, 0, 20}});
}

// f32 runs without tensor cores.
void add_f32(Machine& m, double forward, double backward, Index units) {
  const double tile = 1.5 / static_cast<double>(units);
  add(m, units,
      "docs/performance.md: cuda.portable in f32 on an H200, 32 and 24 TFLOP/s of one long document; on other GPUs "
      "times the ratio of their data sheets' f32 rates to its",
      {{kForward, kF32, 128, 64, 64, forward, tile, 0, 20}, {kBackward, kF32, 128, 64, 64, backward, tile, 0, 20}});
}

// Bandwidths in GB/s, into a GPU and out of it; latency in microseconds.
Level nvlink(Index ranks, double bandwidth, double latency, double interference, const char* source) {
  return {.name = "NVLink",
          .ranks = ranks,
          .bandwidth = bandwidth * kGiga,
          .latency = latency * kMicro,
          .message_seconds = 1 * kMicro,
          .interference = interference,
          .source = source};
}
Level infiniband(double bandwidth, const char* source) {
  return {.name = "InfiniBand",
          .ranks = 0,
          .bandwidth = bandwidth * kGiga,
          .latency = 20 * kMicro,
          .message_seconds = 2 * kMicro,
          .interference = 0.05,
          .source = source};
}

Machine h100() {
  Machine m{.name = "h100-400g", .about = "nodes of 8 H100 SXM joined by NVLink, 400 Gb/s a GPU between nodes"};
  add_gpu(m, 660, 520, 132,
          "FlashAttention-3 paper (arXiv 2407.08608), figures 5 to 7: forward up to 660 causal and 740 full, "
          "backward up to 550, H100 SXM5; widths 64 and 256 relative to 128 as measured on an H200 "
          "(docs/performance.md); cost a tile and a call: estimates");
  add_f32(m, 32, 24, 132);
  m.levels = {nvlink(8, 360, 10, 0.05,
                     "NVIDIA H100 data sheet: 900 GB/s both ways, 450 one way; about 80 % reached by nccl-tests "
                     "send/receive; latency, interference: estimates"),
              infiniband(45,
                         "400 Gb/s = 50 GB/s a GPU and way (ConnectX-7 data sheet), about 90 % reached; latency, "
                         "interference: estimates")};
  m.memory_bytes = 80 * kGiga;
  m.row_bandwidth = 2.6 * kTera;
  m.row_seconds = 4 * kMicro;
  m.source = "NVIDIA H100 data sheet: 80 GB, 3.35 TB/s, of which a copy reaches about 80 %";
  return m;
}

// Weft's own kernels, fitted to measured times of their calls.
void add_sm90(Machine& m) {
  add(m, 132, "weft bench --calibrate --kernel cuda.sm90 --dim 64,128, one H200, 2026-11-15 (bench/h200/learned.json)",
      {{kForward, kHalf, 64, 192, 128, 548, 0.0182, 1.8e-5, 16.4},
       {kBackward, kHalf, 64, 128, 128, 531, 0.0329, 7.4e-5, 80.3},
       {kForward, kHalf, 128, 128, 128, 653, 0.0196, 0, 17.5},
       {kBackward, kHalf, 128, 64, 128, 567, 0, 5.63e-4, 143}});
  add(m, 132,
      "docs/performance.md: cuda.sm90, width 256: forward 761 to 796, backward by cuda.portable 133, one H200, "
      "2026-11-15; cost a tile and a call as at width 128",
      {{kForward, kHalf, 256, 128, 64, 780, 0.0196, 0, 17.5}, {kBackward, kHalf, 256, 64, 64, 133, 0, 5.63e-4, 143}});
}

Machine h200() {
  Machine m = h100();
  m.name = "h200-400g";
  m.about = "nodes of 8 H200 SXM joined by NVLink, 400 Gb/s a GPU between nodes; Weft's own kernels";
  m.kernels.clear();
  add_sm90(m);
  add_f32(m, 32, 24, 132);
  m.memory_bytes = 141 * kGiga;
  m.row_bandwidth = 4.1 * kTera;
  m.source = "NVIDIA H200 data sheet: 141 GB; docs/performance.md: a device copy reads and writes 4.17 TB/s";
  return m;
}

Machine h200_shared() {
  Machine m = h200();
  m.name = "h200-shared";
  m.about = "ranks that share one H200, as tests and measurements here do";
  m.levels = {{.name = "device memory",
               .ranks = 0,
               .bandwidth = 2 * kTera,
               .latency = 15 * kMicro,
               .message_seconds = 1 * kMicro,
               .interference = 0.1,
               .source = "docs/performance.md: ring of 4 ranks, exchanges of 88 to 115 us; the rest estimates"}};
  m.processor_ranks = 0;
  return m;
}

Machine a100() {
  Machine m{.name = "a100-200g", .about = "nodes of 8 A100 SXM (80 GB) joined by NVLink, 200 Gb/s a GPU between nodes"};
  add_gpu(m, 200, 170, 108,
          "FlashAttention-2 paper (arXiv 2307.08691), figures 4 to 6: forward 190 to 225, backward 150 to "
          "190 at width 128 on A100; cost a tile and a call: estimates");
  add_f32(m, 9, 7, 108);
  m.levels = {
      nvlink(8, 240, 12, 0.08,
             "NVIDIA A100 data sheet: 600 GB/s both ways, 300 one way; about 80 % reached; the rest estimates"),
      infiniband(22,
                 "200 Gb/s = 25 GB/s a GPU and way (ConnectX-6 data sheet), about 90 % reached; the rest estimates")};
  m.memory_bytes = 80 * kGiga;
  m.row_bandwidth = 1.6 * kTera;
  m.row_seconds = 4 * kMicro;
  m.source = "NVIDIA A100 80GB data sheet: 2.04 TB/s, of which a copy reaches about 80 %";
  return m;
}

Machine nvl72() {
  Machine m{.name = "gb200-nvl72",
            .about = "racks of 72 Blackwell GPUs joined by NVLink, 400 Gb/s a GPU between racks"};
  add_gpu(m, 1300, 1000, 148,
          "an estimate: dense bf16 peak of the NVIDIA GB200 NVL72 data sheet (2.5 PFLOP/s a GPU) times the "
          "shares that Hopper's kernels reach of theirs; nobody measured it here");
  add_f32(m, 38, 28, 148);
  m.levels = {nvlink(72, 720, 10, 0.05,
                     "NVIDIA GB200 NVL72 data sheet: 1.8 TB/s both ways, 900 GB/s one way; 80 % reached: estimate"),
              infiniband(45, "as h100-400g")};
  m.memory_bytes = 186 * kGiga;
  m.row_bandwidth = 6.4 * kTera;
  m.row_seconds = 4 * kMicro;
  m.source = "NVIDIA GB200 NVL72 data sheet: 13.4 TB of HBM3e in 72 GPUs, 8 TB/s a GPU, 80 % reached: estimate";
  return m;
}

Machine cpu() {
  Machine m{.name = "cpu", .about = "ranks that are threads of one process on 2 cores of a server or laptop"};
  const char* source =
      "weft bench --calibrate on 2 cores of aarch64 Neoverse-V1, 2026-11-15, one thread a kernel (f16 taken as f32, "
      "memory a guess); another machine is best calibrated itself";
  const std::vector<DType> bf16 = {DType::bf16}, f16 = {DType::f16};
  add(m, 1, source,  // of one core
      {{kForward, kF32, 64, 16, 8, 0.0562, 0, 0.118, 10.6},
       {kBackward, kF32, 64, 16, 8, 0.0580, 1.74, 0.088, 18.4},
       {kForward, kF32, 128, 16, 8, 0.0563, 0, 0.148, 11.8},
       {kBackward, kF32, 128, 16, 8, 0.0564, 3.74, 0.128, 19.3},
       {kForward, bf16, 64, 16, 8, 0.1115, 0.244, 0.063, 11.2},
       {kBackward, bf16, 64, 16, 8, 0.1270, 2.38, 0.047, 19.9},
       {kForward, bf16, 128, 16, 8, 0.1489, 0.269, 0.119, 11.6},
       {kBackward, bf16, 128, 16, 8, 0.1441, 4.64, 0.120, 23.5},
       {kForward, f16, 128, 16, 8, 0.0563, 0, 0.148, 11.8},
       {kBackward, f16, 128, 16, 8, 0.0564, 3.74, 0.128, 19.3}});
  m.levels = {
      {.name = "memory", .ranks = 0, .bandwidth = 0, .limits_sends = false, .latency = 7 * kMicro, .source = source}};
  m.memory_bytes = 4 * kGiga;
  m.row_bandwidth = 65 * kGiga;
  m.row_seconds = 3.3 * kMicro;
  m.copy_bandwidth = 15 * kGiga;
  m.copy_seconds = 2.5 * kMicro;
  m.exchange_seconds = 11 * kMicro;
  m.progress = false;
  m.processor_ranks = 0;
  m.processor_kernels = 2;
  m.source = source;
  return m;
}

}  // namespace

std::span<const Machine> machine_presets() {
  static const std::vector<Machine> all = {h100(), h200(), h200_shared(), a100(), nvl72(), cpu()};
  return all;
}

const Machine& machine_preset(std::string_view name) {
  std::string names;
  for (const Machine& m : machine_presets()) {
    if (m.name == name) return m;
    names += text(names.empty() ? "" : ", ", m.name);
  }
  throw Error(text("there is no machine '", name, "'"), text("use one of ", names, ", or a machine file"));
}

}  // namespace weft
