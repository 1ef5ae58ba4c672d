#include "terminal/json_file.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "weft/error.h"

namespace weft::tool {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxBytes = std::size_t{64} << 20;
constexpr std::size_t kMaxDepth = 4;        // runs need 3, slices too
constexpr std::size_t kMaxKeys = 16;        // of an object: more than any has
constexpr std::size_t kLongestError = 300;  // of the parser, which would quote a number of a million digits

// A value in an error: short, and readable even if its bytes are no UTF-8.
std::string shown(const json& value) {
  constexpr std::size_t kLongest = 60;
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
  return text;
}

// One document, with the name that errors begin with.
struct Source {
  std::string name;
  json value;
};

// Checks depth and duplicate keys before a document is built. (The parser's own callback would do too, but it walks
// through a whole list after each of its objects.)
class StructureCheck : public nlohmann::json_sax<json> {
 public:
  StructureCheck(std::string_view name, std::string_view remedy) : name_(name), remedy_(remedy) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_array(std::size_t) override { return open(); }
  bool end_array() override { return close(); }
  bool start_object(std::size_t) override { return open(); }
  bool end_object() override { return close(); }
  bool key(string_t& key) override {
    std::vector<std::string>& before = keys_.at(depth_ - 1);
    if (std::find(before.begin(), before.end(), key) != before.end())
      throw Error(fmt::format("{}: key {} comes twice in an object", name_, shown(key)), "say it once");
    if (before.size() == kMaxKeys)
      throw Error(fmt::format("{}: an object has more than {} keys", name_, kMaxKeys), remedy_);
    before.push_back(key);
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& error) override {
    std::string what = error.what();  // "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
    what.erase(0, what.find("] ") + 2);
    if (what.size() > kLongestError) what = what.substr(0, kLongestError) + "...";
    std::replace_if(what.begin(), what.end(), [](char c) { return static_cast<unsigned char>(c) > 126; }, '?');
    throw Error(fmt::format("{}: {}", name_, what), remedy_);
  }

 private:
  bool open() {
    if (depth_ == kMaxDepth) throw Error(fmt::format("{}: lists nested too deep", name_), remedy_);
    keys_.at(depth_++).clear();
    return true;
  }
  bool close() {
    --depth_;
    return true;
  }

  std::string name_, remedy_;
  std::size_t depth_ = 0;
  std::array<std::vector<std::string>, kMaxDepth> keys_;  // seen so far, of each open object
};

Source parse(std::string_view flag, const std::string& value, std::string_view example, bool object = false) {
  const bool is_inline = value.starts_with('[') || value.starts_with('{');
  Source source{is_inline ? std::string(flag) : value, {}};
  const std::string remedy = fmt::format("write e.g. {}", example);
  const std::string file = is_inline ? "" : read_file(value, kMaxBytes, "give a file that can be read");
  const std::string& text = is_inline ? value : file;
  StructureCheck check(source.name, remedy);
  json::sax_parse(text, &check);
  source.value = json::parse(text);
  if (object ? !source.value.is_object() : !source.value.is_array())
    throw Error(fmt::format("{}: not {}", source.name, object ? "an object" : "a list"), remedy);
  return source;
}

[[noreturn]] void refuse(const std::string& at, std::string_view problem, std::string_view remedy) {
  throw Error(fmt::format("{}: {}", at, problem), std::string(remedy));
}

void check_object(const std::string& at, const json& value, std::initializer_list<std::string_view> keys,
                  std::string_view remedy) {
  if (!value.is_object()) refuse(at, fmt::format("{} is not an object", shown(value)), remedy);
  for (const auto& [key, unused] : value.items()) {
    if (std::find(keys.begin(), keys.end(), key) == keys.end())
      refuse(at, fmt::format("unknown key {}", shown(key)), remedy);
  }
}

// The limits keep later arithmetic far from overflow.
Index number(const std::string& at, const json& value) {
  const bool whole = value.is_number_integer();
  const bool too_large = value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{kMaxTokens};
  if (!whole || too_large || value.get<Index>() < -kMaxTokens || value.get<Index>() > kMaxTokens)
    refuse(at, fmt::format("{} is not a whole number within +-{}", shown(value), kMaxTokens),
           "use whole numbers in this range");
  return value.get<Index>();
}

Index member(const std::string& at, const json& object, const char* key, std::optional<Index> otherwise,
             std::string_view remedy) {
  const auto found = object.find(key);
  if (found != object.end() && !(otherwise && found->is_null()))
    return number(fmt::format("{}: \"{}\"", at, key), *found);
  if (!otherwise) refuse(at, fmt::format("\"{}\" is missing", key), remedy);
  return *otherwise;
}

Range range(const std::string& at, const json& object, const char* key, std::string_view remedy) {
  const auto found = object.find(key);
  if (found == object.end()) refuse(at, fmt::format("\"{}\" is missing", key), remedy);
  const std::string place = fmt::format("{}: \"{}\"", at, key);
  if (!found->is_array() || found->size() != 2)
    refuse(place, fmt::format("{} is not [begin, end]", shown(*found)), remedy);
  return {number(place, (*found)[0]), number(place, (*found)[1])};
}

constexpr std::string_view kSliceExample = R"([{"q": [0, 8], "k": [0, 8], "hi": 0}], keys q, k, lo, hi)";
constexpr std::string_view kRunExample = R"([[{"row": 0, "token": 0, "count": 4}]], keys row, token, count, stride)";

constexpr std::string_view kTreeExample =
    R"({"nodes": [{"parent": -1, "tokens": 5}, {"parent": 0, "tokens": 3}]} or {"sequences": [[5, 6, 7], [5, 6, 8]]})";

Tree tree_of_nodes(const std::string& name, const json& nodes, const std::string& remedy) {
  std::vector<Index> parents, lengths;
  for (const json& item : nodes) {
    const std::string at = fmt::format("{}: node {}", name, parents.size());
    check_object(at, item, {"parent", "tokens"}, remedy);
    parents.push_back(member(at, item, "parent", {}, remedy));
    lengths.push_back(member(at, item, "tokens", {}, remedy));
  }
  return Tree::from_nodes({.parents = parents, .lengths = lengths});
}

Tree tree_of_sequences(const std::string& name, const json& sequences, const std::string& remedy) {
  std::vector<Index> tokens, cu_seqlens{0};
  for (const json& item : sequences) {
    const std::string at = fmt::format("{}: sequence {}", name, cu_seqlens.size() - 1);
    if (!item.is_array()) refuse(at, fmt::format("{} is not a list of token ids", shown(item)), remedy);
    for (const json& id : item) tokens.push_back(number(at, id));
    cu_seqlens.push_back(static_cast<Index>(tokens.size()));
  }
  return Tree::from_sequences(tokens, cu_seqlens);
}

}  // namespace

Tree read_tree(std::string_view flag, const std::string& value) {
  const Source source = parse(flag, value, kTreeExample, true);
  const std::string remedy = fmt::format("write e.g. {}", kTreeExample);
  check_object(source.name, source.value, {"nodes", "sequences"}, remedy);
  if (source.value.size() != 1) refuse(source.name, "not one of \"nodes\" and \"sequences\"", remedy);
  const auto given = source.value.begin();
  if (!given->is_array()) refuse(source.name, fmt::format("\"{}\" is not a list", given.key()), remedy);
  return given.key() == "nodes" ? tree_of_nodes(source.name, *given, remedy)
                                : tree_of_sequences(source.name, *given, remedy);
}

std::vector<Slice> read_slices(std::string_view flag, const std::string& value) {
  const Source source = parse(flag, value, kSliceExample);
  const std::string remedy = fmt::format("write e.g. {}", kSliceExample);
  std::vector<Slice> slices;
  for (const json& item : source.value) {
    const std::string at = fmt::format("{}: slice {}", source.name, slices.size());
    check_object(at, item, {"q", "k", "lo", "hi"}, remedy);
    const Range q = range(at, item, "q", remedy), k = range(at, item, "k", remedy);
    slices.push_back({q.begin, q.end, k.begin, k.end, member(at, item, "lo", -kUnlimited, remedy),
                      member(at, item, "hi", kUnlimited, remedy)});
  }
  return slices;
}

std::vector<std::vector<Run>> read_runs(std::string_view flag, const std::string& value) {
  const Source source = parse(flag, value, kRunExample);
  const std::string remedy = fmt::format("write e.g. {}", kRunExample);
  std::vector<std::vector<Run>> ranks;
  for (const json& list : source.value) {
    const std::string rank = fmt::format("{}: rank {}", source.name, ranks.size());
    if (!list.is_array()) refuse(rank, fmt::format("{} is not a list of runs", shown(list)), remedy);
    std::vector<Run> runs;
    for (const json& item : list) {
      const std::string at = fmt::format("{}, run {}", rank, runs.size());
      check_object(at, item, {"row", "token", "count", "stride"}, remedy);
      runs.push_back({member(at, item, "row", {}, remedy), member(at, item, "token", {}, remedy),
                      member(at, item, "count", {}, remedy), member(at, item, "stride", 1, remedy)});
    }
    ranks.push_back(std::move(runs));
  }
  return ranks;
}

json read_json(std::string_view flag, const std::string& value, std::string_view example) {
  return parse(flag, value, example).value;
}

void JsonOutput::write(const json& value) {
  if (file_) file_.write(value.dump(2, ' ', false, json::error_handler_t::replace) + "\n");
}

}  // namespace weft::tool
