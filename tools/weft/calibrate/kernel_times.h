// Measured times of kernel calls by case. From a file they can be fitted and checked again without the machine.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "weft/attention.h"
#include "weft/dtype.h"
#include "weft/kernel.h"

namespace weft::tool {

class KernelTimes {
 public:
  void add(const std::string& name, DType dtype, Index dim, Pass pass, double seconds);
  // Error if there is none.
  double seconds(const std::string& name, DType dtype, Index dim, Pass pass) const;
  bool empty() const { return times_.empty(); }
  bool read_from_file() const { return read_; }

  // [{"case": .., "dtype": .., "dim": .., "pass": .., "seconds": ..}, ..]
  nlohmann::json json() const;
  static KernelTimes read(const std::string& path);

 private:
  struct Time {
    std::string name;
    DType dtype;
    Index dim;
    Pass pass;
    double seconds;
  };
  const Time* find(const std::string& name, DType dtype, Index dim, Pass pass) const;

  std::vector<Time> times_;
  std::string path_ = "what was measured";
  bool read_ = false;
};

}  // namespace weft::tool
