// JSON in and out: a caller's slices, runs and trees, and the numbers a verb reports.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "terminal/file_output.h"
#include "weft/layout.h"
#include "weft/slice.h"
#include "weft/tree.h"

namespace weft::tool {

// `value` is the name of a file, or JSON itself if it begins with '[' or '{'. Errors name the file (or the flag) and
// the place.
// [{"q": [begin, end], "k": [begin, end], "lo": -3, "hi": 0}, ..]; lo, hi left out or null: no limit.
std::vector<Slice> read_slices(std::string_view flag, const std::string& value);
// One list a rank: [[{"row": 0, "token": 0, "count": 4, "stride": 1}, ..], ..]; stride left out: 1.
std::vector<std::vector<Run>> read_runs(std::string_view flag, const std::string& value);

// {"nodes": [{"parent": -1, "tokens": 5}, ..]} or {"sequences": [[token ids], ..]}.
Tree read_tree(std::string_view flag, const std::string& value);

// A JSON list in a file. Error with the example if it is something else.
nlohmann::json read_json(std::string_view flag, const std::string& value, std::string_view example);

class JsonOutput {
 public:
  explicit JsonOutput(const std::string* path) : file_("--json", path) {}  // null: nothing is written
  void write(const nlohmann::json& value);

 private:
  FileOutput file_;
};

}  // namespace weft::tool
