// A line of the table of `weft bench`, and its record in --json.
#pragma once

#include <optional>
#include <string>

#include <nlohmann/json_fwd.hpp>

#include "bench/case.h"
#include "bench/memory.h"

namespace weft::tool {

// Unknown values are "-" in the table and null in JSON.
struct BenchRecord {
  std::string name;
  DType dtype = DType::f32;
  Pass pass = Pass::forward;
  double gflops = 0;
  std::optional<std::string> peer = {};
  std::optional<double> peer_gflops = {}, ratio = {}, gemm_gflops = {};
  std::optional<MemoryProbe> memory = {};
};

nlohmann::json to_json(const BenchRecord& record);
void print_bench_head();
void print_bench_line(const BenchRecord& record);

}  // namespace weft::tool
