// Reads numbers of flags, and writes numbers for people.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "draw/formatting.h"
#include "weft/config.h"

namespace weft::tool {

// These throw Error, naming the flag, the text and an example. `flag` is written as the user writes it: "--ranks".
// Whole numbers may have a suffix: k, m, g (or K, M, G) are 1024, 1024^2, 1024^3, so 64k is 65536 and 1.5M 1572864.
Index whole_number(std::string_view flag, std::string_view text, std::string_view example);
std::vector<Index> whole_numbers(std::string_view flag, std::string_view text, std::string_view example);
double real_size(std::string_view flag, std::string_view text, std::string_view example);
double real_number(std::string_view flag, std::string_view text, std::string_view example);

std::vector<std::string_view> split(std::string_view text, char separator);

using draw::grouped;                  // 12,345,678
std::string bytes_text(Index bytes);  // 310 MiB

}  // namespace weft::tool
