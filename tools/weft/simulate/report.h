// The lines of a sweep, and the totals of a model's layers, as JSON and as a table.
#pragma once

#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "draw/simulation.h"

namespace weft::tool {

// A line: one layer's passes.
nlohmann::json to_json(const draw::Simulation& line);
// All layers of a model: its kinds one after another, in the same layout. What a line has, added up.
nlohmann::json total_json(const std::vector<const draw::Simulation*>& kinds, Index tp);

struct Shown {
  bool windows = false, heads = false, layers = false;  // columns that lines differ in
};
void print_report(const std::vector<nlohmann::json>& records, const Shown& shown);

}  // namespace weft::tool
