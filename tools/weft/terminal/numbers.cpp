#include "terminal/numbers.h"

#include <array>
#include <charconv>
#include <cmath>

#include <fmt/format.h>

#include "weft/error.h"

namespace weft::tool {

namespace {

// What the last letter stands for; 1 if it is none of these.
double suffix_of(std::string_view text) {
  constexpr std::string_view kLetters = "kKmMgG";
  const std::size_t letter = text.empty() ? std::string_view::npos : kLetters.find(text.back());
  return letter == std::string_view::npos ? 1 : std::exp2(10 * static_cast<double>(letter / 2 + 1));
}

}  // namespace

Index whole_number(std::string_view flag, std::string_view text, std::string_view example) {
  const auto check = [&](bool right, const char* what, const char* more) {
    if (!right)
      throw Error(fmt::format("{}: '{}' {}", flag, text, what), fmt::format("write e.g. {} {}{}", flag, example, more));
  };
  const double unit = suffix_of(text);
  if (unit == 1) {
    Index value = 0;
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    check(code != std::errc::result_out_of_range, "does not fit 64 bits", "");
    check(code == std::errc() && end == text.data() + text.size(), "is not a whole number", "");
    return value;
  }
  const std::string_view number = text.substr(0, text.size() - 1);
  double value = 0;
  const auto [end, code] =
      std::from_chars(number.data(), number.data() + number.size(), value, std::chars_format::fixed);
  value *= unit;  // a power of two: exact
  check(code == std::errc() && end == number.data() + number.size() && value == std::floor(value) &&
            std::abs(value) < 0x1p63,
        "is not a whole number of 64 bits, k, m, g being 1024, 1024^2, 1024^3", ", or 64k");
  return static_cast<Index>(value);
}

std::vector<Index> whole_numbers(std::string_view flag, std::string_view text, std::string_view example) {
  std::vector<Index> values;
  for (const std::string_view part : split(text, ',')) values.push_back(whole_number(flag, part, example));
  return values;
}

double real_size(std::string_view flag, std::string_view text, std::string_view example) {
  const double unit = suffix_of(text);
  return unit == 1 ? real_number(flag, text, example)
                   : unit * real_number(flag, text.substr(0, text.size() - 1), example);
}

double real_number(std::string_view flag, std::string_view text, std::string_view example) {
  double value = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || end != text.data() + text.size() || !std::isfinite(value))
    throw Error(fmt::format("{}: '{}' is not a finite number", flag, text),
                fmt::format("write e.g. {} {}", flag, example));
  return value;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t at = text.find(separator);
    parts.push_back(text.substr(0, at));
    if (at == std::string_view::npos) return parts;
    text.remove_prefix(at + 1);
  }
}

std::string bytes_text(Index bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 999.5 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  const int decimals = unit == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;  // three digits
  return fmt::format("{:.{}f} {}", value, decimals, kUnits[unit]);
}

}  // namespace weft::tool
