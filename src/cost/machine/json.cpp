#include "cost/machine/json.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>

#include "index.h"
#include "text.h"
#include "weft/error.h"

namespace weft::cost {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 20;
constexpr int kDeepest = 8;
constexpr std::size_t kMostMembers = 64;  // of an object; also keeps the search for keys that come twice short

class Reader {
 public:
  Reader(std::string_view json, std::string_view file) : json_(json), file_(file) {}

  Json all() {
    if (json_.size() > kMostBytes)
      throw Error(text(file_, " has ", json_.size(), " bytes"), text("a machine file has at most ", kMostBytes));
    Json value = any(0);
    space();
    if (at_ != json_.size()) fail("something follows the end", "leave it out");
    return value;
  }

 private:
  [[noreturn]] void fail(std::string_view what, std::string_view remedy) const {
    throw Error(text(file_, ": line ", line_, ": ", what), std::string(remedy));
  }

  void space() {
    while (at_ < json_.size() && (json_[at_] == ' ' || json_[at_] == '\n' || json_[at_] == '\t' || json_[at_] == '\r'))
      line_ += json_[at_++] == '\n';
  }
  bool eat(char c) {
    space();
    if (at_ >= json_.size() || json_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!eat(c)) fail(text("a '", c, "' is missing"), "see to the commas, quotes and brackets before it");
  }
  // What stands here, up to 20 bytes and no half of a character.
  std::string_view beginning() const {
    std::size_t size = std::min<std::size_t>(20, json_.size() - at_);
    const auto continues = [&](std::size_t i) { return (static_cast<unsigned char>(json_[i]) & 0xC0) == 0x80; };
    while (size > 0 && at_ + size < json_.size() && continues(at_ + size)) --size;
    return json_.substr(at_, size);
  }
  bool word(std::string_view w) {
    if (json_.substr(at_, w.size()) != w) return false;
    at_ += w.size();
    return true;
  }

  Json any(int depth) {
    if (depth > kDeepest) fail(text("deeper than ", kDeepest), "a machine is a list of kernels and one of levels");
    space();
    Json value;
    value.line = line_;
    if (at_ >= json_.size()) fail("the file ends too early", "see to its brackets");
    const char c = json_[at_];
    if (c == '{') {
      value.kind = Json::Kind::object;
      ++at_;
      if (eat('}')) return value;
      do {
        space();
        std::string key = string();
        for (const auto& [other, unused] : value.members)
          if (other == key) fail(text(quoted(key), " comes twice"), "say it once");
        if (value.members.size() == kMostMembers)
          fail(text("an object has more than ", kMostMembers, " members"), "leave out what no machine has");
        expect(':');
        value.members.emplace_back(std::move(key), any(depth + 1));
      } while (eat(','));
      expect('}');
    } else if (c == '[') {
      value.kind = Json::Kind::array;
      ++at_;
      if (eat(']')) return value;
      do value.items.push_back(any(depth + 1));
      while (eat(','));
      expect(']');
    } else if (c == '"') {
      value.kind = Json::Kind::string;
      value.string = string();
    } else if (word("true") || word("false")) {
      value.kind = Json::Kind::boolean;
      value.flag = c == 't';
    } else if (!word("null")) {
      value.kind = Json::Kind::number;
      const auto [end, code] = std::from_chars(json_.data() + at_, json_.data() + json_.size(), value.number);
      if (code != std::errc() || !std::isfinite(value.number))
        fail(text(quoted(beginning()), " is no value"), "give a number, a string, true or false");
      at_ = at(end - json_.data());
    }
    return value;
  }

  // The four hexadecimal digits that follow \u.
  std::uint32_t digits() {
    std::uint32_t unit = 0;
    const std::string_view four = json_.substr(at_, 4);
    const auto [end, code] = std::from_chars(four.data(), four.data() + four.size(), unit, 16);
    if (four.size() < 4 || code != std::errc() || end != four.data() + 4)
      fail("\\u without four hexadecimal digits", "write e.g. \\u00e9, or the character itself");
    at_ += 4;
    return unit;
  }
  // A character past U+FFFF comes in two halves, each of which means nothing alone.
  std::uint32_t escaped() {
    const std::uint32_t first = digits();
    const bool high = first >= 0xD800 && first < 0xDC00, low = first >= 0xDC00 && first < 0xE000;
    if (!high && !low) return first;
    if (high && json_.substr(at_, 2) == "\\u") {
      at_ += 2;
      const std::uint32_t second = digits();
      if (second >= 0xDC00 && second < 0xE000) return 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00);
    }
    fail("half of a surrogate pair", "write both halves, e.g. \\ud83d\\ude00, or the character itself");
  }
  static void append_utf8(std::uint32_t point, std::string& to) {
    const auto tail = [&](int bits) { to += static_cast<char>(0x80 | (point >> bits & 0x3F)); };
    if (point < 0x20) {
      to += ' ';  // as \n and \t
    } else if (point < 0x80) {
      to += static_cast<char>(point);
    } else if (point < 0x800) {
      to += static_cast<char>(0xC0 | point >> 6);
      tail(0);
    } else if (point < 0x10000) {
      to += static_cast<char>(0xE0 | point >> 12);
      tail(6);
      tail(0);
    } else {
      to += static_cast<char>(0xF0 | point >> 18);
      tail(12);
      tail(6);
      tail(0);
    }
  }

  std::string string() {
    expect('"');
    std::string out;
    while (at_ < json_.size() && json_[at_] != '"') {
      char c = json_[at_++];
      if (static_cast<unsigned char>(c) < ' ') fail("a string goes over its line", "end it with a quote");
      if (c == '\\') {
        if (at_ >= json_.size()) break;
        c = json_[at_++];
        if (c == 'n' || c == 't' || c == 'r' || c == 'b' || c == 'f')
          c = ' ';
        else if (c == 'u') {
          append_utf8(escaped(), out);
          continue;
        }
      }
      out += c;
    }
    expect('"');
    return out;
  }

  std::string_view json_, file_;
  std::size_t at_ = 0;
  int line_ = 1;
};

}  // namespace

Json parse_json(std::string_view json, std::string_view file) { return Reader(json, file).all(); }

std::string quoted(std::string_view string) {
  std::string out = "\"";
  for (const char c : string) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
  }
  return out + '"';
}

}  // namespace weft::cost
