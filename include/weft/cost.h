// What things cost on a machine: kernels by tiles, exchanges by levels of links, memory by rank.
// Seconds and bytes throughout. docs/cost.md derives every formula.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/dtype.h"
#include "weft/schedule.h"
#include "weft/slice.h"

namespace weft {

// A kernel works in whole tiles of rows x keys. A row of a tile is one query row of one head; heads that share a K/V
// head are stacked in it.
struct KernelRate {
  Pass pass = Pass::forward;
  DType dtype = DType::bf16;
  Index dim = 128;   // widths dim_qk + dim_v over two; the nearest one is used
  double flops = 0;  // per second of a whole processor: 4·dim forward, 10·dim backward for a pair and query head
  Index tile_q = 128, tile_k = 128;
  double tile_seconds = 0;  // whole processor, for each tile of rows and slice it meets: begin, mask, end
  double row_seconds = 0;   // whole processor, for each query row and head of a call
  // Rows of heads that share a K/V head, for which the kernel copies the keys that they see once; 0: it copies none.
  // And the time of such a copy on a whole processor, for each key and K/V head.
  Index copy_rows = 0;
  double key_seconds = 0;
  double call_seconds = 0;  // each call
  Index units = 1;          // tiles of rows that run in parallel: no call is shorter than its longest one
  std::string source = {};  // where the numbers come from
};

// A level of links: those inside a node, inside a rack, between all ranks.
struct Level {
  std::string name = {};
  Index ranks = 0;             // neighbours [n·ranks, (n + 1)·ranks) that it joins; 0: all
  double bandwidth = 0;        // bytes per second into a rank, and out of it; 0: no limit
  bool full_duplex = true;     // both at once; otherwise they share
  bool limits_sends = true;    // false: only what comes in is slow
  double latency = 0;          // seconds a call
  double message_seconds = 0;  // each message of a call
  double uplink = 0;           // bytes per second out of a group of the level below, and into it; 0: no limit
  double interference = 0;     // fraction of its rate that a kernel loses while bytes move here
  std::string source = {};
};

// A machine: rates of its kernels, its links, and what a rank's processor and memory do.
struct Machine {
  std::string name = {}, about = {};
  std::vector<KernelRate> kernels = {};
  std::vector<Level> levels = {};  // the innermost first; the last one joins all
  double memory_bytes = 0;         // of a rank; 0: no limit
  double row_bandwidth = 0;   // bytes per second read or written by passes over rows (clear, add, round, end); 0: free
  double row_seconds = 0;     // each such pass
  double copy_bandwidth = 0;  // ranks copy what they receive, when they wait; 0: hardware of its own does
  double copy_seconds = 0;    // of the same copies, for each message
  double exchange_seconds = 0;  // of a rank's processor, to start an exchange
  // False: bytes move only while ranks wait, so a call ends when those it sends to have come to a wait too.
  bool progress = true;
  // Gathered rows enter a group of ranks once and are passed on inside, as collective libraries do; Weft's own exchange
  // sends them to each rank.
  bool relays_gathers = false;
  Index processor_ranks = 1;     // ranks that share a processor; 0: all
  double processor_kernels = 1;  // calls that it runs at full rate at once; more share
  double timeslice = 0;  // seconds that a rank computes before another one on its processor may; 0: all go on at once
  std::string source = {};
};

// Error that names the value and the way out: rates above 0, shares below 1, levels that grow.
WEFT_API void check_machine(const Machine& machine);

// Machines that come with the library, such as "h100-400g" and "cpu".
WEFT_API std::span<const Machine> machine_presets();
// The preset of that name; the Error for any other lists the names.
WEFT_API const Machine& machine_preset(std::string_view name);

// The machine as it is to ranks that are `degree` GPUs apart: context-parallel ranks beside tensor parallelism of that
// degree. Fewer of them share a node, and what leaves a node is shared by all `degree` of each. Error where the degree
// neither divides the ranks of a level nor is a multiple of them, or ranks share a processor.
WEFT_API Machine tensor_parallel(const Machine& machine, Index degree);

// A machine file. Errors name the file and the place; at most 1 MiB and 8 levels deep.
WEFT_API Machine machine_from_json(std::string_view json, std::string_view file = "machine");
// The text of a machine file.
WEFT_API std::string to_json(const Machine& machine);

// The rate for these; another dtype of the same size, or the nearest width, if there is no better one. Error if none.
WEFT_API const KernelRate& kernel_rate(const Machine& machine, Pass pass, const TensorShape& shape);

struct PlacedOptions;
// What layout `placed` weighs on this machine (weft/placed.h), for one layer's heads and shape. Its capacity is left
// open.
WEFT_API PlacedOptions placed_options(const Machine& machine, Index heads_q, Index heads_k, const TensorShape& shape,
                                      bool backward = true);

// What a call does, counted in tiles.
struct WEFT_API TileWork {
  double pairs = 0;    // visible, times query heads
  double covered = 0;  // pairs of all tiles that are touched, times query heads
  double tiles = 0;    // (tile of rows, slice) that meet, of all groups of heads
  double rows = 0;     // query rows in slices, each once, times heads
  double keys = 0;     // keys that are copied, times K/V heads
  double longest = 0;  // covered pairs of the longest tile of rows

  TileWork& operator+=(const TileWork& other);
};
// The work of one call over these slices, and the seconds that it takes.
WEFT_API TileWork tile_work(std::span<const Slice> slices, Index heads_q, Index heads_k, const KernelRate& rate);
WEFT_API double kernel_seconds(const TileWork& work, const KernelRate& rate, const TensorShape& shape);

// Bytes of a rank in one pass: its tensors (inputs and outputs), and the executor's workspaces.
struct RankMemory {
  Index tensors = 0, workspace = 0;
  Index total() const { return tensors + workspace; }
};
// The bytes that one rank of a schedule needs.
WEFT_API RankMemory rank_memory(const Schedule& schedule, const TensorShape& shape, Pass pass);

}  // namespace weft
