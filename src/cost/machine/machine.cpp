#include <cmath>
#include <cstdlib>
#include <limits>

#include "cost/load.h"
#include "text.h"
#include "weft/cost.h"
#include "weft/error.h"

namespace weft {
namespace {

// Far past any machine; within them no prediction leaves the range of a double.
constexpr double kLeast = 1e-12, kGreatest = 1e30, kMostSeconds = 1e12;

// Where a value stands, put into words only for an error: every choice checks its machine.
struct At {
  const Machine& machine;
  const char* kind = "";
  std::size_t n = 0;
  std::string_view name = {};

  std::string words() const {
    std::string out = text("machine '", machine.name, "'");
    if (*kind != '\0') out += text(": ", kind, " ", n);
    return name.empty() ? out : text(out, " '", name, "'");
  }
};

void require(bool right, const At& at, const char* what, double value, const char* remedy) {
  if (!right || !std::isfinite(value)) throw Error(text(at.words(), ": ", what, " is ", value), remedy);
}
void require_rate(const At& at, const char* what, double value) {
  require(value >= kLeast && value <= kGreatest, at, what, value, "give more than 0: from 1e-12 to 1e30");
}
void require_rate_or_none(const At& at, const char* what, double value) {
  require(value == 0 || (value >= kLeast && value <= kGreatest), at, what, value,
          "give 0 for no limit, or from 1e-12 to 1e30");
}
void require_seconds(const At& at, const char* what, double value) {
  require(value >= 0 && value <= kMostSeconds, at, what, value, "give from 0 to 1e12 seconds");
}

void check(const KernelRate& k, const At& at) {
  require_rate(at, "flops", k.flops);
  constexpr Index kMostWhole = 65536;
  for (const auto& [what, value] :
       {std::pair{"dim", k.dim}, {"tile_q", k.tile_q}, {"tile_k", k.tile_k}, {"units", k.units}})
    require(value >= 1 && value <= kMostWhole, at, what, static_cast<double>(value), "give from 1 to 65536");
  for (const auto& [what, value] :
       {std::pair{"tile_seconds", k.tile_seconds}, {"row_seconds", k.row_seconds}, {"call_seconds", k.call_seconds}})
    require_seconds(at, what, value);
}

void check(const Level& l, const At& at) {
  require_rate_or_none(at, "bandwidth", l.bandwidth);
  require_rate_or_none(at, "uplink", l.uplink);
  require_seconds(at, "latency", l.latency);
  require_seconds(at, "message_seconds", l.message_seconds);
  require(l.interference >= 0 && l.interference <= 0.999, at, "interference", l.interference,
          "give a share from 0 to 0.999");
}

}  // namespace

void check_machine(const Machine& m) {
  const At whole{m};
  if (m.kernels.empty())
    throw Error(whole.words() + " has no kernels", "give at least one rate: flops of a pass and dtype");
  if (m.levels.empty()) throw Error(whole.words() + " has no levels", "give at least one level that joins all ranks");
  if (m.levels.size() > cost::kMaxLevels)
    throw Error(text(whole.words(), " has ", m.levels.size(), " levels"), text("use at most ", cost::kMaxLevels));
  for (std::size_t i = 0; i < m.kernels.size(); ++i) check(m.kernels[i], {m, "kernel", i});
  Index below = 1;
  for (std::size_t i = 0; i < m.levels.size(); ++i) {
    const Level& l = m.levels[i];
    const At at{m, "level", i, l.name};
    check(l, at);
    const bool last = i + 1 == m.levels.size();
    if (last && l.ranks != 0) throw Error(text(at.words(), ": ranks is ", l.ranks), "the last level joins all: give 0");
    if (!last && (l.ranks < 1 || l.ranks % below != 0))
      throw Error(text(at.words(), ": ranks is ", l.ranks), text("give a multiple of the level below's ", below));
    below = last ? below : l.ranks;
  }
  for (const auto& [what, value] : {std::pair{"memory_bytes", m.memory_bytes},
                                    {"row_bandwidth", m.row_bandwidth},
                                    {"copy_bandwidth", m.copy_bandwidth}})
    require_rate_or_none(whole, what, value);
  for (const auto& [what, value] : {std::pair{"row_seconds", m.row_seconds},
                                    {"copy_seconds", m.copy_seconds},
                                    {"exchange_seconds", m.exchange_seconds}})
    require_seconds(whole, what, value);
  require_rate(whole, "processor_kernels", m.processor_kernels);
  require(m.processor_ranks >= 0, whole, "processor_ranks", static_cast<double>(m.processor_ranks), "give 0 or more");
}

const KernelRate& kernel_rate(const Machine& machine, Pass pass, const TensorShape& shape) {
  const KernelRate* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  const double width = static_cast<double>(shape.dim_qk + shape.dim_v) / 2;
  for (const KernelRate& k : machine.kernels) {
    if (k.pass != pass || size_of(k.dtype) != size_of(shape.dtype)) continue;
    constexpr double kOtherType = 1e6;  // any width of the same type is nearer
    const double distance =
        std::abs(std::log2(width / static_cast<double>(k.dim))) + (k.dtype == shape.dtype ? 0 : kOtherType);
    if (distance < least) {
      least = distance;
      best = &k;
    }
  }
  if (best == nullptr)
    throw Error(text("machine '", machine.name, "' has no rate for a ", pass == Pass::forward ? "forward" : "backward",
                     " in ", name(shape.dtype)),
                "measure it (weft bench --calibrate), or add a kernel of that dtype to its file");
  return *best;
}

}  // namespace weft
