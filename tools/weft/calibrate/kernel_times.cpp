#include "calibrate/kernel_times.h"

#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bench/case.h"
#include "terminal/json_file.h"
#include "weft/error.h"

namespace weft::tool {

void KernelTimes::add(const std::string& name, DType dtype, Index dim, Pass pass, double seconds) {
  if (find(name, dtype, dim, pass) == nullptr) times_.push_back({name, dtype, dim, pass, seconds});
}

const KernelTimes::Time* KernelTimes::find(const std::string& name, DType dtype, Index dim, Pass pass) const {
  for (const Time& t : times_)
    if (t.name == name && t.dtype == dtype && t.dim == dim && t.pass == pass) return &t;
  return nullptr;
}

double KernelTimes::seconds(const std::string& name, DType dtype, Index dim, Pass pass) const {
  if (const Time* found = find(name, dtype, dim, pass)) return found->seconds;
  throw Error(fmt::format("{}: no time of '{}', {} {}, {}", path_, name, weft::name(dtype), dim, tool::name(pass)),
              "measure with this version: the same command with --json and without --measured");
}

nlohmann::json KernelTimes::json() const {
  nlohmann::json all = nlohmann::json::array();
  for (const Time& t : times_)
    all.push_back({{"case", t.name},
                   {"dtype", weft::name(t.dtype)},
                   {"dim", t.dim},
                   {"pass", tool::name(t.pass)},
                   {"seconds", t.seconds}});
  return all;
}

KernelTimes KernelTimes::read(const std::string& path) {
  KernelTimes times;
  times.path_ = path;
  times.read_ = true;
  const nlohmann::json all = read_json("--measured", path, R"([{"case": "causal 1 x 768", "dtype": "f32", ..}, ..])");
  try {
    for (const nlohmann::json& t : all) {
      const double seconds = t.at("seconds").get<double>();
      const std::string pass = t.at("pass").get<std::string>();
      if (!(seconds > 0) || !std::isfinite(seconds))
        throw Error(fmt::format("{}: seconds are {}", path, seconds), "give more than 0");
      if (pass != "forward" && pass != "backward")
        throw Error(fmt::format("{}: pass '{}'", path, pass), "use forward or backward");
      times.add(t.at("case").get<std::string>(), dtype(t.at("dtype").get<std::string>()), t.at("dim").get<Index>(),
                pass == "forward" ? Pass::forward : Pass::backward, seconds);
    }
  } catch (const nlohmann::json::exception& error) {
    throw Error(fmt::format("{}: {}", path, error.what()), "give what --json wrote");
  }
  return times;
}

}  // namespace weft::tool
