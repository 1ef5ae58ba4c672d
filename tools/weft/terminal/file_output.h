// Files that flags name.
#pragma once

#include <string>
#include <string_view>

#include "flags/flags.h"

namespace weft::tool {

// A file that cannot be written is refused before the work starts. The text goes into a temporary file in the same
// folder, which then replaces the named one as a whole: if anything fails, the old file stays. Anything but a plain
// file
// (/dev/null, /dev/stdout, a pipe) is written to directly.
class FileOutput {
 public:
  FileOutput(std::string_view flag, const std::string* path);  // null: nothing is written
  explicit operator bool() const { return !path_.empty(); }
  const std::string& path() const { return path_; }
  void write(std::string_view text) const;

 private:
  void replace(std::string_view text) const;

  std::string flag_, path_;
  std::string target_;  // the plain file behind links; empty: written to directly
};

// The whole file. Error if it cannot be read (with the remedy) or has more than `most` bytes.
std::string read_file(const std::string& path, std::size_t most, const std::string& remedy);

// Error if two flags name one file, however they spell it.
void check_outputs(const Flags& flags);

}  // namespace weft::tool
