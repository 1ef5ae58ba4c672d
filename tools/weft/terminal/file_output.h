// A file that a flag names.
#pragma once

#include <string>
#include <string_view>

#include "flags/flags.h"

namespace weft::tool {

// A name that cannot be written is refused before the work starts, and nothing is touched until the text is there: it
// goes into a temporary file beside the named one, which it then replaces as a whole. Whatever fails, the old file
// stays. What is no plain file (/dev/null, /dev/stdout, a pipe) is written to directly.
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

// Error if two flags name one file, however they spell it.
void check_outputs(const Flags& flags);

}  // namespace weft::tool
