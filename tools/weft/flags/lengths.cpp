#include "flags/lengths.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <optional>
#include <random>

#include <fmt/format.h>

#include "terminal/numbers.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

constexpr std::string_view kPrefix = "lognormal:";
constexpr std::string_view kExample = "lognormal:count=64,median=2400,sigma=1,min=16,max=16384";
// So that a sum of padded lengths stays far from 2^63: 2^22 documents of less than 2^32 tokens.
constexpr Index kMaxCount = Index{1} << 22;

struct Lognormal {
  std::optional<Index> count = {};
  std::optional<double> median = {};
  double sigma = 1;
  Index min = 1, max = kMaxTokens;
};

// Box-Muller by hand: the standard fixes what mt19937_64 draws, but not what std::normal_distribution makes of it. The
// math library's last bit may differ between platforms; a length would show it once in some 10^12.
double normal(std::mt19937_64& engine) {
  const auto uniform = [&] { return (static_cast<double>(engine() >> 11) + 0.5) * 0x1p-53; };  // in (0, 1)
  const double radius = std::sqrt(-2 * std::log(uniform()));
  return radius * std::cos(2 * std::numbers::pi * uniform());
}

void check(bool right, std::string_view flag, std::string problem, std::string_view remedy) {
  if (!right) throw Error(fmt::format("{}: {}", flag, problem), std::string(remedy));
}

void set(Lognormal& to, std::string_view flag, std::string_view key, std::string_view value) {
  const std::string name = fmt::format("{} lognormal:{}", flag, key);
  const auto whole = [&] { return whole_number(name, value, "64"); };
  if (key == "count")
    to.count = whole();
  else if (key == "median")
    to.median = real_size(name, value, "2400");
  else if (key == "sigma")
    to.sigma = real_number(name, value, "1.5");
  else if (key == "min")
    to.min = whole();
  else if (key == "max")
    to.max = whole();
  else
    throw Error(fmt::format("{}: lognormal has no '{}'", flag, key), "");
}

Lognormal parse_lognormal(std::string_view flag, std::string_view text) {
  Lognormal d;
  for (const std::string_view part : split(text, ',')) {
    const std::size_t at = part.find('=');
    check(at != std::string_view::npos, flag, fmt::format("lognormal: '{}' has no value", part),
          fmt::format("write e.g. {} {}", flag, kExample));
    try {
      set(d, flag, part.substr(0, at), part.substr(at + 1));
    } catch (const Error& error) {
      throw Error(error.problem(), fmt::format("write e.g. {} {}", flag, kExample));
    }
  }
  check(d.count && d.median, flag, "lognormal needs count and median", fmt::format("write e.g. {} {}", flag, kExample));
  check(*d.count >= 1 && *d.count <= kMaxCount, flag, fmt::format("lognormal count={}", *d.count),
        fmt::format("use a count from 1 to {}", kMaxCount));
  check(*d.median > 0, flag, fmt::format("lognormal median={}", *d.median), "use a median above 0");
  check(d.sigma >= 0, flag, fmt::format("lognormal sigma={}", d.sigma), "use a sigma of 0 or more");
  check(d.min >= 0 && d.min <= d.max && d.max <= kMaxTokens, flag,
        fmt::format("lognormal min={}, max={}", d.min, d.max), fmt::format("use 0 <= min <= max <= {}", kMaxTokens));
  return d;
}

std::vector<Index> draw(const Lognormal& d, unsigned long long seed) {
  std::mt19937_64 engine(seed);
  std::vector<Index> lengths;
  for (Index i = 0; i < *d.count; ++i) {
    const double length = *d.median * std::exp(d.sigma * normal(engine));
    lengths.push_back(std::llround(std::clamp(length, static_cast<double>(d.min), static_cast<double>(d.max))));
  }
  return lengths;
}

constexpr std::string_view kPublished = "published:";
constexpr std::string_view kPublishedExample = "published:tokens=1048576,max=196608";

// Fraction of documents up to a length in published long-context training data: 18.6 % have up to 200 tokens, and so
// on.
struct Quantile {
  double fraction;
  Index length;
};
constexpr Quantile kQuantiles[] = {{0, 16},       {0.186, 200},  {0.468, 500},   {0.714, 1024},  {0.870, 2048},
                                   {0.944, 4096}, {0.974, 8192}, {0.987, 16384}, {0.996, 32768}, {1, 196608}};

// Linear in the logarithm of the length between two of them.
Index published_length(double fraction) {
  const Quantile* to = kQuantiles + 1;
  while (to->fraction < fraction) ++to;
  const Quantile& from = to[-1];
  const double t = (fraction - from.fraction) / (to->fraction - from.fraction);
  const double low = std::log(static_cast<double>(from.length)), high = std::log(static_cast<double>(to->length));
  return std::llround(std::exp(low + t * (high - low)));
}

std::vector<Index> published(std::string_view flag, std::string_view text, unsigned long long seed) {
  Index tokens = 0, max = kQuantiles[std::size(kQuantiles) - 1].length;
  for (const std::string_view part : split(text, ',')) {
    const std::size_t at = part.find('=');
    const std::string_view key = part.substr(0, at);
    check(at != std::string_view::npos && (key == "tokens" || key == "max"), flag,
          fmt::format("published has no '{}'", part), fmt::format("write e.g. {} {}", flag, kPublishedExample));
    const Index value = whole_number(fmt::format("{} published:{}", flag, key), part.substr(at + 1), "65536");
    check(value >= 1 && value <= kMaxTokens, flag, fmt::format("published {}={}", key, value),
          fmt::format("use from 1 to {}", kMaxTokens));
    (key == "tokens" ? tokens : max) = value;
  }
  check(tokens > 0, flag, "published needs tokens", fmt::format("write e.g. {} {}", flag, kPublishedExample));
  std::mt19937_64 engine(seed);
  std::vector<Index> lengths;
  while (tokens > 0) {
    const double fraction = (static_cast<double>(engine() >> 11) + 0.5) * 0x1p-53;
    lengths.push_back(std::min({published_length(fraction), max, tokens}));
    tokens -= lengths.back();
    check(static_cast<Index>(lengths.size()) <= kMaxCount, flag, fmt::format("more than {} documents", kMaxCount),
          "use fewer tokens");
  }
  return lengths;
}

}  // namespace

std::vector<Index> parse_lengths(std::string_view flag, std::string_view text, unsigned long long seed) {
  if (text.starts_with(kPrefix)) return draw(parse_lognormal(flag, text.substr(kPrefix.size())), seed);
  if (text.starts_with(kPublished)) return published(flag, text.substr(kPublished.size()), seed);
  const std::vector<Index> lengths = whole_numbers(flag, text, "256,512,1024");
  check(static_cast<Index>(lengths.size()) <= kMaxCount, flag, fmt::format("{} documents", lengths.size()),
        fmt::format("use at most {}", kMaxCount));
  for (std::size_t i = 0; i < lengths.size(); ++i)
    check(lengths[i] >= 0 && lengths[i] <= kMaxTokens, flag, fmt::format("document {} has length {}", i, lengths[i]),
          fmt::format("use lengths from 0 (an empty document) to {}", kMaxTokens));
  return lengths;
}

}  // namespace weft::tool
