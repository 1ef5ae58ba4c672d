// Escapes text from flags and files for HTML and JSON, and writes numbers for people.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "weft/config.h"

namespace weft::draw {

std::string grouped(Index value);                                    // 12,345
std::string counted(Index count, std::string_view thing);            // "1 token", "12 tokens"
std::string short_number(double value, std::string_view unit = "");  // 1.25 M
std::string bytes_text(double bytes);                                // 1.25 MiB

// For text and attributes of HTML and SVG. Bytes that are not UTF-8, and characters that XML forbids, become U+FFFD.
std::string escaped(std::string_view text);
// A JSON string. Characters that could end a <script> or a line of JavaScript are written as \u....
std::string json_string(std::string_view text);
// [1,2,3]
std::string json_list(const std::vector<Index>& values);
// The first value, then differences: short where values follow a pattern.
std::string json_deltas(std::vector<Index> values);

}  // namespace weft::draw
