#include "verify/hard_cases.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <utility>

#include "index.h"

namespace weft::tool {
namespace {

constexpr Index kWidth = HardCase::kDim;

// Unit normal everywhere.
HardCase normal_case(std::string name, Index queries, Index keys) {
  HardCase c{.name = std::move(name), .queries = queries, .keys = keys};
  std::mt19937_64 engine(static_cast<std::uint64_t>(queries * 7919 + keys));
  for (auto [to, rows] : {std::pair{&c.q, queries * HardCase::kHeads},
                          {&c.k, keys * HardCase::kHeadsK},
                          {&c.v, keys * HardCase::kHeadsK},
                          {&c.dout, queries * HardCase::kHeads}}) {
    to->resize(at(rows * kWidth));
    for (double& x : *to) x = check::normal(engine);
  }
  return c;
}

// Logits of about ±size.
HardCase large_logits(std::string name, double size) {
  HardCase c = normal_case(std::move(name), 48, 80);
  for (std::vector<double>* tensor : {&c.q, &c.k})
    for (double& x : *tensor) x *= std::sqrt(size);
  return c;
}

// Keys come in equal pairs whose values, up to 6,000, nearly cancel.
HardCase cancelling_values() {
  HardCase c = normal_case("cancelling values", 48, 80);
  for (Index j = 0; j < c.keys; j += 2) {
    for (Index i = 0; i < kWidth; ++i) {
      c.k[at((j + 1) * kWidth + i)] = c.k[at(j * kWidth + i)];
      c.v[at((j + 1) * kWidth + i)] += -1000 * c.v[at(j * kWidth + i)];
      c.v[at(j * kWidth + i)] *= 1000;
    }
  }
  return c;
}

// All queries point at key 7: its logit is about 50 above the others.
HardCase dominant_key() {
  HardCase c = normal_case("one dominant key", 48, 80);
  for (Index i = 0; i < kWidth; ++i) {
    const double sign = i % 3 == 0 ? -3 : 3;
    c.k[at(7 * kWidth + i)] = sign;
    for (Index row = 0; row < c.queries * HardCase::kHeads; ++row) {
      double& x = c.q[at(row * kWidth + i)];
      x = sign + 0.1 * x;
    }
  }
  return c;
}

// All rows of a tensor equal its first: out is v, and dq and dk are 0 up to rounding.
HardCase constant_rows(std::string name, Index queries, Index keys) {
  HardCase c = normal_case(std::move(name), queries, keys);
  for (std::vector<double>* tensor : {&c.q, &c.k, &c.v, &c.dout})
    for (std::size_t i = at(kWidth); i < tensor->size(); ++i) (*tensor)[i] = (*tensor)[i - at(kWidth)];
  return c;
}

}  // namespace

std::vector<HardCase> hard_cases(bool quick) {
  const Index keys = quick ? 8192 : 131072;
  const std::string long_row = quick ? "8,192 keys" : "131,072 keys";
  HardCase plain = normal_case("unit normal", 48, 80);
  plain.plain = true;
  HardCase tiny = normal_case("scale 1e-6", 48, 80);
  tiny.scale = 1e-6;
  return {std::move(plain),
          large_logits("logits of 1e3", 1e3),
          large_logits("logits of 1e4", 1e4),
          normal_case(long_row + " in a row", 1, keys),
          constant_rows(long_row + ", all the same", 1, keys),
          cancelling_values(),
          std::move(tiny),
          dominant_key(),
          constant_rows("constant rows", 48, 80)};
}

}  // namespace weft::tool
