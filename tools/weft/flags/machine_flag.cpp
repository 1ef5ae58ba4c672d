#include "flags/machine_flag.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include <fmt/format.h>

#include "weft/error.h"

namespace weft::tool {
namespace {

struct Close {
  void operator()(std::FILE* file) const { std::fclose(file); }
};
using File = std::unique_ptr<std::FILE, Close>;

}  // namespace

Machine read_machine(const std::string& path) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 20;
  const File file(std::fopen(path.c_str(), "rb"));
  if (!file)
    throw Error(fmt::format("cannot read '{}': {}", path, std::strerror(errno)),
                "give a machine file, or a preset's name");
  std::string text(kMostBytes + 1, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  if (std::ferror(file.get()) != 0)
    throw Error(fmt::format("cannot read '{}': {}", path, std::strerror(errno)), "give a machine file");
  return machine_from_json(text, path);
}

Machine machine_of(const Flags& flags, std::string_view otherwise) {
  const std::string name = flags.text("machine", otherwise);
  for (const Machine& m : machine_presets())
    if (m.name == name) return m;
  // A word without a dot or a slash was meant as a name.
  if (name.find_first_of("./") == std::string::npos) return machine_preset(name);
  return read_machine(name);
}

}  // namespace weft::tool
