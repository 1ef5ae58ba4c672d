#include "terminal/columns.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "terminal/numbers.h"

namespace weft::tool {
namespace {

using nlohmann::json;

std::string aligned(const std::string& text, int width) {
  return width < 0 ? fmt::format("{:<{}}", text, -width) : fmt::format("{:>{}}", text, width);
}

std::string shown(const Column& column, const json& record) {
  if (column.key.empty()) return "";
  const json::json_pointer key(column.key);
  if (!record.contains(key) || record.at(key).is_null()) return "-";
  const json& value = record.at(key);
  if (value.is_string()) return value.get<std::string>().empty() ? "-" : value.get<std::string>();
  if (column.decimals == Column::kBytes) return bytes_text(value.get<Index>());
  const double number = value.get<double>() * column.scale;
  return fmt::format("{:.{}f}{}", number, column.decimals == Column::kRate ? (number < 10 ? 2 : 1) : column.decimals,
                     column.unit);
}

}  // namespace

std::string head_of(std::span<const Column> columns) {
  const auto is_high = [](const Column& c) { return c.title.find('\n') != std::string::npos; };
  std::string above, below;
  for (const Column& c : columns) {
    const std::size_t end = c.title.find('\n');
    above += aligned(is_high(c) ? c.title.substr(0, end) : "", c.width);
    below += aligned(is_high(c) ? c.title.substr(end + 1) : c.title, c.width);
  }
  return std::any_of(columns.begin(), columns.end(), is_high) ? above + "\n" + below + "\n" : below + "\n";
}

std::string line_of(std::span<const Column> columns, const json& record) {
  std::string line;
  for (const Column& c : columns) line += aligned(shown(c, record), c.width);
  return line;
}

}  // namespace weft::tool
