#include "flags/lengths.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>
#include <optional>
#include <random>

#include <fmt/format.h>

#include "terminal/numbers.h"
#include "weft/error.h"

namespace weft::tool {
namespace {

constexpr std::string_view kLognormal = "lognormal", kPublished = "published";
// So that a sum of padded lengths stays far from 2^63: 2^22 documents of less than 2^32 tokens.
constexpr Index kMaxCount = Index{1} << 22;

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

// A distribution's keys and values: "count=64,median=2400".
class Values {
 public:
  Values(std::string_view flag, std::string_view kind, std::string_view text, std::vector<std::string_view> keys,
         std::string_view example)
      : flag_(flag), kind_(kind), example_(fmt::format("write e.g. {} {}:{}", flag, kind, example)) {
    for (const std::string_view part : split(text, ',')) {
      const std::size_t at = part.find('=');
      const std::string_view key = part.substr(0, at);
      check(at != std::string_view::npos, flag, fmt::format("{}: '{}' has no value", kind, part), example_);
      check(std::find(keys.begin(), keys.end(), key) != keys.end(), flag, fmt::format("{} has no '{}'", kind, key),
            example_);
      values_[key] = part.substr(at + 1);
    }
  }

  // read(flag, text, example) of a key's value; `otherwise` if it has none.
  template <class T>
  T get(std::string_view key, T (*read)(std::string_view, std::string_view, std::string_view),
        std::optional<T> otherwise = {}) const {
    const auto found = values_.find(key);
    check(found != values_.end() || otherwise, flag_, fmt::format("{} needs {}", kind_, key), example_);
    if (found == values_.end()) return *otherwise;
    try {
      return read(fmt::format("{} {}:{}", flag_, kind_, key), found->second, "64");
    } catch (const Error& error) {
      throw Error(error.problem(), example_);
    }
  }

 private:
  std::string_view flag_, kind_;
  std::string example_;
  std::map<std::string_view, std::string_view> values_;
};

std::vector<Index> lognormal(std::string_view flag, std::string_view text, unsigned long long seed) {
  const Values of(flag, kLognormal, text, {"count", "median", "sigma", "min", "max"},
                  "count=64,median=2400,sigma=1,min=16,max=16384");
  const Index count = of.get("count", whole_number), min = of.get("min", whole_number, std::optional<Index>(1)),
              max = of.get("max", whole_number, std::optional(kMaxTokens));
  const double median = of.get("median", real_size), sigma = of.get("sigma", real_number, std::optional(1.0));
  check(count >= 1 && count <= kMaxCount, flag, fmt::format("lognormal count={}", count),
        fmt::format("use a count from 1 to {}", kMaxCount));
  check(median > 0, flag, fmt::format("lognormal median={}", median), "use a median above 0");
  check(sigma >= 0, flag, fmt::format("lognormal sigma={}", sigma), "use a sigma of 0 or more");
  check(min >= 0 && min <= max && max <= kMaxTokens, flag, fmt::format("lognormal min={}, max={}", min, max),
        fmt::format("use 0 <= min <= max <= {}", kMaxTokens));
  std::mt19937_64 engine(seed);
  std::vector<Index> lengths;
  for (Index i = 0; i < count; ++i) {
    const double length = median * std::exp(sigma * normal(engine));
    lengths.push_back(std::llround(std::clamp(length, static_cast<double>(min), static_cast<double>(max))));
  }
  return lengths;
}

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
  const Values of(flag, kPublished, text, {"tokens", "max"}, "tokens=1048576,max=196608");
  Index tokens = of.get("tokens", whole_number);
  const Index max = of.get("max", whole_number, std::optional(std::end(kQuantiles)[-1].length));
  for (const auto& [key, value] : {std::pair{"tokens", tokens}, {"max", max}})
    check(value >= 1 && value <= kMaxTokens, flag, fmt::format("published {}={}", key, value),
          fmt::format("use from 1 to {}", kMaxTokens));
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
  const std::size_t colon = text.find(':');
  if (text.substr(0, colon) == kLognormal && colon < text.size()) return lognormal(flag, text.substr(colon + 1), seed);
  if (text.substr(0, colon) == kPublished && colon < text.size()) return published(flag, text.substr(colon + 1), seed);
  const std::vector<Index> lengths = whole_numbers(flag, text, "256,512,1024");
  check(static_cast<Index>(lengths.size()) <= kMaxCount, flag, fmt::format("{} documents", lengths.size()),
        fmt::format("use at most {}", kMaxCount));
  for (std::size_t i = 0; i < lengths.size(); ++i)
    check(lengths[i] >= 0 && lengths[i] <= kMaxTokens, flag, fmt::format("document {} has length {}", i, lengths[i]),
          fmt::format("use lengths from 0 (an empty document) to {}", kMaxTokens));
  return lengths;
}

}  // namespace weft::tool
