#include "file_output.h"

#include <cerrno>
#include <cstring>

#include <fmt/format.h>

#include "weft/error.h"

namespace weft::tool {

FileOutput::FileOutput(std::string_view flag, const std::string* path) : flag_(flag) {
  if (!path) return;
  path_ = *path;
  file_.reset(std::fopen(path_.c_str(), "wb"));
  if (!file_)
    throw Error(fmt::format("{}: cannot write '{}': {}", flag_, path_, std::strerror(errno)),
                "give a file in a folder that exists and can be written");
}

void FileOutput::write(std::string_view text) {
  if (!file_) return;
  const bool written = std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size();
  if (!written || std::fflush(file_.get()) != 0)
    throw Error(fmt::format("{}: cannot write '{}': {}", flag_, path_, std::strerror(errno)), "make room for the file");
}

}  // namespace weft::tool
