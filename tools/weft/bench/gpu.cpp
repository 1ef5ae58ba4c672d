#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "bench/case.h"
#include "bench/clock.h"
#include "bench/modes.h"
#include "bench/peer.h"
#include "bench/rounds.h"
#include "calibrate/kernel_call.h"
#include "terminal/columns.h"
#include "terminal/json_file.h"
#include "terminal/numbers.h"
#include "terminal/words.h"
#include "weft/choose.h"
#include "weft/error.h"
#include "weft/plan.h"
#include "weft/version.h"

namespace weft::tool {
namespace {

constexpr Index kProduct = 8192;  // rows and columns of the square matrices that the peer multiplies

// The forward always runs: the backward needs its results.
std::optional<std::string> refusal_of(const Kernel& kernel, const Flags& flags, DType dtype, Index dim, Index dim_v) {
  for (const Pass pass : {Pass::forward, passes_of(flags).back()}) {
    std::optional<std::string> why =
        kernel.refusal({.pass = pass, .dtype = dtype, .dim_qk = dim, .dim_v = dim_v, .device = DeviceKind::cuda});
    if (why) return why;
  }
  return {};
}

// The problem that flags say. Of several ranks it is what one in the middle has, as of the named cases.
GpuCase own_case(const Flags& flags) {
  const check::Case c = case_of(flags, {"32:8", "128", "bf16"});
  if (!plain(c, true) || (c.mask.left != -1 && !c.mask.causal) || c.layout == LayoutKind::explicit_runs)
    throw Error("a problem with padding, keys, a mask or attention of its own for a kernel of a GPU",
                "give --docs, --mask causal (with --window L,-1) or full, --heads, --dim, --ranks and --layout alone");
  GpuCase own{.name = "custom", .anchor = {}, .spec = {}, .dim = c.dim_qk, .dim_v = c.dim_v};
  for (std::size_t n = 1; n < c.q.cu_seqlens.size(); ++n)
    own.spec.lengths.push_back(c.q.cu_seqlens[n] - c.q.cu_seqlens[n - 1]);
  own.spec.heads_q = c.heads_q;
  own.spec.heads_k = c.heads_k;
  own.spec.causal = c.mask.causal;
  own.spec.window = c.mask.left;
  if (!flags.given("ranks")) {
    flags.refuse({"layout"}, " without --ranks, with a kernel of a GPU", "add --ranks 8");
    return own;
  }
  own.spec.layout = c.layout;
  own.spec.ranks = c.ranks;
  own.spec.rank = (c.ranks - 1) / 2;
  return own;
}

std::vector<const GpuCase*> asked_cases(const Flags& flags, const Kernel& kernel, DType dtype) {
  std::vector<const GpuCase*> all;
  for (const GpuCase& c : gpu_cases())
    if ((!c.spec.schedule || kernel.takes_steps != nullptr) &&
        (!flags.given("graph") || (!c.spec.schedule && !c.spec.tree)))  // neither is planned on the device
      all.push_back(&c);
  const std::string* asked = flags.find("cases");
  if (asked == nullptr) {  // without widths that the kernel does not do
    if (!refusal_of(kernel, flags, dtype, 128, 128))
      std::erase_if(all, [&](const GpuCase* c) {
        const std::optional<std::string> why = refusal_of(kernel, flags, dtype, c->dim, c->width_v());
        if (why) fmt::print(stderr, "weft: left out {}: {}\n", c->name, *why);
        return why.has_value();
      });
    return all;
  }
  std::vector<const GpuCase*> some;
  for (const std::string_view name : split(*asked, ',')) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const GpuCase* c) { return c->name == name; });
    if (found == all.end()) {
      std::vector<std::string_view> names;
      for (const GpuCase* c : all) names.push_back(c->name);
      throw Error(fmt::format("--cases {}: kernel {} has no case {}", *asked, kernel.name, name),
                  fmt::format("use some of {}", fmt::join(names, ", ")));
    }
    some.push_back(*found);
  }
  return some;
}

// What the peer's attention is asked for; none if it has no call for the case: it knows batches of one length.
std::optional<nlohmann::json> peer_question(const GpuCase& c, const CallOptions& call) {
  const CaseSpec& s = c.spec;
  const bool batch = std::all_of(s.lengths.begin(), s.lengths.end(), [&](Index n) { return n == s.lengths[0]; });
  if (!batch || s.tree || s.ranks > 1 || s.window != -1 || call.dim != call.dim_v || c.softcap != 0) return {};
  return nlohmann::json{{"what", "sdpa"},
                        {"pass", name(call.pass)},
                        {"dtype", weft::name(call.dtype)},
                        {"causal", s.causal},
                        {"batch", s.lengths.size()},
                        {"lengths", {s.lengths[0]}},
                        {"heads", {s.heads_q, s.heads_k}},
                        {"dim", {call.dim, call.dim}}};
}

// Seconds of each round.
struct GpuRounds {
  std::vector<double> weft, peer, product;
};

GpuRounds run_rounds(KernelCall& call, const GpuCase& c, const CallOptions& options, Index rounds, Peer* peer) {
  constexpr std::chrono::milliseconds kRest{20};  // the peer rests as long, so that everybody finds the chip as cool
  std::optional<int> sdpa, product;
  if (peer != nullptr) {
    if (const auto question = peer_question(c, options)) sdpa = peer->prepare_gpu(*question);
    product = peer->prepare_gpu({{"what", "gemm"}, {"dtype", weft::name(options.dtype)}, {"size", kProduct}});
  }
  GpuRounds times;
  for (Index round = 0; round < rounds; ++round) {
    std::this_thread::sleep_for(kRest);
    times.weft.push_back(call.gpu_seconds());
    std::this_thread::sleep_for(kRest);
    if (sdpa) times.peer.push_back(peer->time(*sdpa, 1));
    if (product) times.product.push_back(peer->time(*product, 1));
  }
  if (peer != nullptr) peer->forget();
  return times;
}

double flop_of(const KernelCase& c, const CallOptions& o) {
  double pairs = 0;
  for (const Slice& s : c.slices) pairs += static_cast<double>(visible_pairs(s));
  return pairs * static_cast<double>(c.heads_q * flops_per_pair(o.pass, o.dim, o.dim_v));
}

const std::vector<Column> kGpuColumns = {{"case", "/case", -17},
                                         {"pass", "/pass", -9},
                                         {"ms", "/ms", 10, 3},
                                         {"TFLOP/s", "/tflops", 9},
                                         {"sustained", "/sustained_tflops", 11},
                                         {"peer", "/peer_tflops", 9},
                                         {"ratio", "/ratio", 8, 2},
                                         {"product", "/product_tflops", 9}};
const std::vector<Column> kHostColumns = {
    {"case", "/case", -17}, {"pass", "/pass", -9}, {"host us", "/host_us", 10, 1}};

nlohmann::json record_of(const GpuCase& c, const CallOptions& o, double flop, const GpuRounds& times,
                         double sustained) {
  const double seconds = median(times.weft);
  const auto tflops = [](double operations, double s) { return operations / s * 1e-12; };
  nlohmann::json record = {{"case", c.name},
                           {"pass", name(o.pass)},
                           {"dtype", weft::name(o.dtype)},
                           {"kernel", o.kernel},
                           {"deterministic", o.deterministic},
                           {"graph", o.graph},
                           {"ms", seconds * 1e3},
                           {"tflops", tflops(flop, seconds)},
                           {"sustained_tflops", tflops(flop, sustained)}};
  if (!times.peer.empty()) {
    record["peer_tflops"] = tflops(flop, median(times.peer));
    record["ratio"] = median(times.peer) / seconds;
  }
  if (!times.product.empty())
    record["product_tflops"] = tflops(2.0 * kProduct * kProduct * kProduct, median(times.product));
  return record;
}

CallOptions options_of(const Flags& flags) {
  CallOptions o{.kernel = *flags.find("kernel"),
                .dtype = dtype(flags.text("dtype", "bf16")),
                .deterministic = flags.given("deterministic"),
                .graph = flags.given("graph")};
  o.keys_per_split = flags.within("keys-per-split", 0, -1, kMaxTokens);
  if (o.keys_per_split < 0) o.keys_per_split = kUnlimited;
  return o;
}

CallOptions call_of(CallOptions o, const GpuCase& c, Pass pass) {
  o.pass = pass;
  o.dim = c.dim;
  o.dim_v = c.width_v();
  o.softcap = c.softcap;
  o.v_is_k = c.v_is_k;
  return o;
}

void list_cases() {
  for (const GpuCase& c : gpu_cases())
    fmt::print("{:<18}{}, {}{}{}, heads {}:{}, dim {}:{}\n", c.name,
               documents_words(Stream::from_lengths(c.spec.lengths)), mask_words(mask_of(c.spec)),
               c.spec.ranks > 1 ? fmt::format(", rank {} of {}", c.spec.rank, c.spec.ranks) : "",
               c.spec.schedule ? ", by the calls of " + weft::words(*c.spec.schedule) : "", c.spec.heads_q,
               c.spec.heads_k, c.dim, c.width_v());
}

}  // namespace

int bench_gpu(const Flags& flags) {
  if (flags.given("list")) return list_cases(), 0;
  flags.refuse({"threads"}, " with a kernel of a GPU", "leave it out: one thread calls the kernel");
  flags.exclude("host", {"graph", "peer"}, "the host's time is that of Weft's own calls");
  const CallOptions options = options_of(flags);
  const Kernel& kernel = find_kernel(options.kernel);
  const Index rounds = flags.within("repeat", 20, 1, 1000);
  const std::optional<GpuCase> own = has_own_problem(flags) ? std::optional(own_case(flags)) : std::nullopt;
  const std::vector<const GpuCase*> cases =
      own ? std::vector<const GpuCase*>{&*own} : asked_cases(flags, kernel, options.dtype);
  for (const GpuCase* c : cases)
    if (const std::optional<std::string> why = refusal_of(kernel, flags, options.dtype, c->dim, c->width_v()))
      throw Error(fmt::format("kernel {} cannot do {} {}: {}", kernel.name, c->name, weft::name(options.dtype), *why),
                  "choose others by --cases and --dtype, or another --kernel");
  JsonOutput output(flags.find("json"));
  std::unique_ptr<Peer> peer;
  if (const std::string* command = flags.find("peer")) peer = std::make_unique<Peer>(*command);

  const bool host = flags.given("host");
  fmt::print("weft {}, kernel {}, {}, {} rounds; peer: {}\n", version(), kernel.name, weft::name(options.dtype), rounds,
             peer ? peer->name() + " " + peer->version() : "none");
  if (host)
    fmt::print("Host time of a call while the GPU is busy.\n\n");
  else
    fmt::print(
        "Useful TFLOP/s on visible pairs: by events around calls that are each waited for; sustained: calls back to\n"
        "back. product: {0} x {0} x {0}.\n\n",
        kProduct);
  const std::vector<Column>& columns = host ? kHostColumns : kGpuColumns;
  fmt::print("{}", head_of(columns));
  nlohmann::json all = nlohmann::json::array();
  Noise noise;
  for (const GpuCase* c : cases) {
    const KernelCase planned = make_case(c->name, c->spec);
    for (const Pass pass : passes_of(flags)) {
      const CallOptions o = call_of(options, *c, pass);
      KernelCall call(planned, o, noise);
      if (host) {
        const double us = call.host_seconds() * 1e6;
        all.push_back({{"case", c->name}, {"pass", name(pass)}, {"kernel", o.kernel}, {"host_us", us}});
      } else {
        const GpuRounds times = run_rounds(call, *c, o, rounds, peer.get());
        all.push_back(record_of(*c, o, flop_of(planned, o), times, call.sustained_seconds()));
      }
      fmt::print("{}\n", line_of(columns, all.back()));
      std::fflush(stdout);
    }
  }
  output.write(all);
  return 0;
}

}  // namespace weft::tool
