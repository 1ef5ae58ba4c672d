// A number for what ranks compare: lists that differ in one thing have different numbers.
#pragma once

#include <bit>
#include <cstdint>
#include <span>
#include <string_view>

#include "weft/config.h"

namespace weft {

class Hash {
 public:
  Hash& add(std::uint64_t x) {
    // splitmix64's finish: every bit of x moves every bit of the sum
    value_ += x + 0x9e3779b97f4a7c15u;
    value_ = (value_ ^ (value_ >> 30)) * 0xbf58476d1ce4e5b9u;
    value_ = (value_ ^ (value_ >> 27)) * 0x94d049bb133111ebu;
    value_ ^= value_ >> 31;
    return *this;
  }
  Hash& add(Index x) { return add(static_cast<std::uint64_t>(x)); }
  Hash& add(double x) { return add(std::bit_cast<std::uint64_t>(x)); }
  Hash& add(bool x) { return add(std::uint64_t{x}); }
  Hash& add(std::span<const Index> list) {
    add(static_cast<Index>(list.size()));
    for (const Index x : list) add(x);
    return *this;
  }
  Hash& add(std::string_view name) {
    add(static_cast<Index>(name.size()));
    for (const char c : name) add(std::uint64_t{static_cast<unsigned char>(c)});
    return *this;
  }
  std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0;
};

}  // namespace weft
