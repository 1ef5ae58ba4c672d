// Tables of records: what --json writes is what the table shows.
#pragma once

#include <span>
#include <string>

#include <nlohmann/json_fwd.hpp>

namespace weft::tool {

struct Column {
  // How a number is written: so many decimals, or one of these.
  static constexpr int kRate = -1;   // three digits, from fractions to hundreds
  static constexpr int kBytes = -2;  // with its unit

  std::string title;  // in two lines: "useful\nGFLOP/s"
  std::string key;    // a JSON pointer, "/forward/seconds"; empty: nothing but the title
  int width = 0;      // below 0: aligned left
  int decimals = 0;
  double scale = 1;  // times the number
  std::string unit = {};
};

std::string head_of(std::span<const Column> columns);  // with the end of its lines
// Values that the record does not have, or that are null or empty, are "-".
std::string line_of(std::span<const Column> columns, const nlohmann::json& record);

}  // namespace weft::tool
