#include "flags/memory_check.h"

#include <algorithm>

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include "terminal/numbers.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

double memory_here() {
  double bytes = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGE_SIZE));
  rlimit limit;
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    bytes = std::min(bytes, static_cast<double>(limit.rlim_cur));
  return bytes;
}

}  // namespace

void check_memory(std::string_view what, double bytes) {
  const double here = memory_here();
  if (bytes <= here) return;
  const auto words = [](double n) { return bytes_text(static_cast<Index>(std::min(n, 0x1p62))); };
  throw Error(fmt::format("{} {} of memory, and there are {}", what, words(bytes), words(here)),
              "use fewer tokens or heads, or a smaller --dim");
}

double tensor_bytes(const check::Case& c, const Problem& problem, bool gradients) {
  const double q = static_cast<double>(problem.packing().q().tokens() * c.heads_q);
  const double k = static_cast<double>(problem.packing().k().tokens() * c.heads_k);
  const double forward = (q + k) * static_cast<double>(c.dim_qk + c.dim_v) * static_cast<double>(size_of(c.dtype));
  return gradients ? 2 * forward : forward;
}

}  // namespace weft::tool
