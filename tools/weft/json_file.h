// JSON in and out: a caller's slices and runs, and the numbers a verb reports.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "weft/layout.h"
#include "weft/slice.h"

namespace weft::tool {

// `value` is the name of a file, or JSON itself if it begins with '[' or '{'. Errors name the file (or the flag) and
// the place.
// [{"q": [begin, end], "k": [begin, end], "lo": -3, "hi": 0}, ..]; lo, hi left out or null: no limit.
std::vector<Slice> read_slices(std::string_view flag, const std::string& value);
// One list a rank: [[{"row": 0, "token": 0, "count": 4, "stride": 1}, ..], ..]; stride left out: 1.
std::vector<std::vector<Run>> read_runs(std::string_view flag, const std::string& value);

// Opened before the work starts, so that a name that cannot be written is refused at once.
class JsonOutput {
 public:
  explicit JsonOutput(const std::string* path);  // null: nothing is written
  void write(const nlohmann::json& value);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace weft::tool
