// Machines as JSON.
#include <charconv>
#include <cmath>

#include "cost/machine/fields.h"
#include "cost/machine/json.h"
#include "text.h"
#include "weft/cost.h"
#include "weft/error.h"

namespace weft {
namespace {

using cost::Json;

// Fills an object; what is left out keeps its default.
class Filler {
 public:
  Filler(const Json& from, std::string at, std::string_view file) : from_(from), at_(std::move(at)), file_(file) {
    if (from.kind != Json::Kind::object) fail(from, at_, "is no object", "write {\"name\": .., ..}");
  }

  template <class T>
  void fill(T& to) {
    cost::fields(to, [&](const char* key, auto& field, const cost::Limit&) {
      known_ += text(known_.empty() ? "" : ", ", key);
      for (const auto& [name, value] : from_.members)
        if (name == key) set(field, value, place(name));
    });
    for (const auto& [name, value] : from_.members) {
      bool is_field = false;
      cost::fields(to, [&](const char* key, const auto&, const cost::Limit&) { is_field = is_field || name == key; });
      if (!is_field) fail(value, place(name), "is not known", text("use ", known_));
    }
  }

 private:
  std::string place(const std::string& name) const { return at_.empty() ? name : text(at_, ".", name); }
  [[noreturn]] void fail(const Json& value, const std::string& at, std::string_view what, std::string remedy) const {
    throw Error(text(file_, ": line ", value.line, ": ", at, " ", what), std::move(remedy));
  }
  void expect(const Json& value, Json::Kind kind, const std::string& at, const char* what) const {
    if (value.kind != kind) fail(value, at, text("is no ", what), text("give a ", what));
  }

  void set(std::string& to, const Json& value, const std::string& at) const {
    expect(value, Json::Kind::string, at, "string");
    constexpr std::size_t kLongest = 4096;
    if (value.string.size() > kLongest) fail(value, at, text("has ", value.string.size(), " bytes"), "be brief: 4096");
    to = value.string;
  }
  void set(bool& to, const Json& value, const std::string& at) const {
    expect(value, Json::Kind::boolean, at, "true or false");
    to = value.flag;
  }
  void set(double& to, const Json& value, const std::string& at) const {
    expect(value, Json::Kind::number, at, "number");
    to = value.number;
  }
  void set(Index& to, const Json& value, const std::string& at) const {
    expect(value, Json::Kind::number, at, "number");
    constexpr double kMost = 1e9;
    if (value.number != std::floor(value.number) || std::abs(value.number) > kMost)
      fail(value, at, text("is ", value.number), "give a whole number below a billion");
    to = static_cast<Index>(value.number);
  }
  void set(Pass& to, const Json& value, const std::string& at) const {
    expect(value, Json::Kind::string, at, "string");
    if (value.string != "forward" && value.string != "backward")
      fail(value, at, text("is ", cost::quoted(value.string)), "use forward or backward");
    to = value.string == "forward" ? Pass::forward : Pass::backward;
  }
  void set(DType& to, const Json& value, const std::string& at) const {
    expect(value, Json::Kind::string, at, "string");
    try {
      to = dtype(value.string);
    } catch (const Error& error) {
      fail(value, at, text("is ", cost::quoted(value.string)), error.what());
    }
  }
  template <class T>
  void set(std::vector<T>& to, const Json& value, const std::string& at) const {
    expect(value, Json::Kind::array, at, "list");
    constexpr std::size_t kMost = 256;
    if (value.items.size() > kMost) fail(value, at, text("has ", value.items.size(), " entries"), "use at most 256");
    to.clear();
    for (const Json& item : value.items) {
      to.emplace_back();
      Filler(item, text(at, "[", to.size() - 1, "]"), file_).fill(to.back());
    }
  }

  const Json& from_;
  std::string at_;
  std::string_view file_;
  std::string known_;
};

std::string shown(double value) {
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value).ptr;
  return {buffer, end};
}

std::string shown(const std::string& value) { return cost::quoted(value); }
std::string shown(bool value) { return value ? "true" : "false"; }
std::string shown(Index value) { return std::to_string(value); }
std::string shown(Pass value) { return value == Pass::forward ? "\"forward\"" : "\"backward\""; }
std::string shown(DType value) { return cost::quoted(name(value)); }

template <class T>
std::string object(const T& of, const std::string& indent);

template <class T>
std::string shown(const std::vector<T>& all) {
  std::string out = "[";
  for (const T& each : all) out += text(out == "[" ? "\n    " : ",\n    ", object(each, "      "));
  return out + "\n  ]";
}

template <class T>
std::string object(const T& of, const std::string& indent) {
  std::string out = "{";
  cost::fields(of, [&](const char* key, const auto& value, const cost::Limit&) {
    out += text(out == "{" ? "" : ",", "\n", indent, "\"", key, "\": ", shown(value));
  });
  return text(out, "\n", indent.substr(2), "}");
}

}  // namespace

Machine machine_from_json(std::string_view json, std::string_view file) {
  const Json value = cost::parse_json(json, file);
  Machine machine;
  Filler(value, "", file).fill(machine);
  try {
    check_machine(machine);
  } catch (const Error& e) {
    throw Error(text(file, ": ", e.problem()), e.remedy());
  }
  return machine;
}

std::string to_json(const Machine& machine) { return object(machine, "  ") + "\n"; }

}  // namespace weft
