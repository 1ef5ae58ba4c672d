#include <cmath>
#include <cstdlib>
#include <limits>

#include "cost/load.h"
#include "cost/machine/fields.h"
#include "text.h"
#include "weft/cost.h"
#include "weft/error.h"

namespace weft {
namespace {

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

template <class T>
void check_fields(const T& of, const At& at) {
  cost::fields(of, [&]<class V>(const char* what, const V& value, const cost::Limit& limit) {
    if constexpr (std::is_arithmetic_v<V>)
      if (!limit.allows(static_cast<double>(value)))
        throw Error(text(at.words(), ": ", what, " is ", value), limit.remedy);
  });
}

}  // namespace

void check_machine(const Machine& m) {
  const At whole{m};
  if (m.kernels.empty())
    throw Error(whole.words() + " has no kernels", "give at least one rate: flops of a pass and dtype");
  if (m.levels.empty()) throw Error(whole.words() + " has no levels", "give at least one level that joins all ranks");
  if (m.levels.size() > cost::kMaxLevels)
    throw Error(text(whole.words(), " has ", m.levels.size(), " levels"), text("use at most ", cost::kMaxLevels));
  for (std::size_t i = 0; i < m.kernels.size(); ++i) check_fields(m.kernels[i], {m, "kernel", i});
  Index below = 1;
  for (std::size_t i = 0; i < m.levels.size(); ++i) {
    const Level& l = m.levels[i];
    const At at{m, "level", i, l.name};
    check_fields(l, at);
    const bool last = i + 1 == m.levels.size();
    if (last && l.ranks != 0) throw Error(text(at.words(), ": ranks is ", l.ranks), "the last level joins all: give 0");
    if (!last && (l.ranks < 1 || l.ranks % below != 0))
      throw Error(text(at.words(), ": ranks is ", l.ranks), text("give a multiple of the level below's ", below));
    below = last ? below : l.ranks;
  }
  check_fields(m, whole);
}

Machine tensor_parallel(const Machine& machine, Index degree) {
  if (degree < 1) throw Error(text("a tensor-parallel degree of ", degree), "use 1 or more");
  if (degree > 1 && machine.processor_ranks != 1)
    throw Error(text("tensor parallelism on machine '", machine.name, "', whose ranks share a processor"),
                "use a machine of GPUs");
  Machine m = machine;
  Index below = 1;  // GPUs that the level below joins
  for (Level& level : m.levels) {
    level.uplink /= static_cast<double>(min_of(degree, below));
    below = level.ranks;
    if (level.ranks == 0) continue;  // the last one joins all
    if (level.ranks % degree != 0 && degree % level.ranks != 0)
      throw Error(
          text("a tensor-parallel degree of ", degree, " on ", level.ranks, " GPUs that ", level.name, " joins"),
          text("use a divisor or a multiple of ", level.ranks));
    level.ranks = max_of(1, level.ranks / degree);
  }
  return m;
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
