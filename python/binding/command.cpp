// The weft command, for python -m weft.
#include "module.h"
#ifdef WEFT_WITH_COMMAND
#include <string>
#include <vector>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "gil.h"
#include "verbs.h"

namespace {

int command(std::vector<std::string> words) {
  std::vector<char*> argv;
  argv.reserve(words.size() + 1);
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const weft::python::ReleaseGil release;
  return weft::tool::command(static_cast<int>(words.size()), argv.data());
}

}  // namespace
#endif

void weft::python::bind_command([[maybe_unused]] nanobind::module_& m) {
#ifdef WEFT_WITH_COMMAND
  m.def("command", command, nanobind::arg("words"),
        "The weft command with these words, its name first; returns its exit code.");
#endif
}
