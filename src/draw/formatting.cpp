#include "draw/formatting.h"

#include <array>
#include <cmath>
#include <cstdio>

#include "index.h"

namespace weft::draw {
namespace {

constexpr std::uint32_t kReplacement = 0xFFFD;

bool continues(std::string_view text, std::size_t place) {
  return place < text.size() && (static_cast<unsigned char>(text[place]) & 0xC0) == 0x80;
}

// Reads one UTF-8 character at `place` and advances; an invalid byte gives U+FFFD.
std::uint32_t take(std::string_view text, std::size_t& place) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint32_t>(static_cast<unsigned char>(text[i])); };
  const std::uint32_t first = byte(place++);
  if (first < 0x80) return first;
  const std::size_t more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
  if (first < 0xC2 || first > 0xF4) return kReplacement;
  std::uint32_t code = first & (0x3FU >> more);
  for (std::size_t i = 0; i < more; ++i) {
    if (!continues(text, place + i)) return kReplacement;
    code = (code << 6) | (byte(place + i) & 0x3F);
  }
  constexpr std::array<std::uint32_t, 4> kLeast = {0, 0x80, 0x800, 0x10000};
  if (code < kLeast[more] || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000)) return kReplacement;
  place += more;
  return code;
}

void put(std::uint32_t code, std::string& out) {
  const auto byte = [&](std::uint32_t b) { out += static_cast<char>(b); };
  if (code < 0x80) {
    byte(code);
  } else if (code < 0x800) {
    byte(0xC0 | code >> 6);
    byte(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    byte(0xE0 | code >> 12);
    byte(0x80 | (code >> 6 & 0x3F));
    byte(0x80 | (code & 0x3F));
  } else {
    byte(0xF0 | code >> 18);
    byte(0x80 | (code >> 12 & 0x3F));
    byte(0x80 | (code >> 6 & 0x3F));
    byte(0x80 | (code & 0x3F));
  }
}

std::string printed(const char* format, double value) {
  std::array<char, 64> buffer{};
  const int size = std::snprintf(buffer.data(), buffer.size(), format, value);
  return {buffer.data(), at(size)};
}

std::string three_digits(double value) {
  return printed(value >= 99.95 ? "%.0f" : value >= 9.995 ? "%.1f" : "%.2f", value);
}

}  // namespace

std::string grouped(Index value) {
  std::string out = std::to_string(value);
  const std::size_t first = value < 0 ? 1 : 0;
  for (std::size_t i = out.size(); i > first + 3; i -= 3) out.insert(i - 3, 1, ',');
  return out;
}

std::string counted(Index count, std::string_view thing) {
  std::string out = grouped(count);
  return out.append(" ").append(thing).append(count == 1 ? "" : "s");
}

std::string short_number(double value, std::string_view unit) {
  constexpr std::array kSteps = {"", " k", " M", " G", " T", " P"};
  std::size_t step = 0;
  for (; std::abs(value) >= 999.5 && step + 1 < kSteps.size(); ++step) value /= 1000;
  std::string out = step == 0 && value == std::floor(value) ? printed("%.0f", value) : three_digits(value);
  return out.append(kSteps[step]).append(unit);
}

std::string bytes_text(double bytes) {
  constexpr std::array kSteps = {" B", " KiB", " MiB", " GiB", " TiB", " PiB"};
  std::size_t step = 0;
  for (; bytes >= 1023.5 && step + 1 < kSteps.size(); ++step) bytes /= 1024;
  std::string out = step == 0 ? printed("%.0f", bytes) : three_digits(bytes);
  return out.append(kSteps[step]);
}

std::string escaped(std::string_view text) {
  std::string out;
  for (std::size_t place = 0; place < text.size();) {
    const std::uint32_t code = take(text, place);
    if (code == '<')
      out += "&lt;";
    else if (code == '>')
      out += "&gt;";
    else if (code == '&')
      out += "&amp;";
    else if (code == '"')
      out += "&quot;";
    else if (code == '\'')
      out += "&#39;";
    else if ((code < 0x20 && code != '\t' && code != '\n') || code == 0xFFFE || code == 0xFFFF)
      put(kReplacement, out);
    else
      put(code, out);
  }
  return out;
}

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (std::size_t place = 0; place < text.size();) {
    const std::uint32_t code = take(text, place);
    const bool risky = code < 0x20 || code == '"' || code == '\\' || code == '<' || code == '>' || code == '&' ||
                       code == 0x7F || code == 0x2028 || code == 0x2029;
    if (!risky) {
      put(code, out);
      continue;
    }
    std::array<char, 16> hex{};
    std::snprintf(hex.data(), hex.size(), "\\u%04x", static_cast<unsigned>(code));
    out += hex.data();
  }
  out += '"';
  return out;
}

std::string json_list(const std::vector<Index>& values) {
  std::string out = "[";
  for (const Index v : values) {
    out += std::to_string(v);
    out += ',';
  }
  if (!values.empty()) out.pop_back();
  out += ']';
  return out;
}

std::string json_deltas(std::vector<Index> values) {
  for (std::size_t i = values.size(); i-- > 1;) values[i] -= values[i - 1];
  return json_list(values);
}

}  // namespace weft::draw
