// A file that a flag names.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <string_view>

namespace weft::tool {

// Opened before the work starts, so that a name that cannot be written is refused at once.
class FileOutput {
 public:
  FileOutput(std::string_view flag, const std::string* path);  // null: nothing is written
  explicit operator bool() const { return file_ != nullptr; }
  const std::string& path() const { return path_; }
  void write(std::string_view text);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string flag_, path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace weft::tool
