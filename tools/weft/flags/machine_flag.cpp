#include "flags/machine_flag.h"

#include "terminal/file_output.h"

namespace weft::tool {

Machine machine_of(const Flags& flags, std::string_view otherwise) {
  const std::string name = flags.text("machine", otherwise);
  for (const Machine& m : machine_presets())
    if (m.name == name) return m;
  // A word without a dot or a slash is the name of a preset, not a file: the error lists the presets.
  if (name.find_first_of("./") == std::string::npos) return machine_preset(name);
  constexpr std::size_t kMostBytes = std::size_t{1} << 20;
  return machine_from_json(read_file(name, kMostBytes, "give a machine file, or a preset's name"), name);
}

}  // namespace weft::tool
