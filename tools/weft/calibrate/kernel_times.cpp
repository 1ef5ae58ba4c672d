#include "calibrate/kernel_times.h"

#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "bench/case.h"
#include "terminal/json_file.h"
#include "weft/error.h"

namespace weft::tool {

void KernelTimes::add(const std::string& name, DType dtype, Index dim, Pass pass, double seconds) {
  const Key key{name, dtype, dim, pass};
  if (times_.emplace(key, seconds).second) order_.push_back(key);
}

double KernelTimes::seconds(const std::string& name, DType dtype, Index dim, Pass pass) const {
  const auto found = times_.find({name, dtype, dim, pass});
  if (found != times_.end()) return found->second;
  throw Error(fmt::format("{}: no time of '{}', {} {}, {}", path_, name, weft::name(dtype), dim, tool::name(pass)),
              "measure with this version: the same command with --json and without --measured");
}

nlohmann::json KernelTimes::json() const {
  nlohmann::json all = nlohmann::json::array();
  for (const Key& key : order_) {
    const auto& [name, dtype, dim, pass] = key;
    all.push_back({{"case", name},
                   {"dtype", weft::name(dtype)},
                   {"dim", dim},
                   {"pass", tool::name(pass)},
                   {"seconds", times_.at(key)}});
  }
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
