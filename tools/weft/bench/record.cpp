#include "bench/record.h"

#include <cstdio>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "terminal/numbers.h"

namespace weft::tool {
namespace {

constexpr std::string_view kLine = "{:<10}{:<6}{:<9}{:>9}  {:<28}{:>9}{:>8}{:>9}{:>11}{:>11}\n";

std::string shown(const std::optional<double>& value, int decimals) {
  return value ? fmt::format("{:.{}f}", *value, decimals) : "-";
}

// Three digits: rates from a fraction to hundreds.
std::string rate(const std::optional<double>& value) { return shown(value, value && *value < 10 ? 2 : 1); }

template <class T>
nlohmann::json or_null(const std::optional<T>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json();
}

}  // namespace

nlohmann::json to_json(const BenchRecord& r) {
  std::optional<Index> peak;
  if (r.memory) peak = r.memory->peak_bytes;
  return {{"case", r.name},
          {"dtype", weft::name(r.dtype)},
          {"pass", name(r.pass)},
          {"gflops", r.gflops},
          {"peer", or_null(r.peer)},
          {"peer_gflops", or_null(r.peer_gflops)},
          {"ratio", or_null(r.ratio)},
          {"gemm_gflops", or_null(r.gemm_gflops)},
          {"peak_bytes", or_null(peak)}};
}

void print_bench_head() {
  fmt::print(fmt::runtime(kLine), "", "", "", "useful", "", "peer's", "times", "over", "peak", "memory");
  fmt::print(fmt::runtime(kLine), "case", "dtype", "pass", "GFLOP/s", "peer", "GFLOP/s", "peer", "gemm", "memory",
             "over I/O");
}

void print_bench_line(const BenchRecord& r) {
  std::optional<double> over_gemm, over_io;
  if (r.gemm_gflops) over_gemm = r.gflops / *r.gemm_gflops;
  if (r.memory)
    over_io = static_cast<double>(r.memory->peak_bytes) / static_cast<double>(max_of(r.memory->tensor_bytes, 1));
  fmt::print(fmt::runtime(kLine), r.name, weft::name(r.dtype), name(r.pass), rate(r.gflops), r.peer.value_or("-"),
             rate(r.peer_gflops), shown(r.ratio, 2), shown(over_gemm, 2),
             r.memory ? bytes_text(r.memory->peak_bytes) : "-", shown(over_io, 2));
  std::fflush(stdout);  // the next line may take a minute
}

}  // namespace weft::tool
