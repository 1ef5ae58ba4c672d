#include "bench/gpu.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bench/peer.h"
#include "calibrate/kernel_call.h"
#include "terminal/json_file.h"
#include "terminal/numbers.h"
#include "terminal/words.h"
#include "weft/error.h"
#include "weft/plan.h"
#include "weft/version.h"

namespace weft::tool {
namespace {

constexpr Index kProduct = 8192;  // of the square matrices that a peer multiplies

struct GpuCase {
  std::string name;
  KernelCase of;
  Index dim = 128;
  // What torch's attention would be asked for; no tokens: it has no call for it.
  Index batch = 0, tokens = 0;
  bool causal = true;
};

std::vector<GpuCase> gpu_cases() {
  const std::vector<KernelCase> anchors = anchor_cases(), rings = ring_cases();
  return {{"dense", anchors[0], 128, 1, 16384},
          {"packed", anchors[1]},
          {"window", anchors[2]},
          {"mha-causal", anchors[3], 128, 1, 16384},
          {"mha-full", anchors[4], 128, 1, 16384, false},
          {"rank-of-2", anchors[7]},
          {"rank-of-4", anchors[8]},
          {"rank-of-8", anchors[5]},
          {"short-rank-of-8", anchors[6]},
          {"long-rank-of-8", anchors[9]},
          {"ring-rank-of-8", rings[0]},
          {"short-ring-of-8", rings[1]},
          {"long-ring-of-8", rings[2]},
          {"width-64", anchors.back(), 64, 16, 4096},
          {"width-256", documents_case("1 x 8192, heads 16:4", {8192}, 16, 4, true, 0), 256, 1, 8192}};
}

std::vector<GpuCase> asked_cases(const Flags& flags, const Kernel& kernel) {
  std::vector<GpuCase> all = gpu_cases();
  if (kernel.takes_steps == nullptr) std::erase_if(all, [](const GpuCase& c) { return c.of.steps.has_value(); });
  const std::string* asked = flags.find("cases");
  if (asked == nullptr) return all;
  std::vector<GpuCase> some;
  for (const std::string_view name : split(*asked, ',')) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const GpuCase& c) { return c.name == name; });
    if (found == all.end()) {
      std::string names;
      for (const GpuCase& c : all) names += (names.empty() ? "" : ", ") + c.name;
      throw Error(fmt::format("--cases {}: kernel {} has no case {}", *asked, kernel.name, name),
                  "use some of " + names);
    }
    some.push_back(*found);
  }
  return some;
}

double middle(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

// What a case is timed with, and beside.
struct Contestants {
  DType type;
  std::string kernel;
  Index rounds;
  Peer* peer;  // or none
};

// Weft and its peers in turns; those that were asked.
struct Contest {
  std::vector<double> weft, peer, product;
};

Contest contest(const Contestants& who, const GpuCase& c, Pass pass, Noise& noise) {
  KernelCall call(c.of, who.type, c.dim, pass, who.kernel, noise);
  std::optional<int> sdpa, product;
  if (who.peer != nullptr) {
    if (c.tokens > 0)
      sdpa = who.peer->prepare_gpu({{"what", "sdpa"},
                                    {"pass", pass == Pass::forward ? "forward" : "backward"},
                                    {"dtype", weft::name(who.type)},
                                    {"causal", c.causal},
                                    {"batch", c.batch},
                                    {"lengths", {c.tokens}},
                                    {"heads", {c.of.heads_q, c.of.heads_k}},
                                    {"dim", {c.dim, c.dim}}});
    product = who.peer->prepare_gpu({{"what", "gemm"}, {"dtype", weft::name(who.type)}, {"size", kProduct}});
  }
  Contest times;
  for (Index round = 0; round < who.rounds; ++round) {
    // The peer rests as long after each of its samples: whoever comes next finds the same chip.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    times.weft.push_back(call.gpu_seconds());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    if (sdpa) times.peer.push_back(who.peer->time(*sdpa, 1));
    if (product) times.product.push_back(who.peer->time(*product, 1));
  }
  if (who.peer != nullptr) who.peer->forget();
  return times;
}

// Prints a line of the table.
nlohmann::json print_contest(const Contestants& who, const GpuCase& c, Pass pass, const Contest& times) {
  double pairs = 0;
  for (const Slice& s : c.of.slices) pairs += static_cast<double>(visible_pairs(s));
  const double flop = (pass == Pass::forward ? 4.0 : 10.0) * static_cast<double>(c.of.heads_q * c.dim) * pairs;
  const double seconds = middle(times.weft);
  nlohmann::json record = {{"case", c.name},
                           {"pass", pass == Pass::forward ? "forward" : "backward"},
                           {"dtype", weft::name(who.type)},
                           {"kernel", who.kernel},
                           {"ms", seconds * 1e3},
                           {"tflops", flop / seconds * 1e-12}};
  std::string beside = "-", ratio = "-", square = "-";
  if (!times.peer.empty()) {
    const double other = middle(times.peer);
    beside = fmt::format("{:.0f}", flop / other * 1e-12);
    ratio = fmt::format("{:.2f}", other / seconds);
    record["peer_tflops"] = flop / other * 1e-12;
    record["ratio"] = other / seconds;
  }
  if (!times.product.empty()) {
    const double rate = 2.0 * kProduct * kProduct * kProduct / middle(times.product) * 1e-12;
    square = fmt::format("{:.0f}", rate);
    record["product_tflops"] = rate;
  }
  fmt::print("{:<17}{:<9}{:>10.3f}{:>9.0f}{:>9}{:>8}{:>9}\n", c.name, record["pass"].get<std::string>(), seconds * 1e3,
             flop / seconds * 1e-12, beside, ratio, square);
  std::fflush(stdout);
  return record;
}

}  // namespace

int bench_gpu(const Flags& flags) {
  constexpr Index kMostRounds = 1000;
  const std::string kernel = flags.text("kernel", "cuda.sm90");
  const Index rounds = flags.whole("repeat", 20, "20");
  if (rounds < 1 || rounds > kMostRounds)
    throw Error(fmt::format("--repeat {}", rounds), fmt::format("use from 1 to {}", kMostRounds));
  const DType type = dtype(flags.text("dtype", "bf16"));
  const std::vector<GpuCase> cases = asked_cases(flags, find_kernel(kernel));
  for (const GpuCase& c : cases)
    if (const std::optional<std::string> why =
            find_kernel(kernel).refusal({.dtype = type, .dim_qk = c.dim, .dim_v = c.dim, .device = DeviceKind::cuda}))
      throw Error(fmt::format("kernel {} cannot do {} {}: {}", kernel, c.name, weft::name(type), *why),
                  "choose others by --cases and --dtype, or another --kernel");
  JsonOutput output(flags.find("json"));
  std::unique_ptr<Peer> peer;
  if (const std::string* command = flags.find("peer")) peer = std::make_unique<Peer>(*command);

  fmt::print("weft {}, kernel {}, {}, {} rounds; peer: {}\n", version(), kernel, weft::name(type), rounds,
             peer ? peer->name() + " " + peer->version() : "none");
  fmt::print(
      "Useful TFLOP/s on visible pairs, by events around calls that are waited for. product: {0} x {0} x {0}.\n\n",
      kProduct);
  fmt::print("{:<17}{:<9}{:>10}{:>9}{:>9}{:>8}{:>9}\n", "case", "pass", "ms", "TFLOP/s", "peer", "ratio", "product");
  nlohmann::json all = nlohmann::json::array();
  Noise noise;
  const Contestants who{type, kernel, rounds, peer.get()};
  for (const GpuCase& c : cases)
    for (const Pass pass : {Pass::forward, Pass::backward})
      all.push_back(print_contest(who, c, pass, contest(who, c, pass, noise)));
  output.write(all);
  return 0;
}

}  // namespace weft::tool
