// Machines as JSON. One list of fields serves reading and writing.
#include <charconv>
#include <cmath>

#include "cost/machine/json.h"
#include "text.h"
#include "weft/cost.h"
#include "weft/error.h"

namespace weft {
namespace {

using cost::Json;

template <class F, class K>
void kernel_fields(K& k, F&& f) {
  f("pass", k.pass);
  f("dtype", k.dtype);
  f("dim", k.dim);
  f("flops", k.flops);
  f("tile_q", k.tile_q);
  f("tile_k", k.tile_k);
  f("tile_seconds", k.tile_seconds);
  f("row_seconds", k.row_seconds);
  f("call_seconds", k.call_seconds);
  f("units", k.units);
  f("source", k.source);
}

template <class F, class L>
void level_fields(L& l, F&& f) {
  f("name", l.name);
  f("ranks", l.ranks);
  f("bandwidth", l.bandwidth);
  f("full_duplex", l.full_duplex);
  f("limits_sends", l.limits_sends);
  f("latency", l.latency);
  f("message_seconds", l.message_seconds);
  f("uplink", l.uplink);
  f("interference", l.interference);
  f("source", l.source);
}

template <class F, class M>
void machine_fields(M& m, F&& f) {
  f("name", m.name);
  f("about", m.about);
  f("kernels", m.kernels);
  f("levels", m.levels);
  f("memory_bytes", m.memory_bytes);
  f("row_bandwidth", m.row_bandwidth);
  f("row_seconds", m.row_seconds);
  f("copy_bandwidth", m.copy_bandwidth);
  f("copy_seconds", m.copy_seconds);
  f("exchange_seconds", m.exchange_seconds);
  f("progress", m.progress);
  f("relays_gathers", m.relays_gathers);
  f("processor_ranks", m.processor_ranks);
  f("processor_kernels", m.processor_kernels);
  f("source", m.source);
}

template <class F, class K>
void fields(K& of, F&& f) {
  if constexpr (std::is_same_v<std::remove_const_t<K>, KernelRate>)
    kernel_fields(of, f);
  else if constexpr (std::is_same_v<std::remove_const_t<K>, Level>)
    level_fields(of, f);
  else
    machine_fields(of, f);
}

// Fills an object; what is left out keeps its default.
class Filler {
 public:
  Filler(const Json& from, std::string at, std::string_view file) : from_(from), at_(std::move(at)), file_(file) {
    if (from.kind != Json::Kind::object) fail(from, at_, "is no object", "write {\"name\": .., ..}");
  }

  template <class T>
  void fill(T& to) {
    fields(to, [&](const char* key, auto& field) {
      known_ += text(known_.empty() ? "" : ", ", key);
      for (const auto& [name, value] : from_.members) {
        if (name != key) continue;
        ++found_;
        set(field, value, at_.empty() ? name : text(at_, ".", name));
      }
    });
    if (found_ == from_.members.size()) return;
    for (const auto& [name, value] : from_.members) {
      bool is_field = false;
      fields(to, [&](const char* key, const auto&) { is_field = is_field || name == key; });
      if (!is_field) fail(value, at_.empty() ? name : text(at_, ".", name), "is not known", text("use ", known_));
    }
  }

 private:
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
  std::size_t found_ = 0;
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
  fields(of, [&](const char* key, const auto& value) {
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
