#include "draw/palette.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string_view>
#include <utility>

#include "text.h"

namespace weft::draw {
namespace {

Colour of(unsigned code) {
  return {static_cast<double>(code >> 16 & 0xFF), static_cast<double>(code >> 8 & 0xFF),
          static_cast<double>(code & 0xFF)};
}

std::vector<Colour> of(const std::vector<unsigned>& codes) {
  std::vector<Colour> colours;
  for (const unsigned code : codes) colours.push_back(of(code));
  return colours;
}

std::vector<Colour> ramp(const std::vector<Colour>& stops, Index count) {
  std::vector<Colour> colours;
  for (Index i = 0; i < count; ++i) {
    const double place =
        count == 1 ? 0
                   : static_cast<double>(i) / static_cast<double>(count - 1) * static_cast<double>(stops.size() - 1);
    const std::size_t low = std::min(static_cast<std::size_t>(place), stops.size() - 2);
    colours.push_back(mixed(stops[low], stops[low + 1], place - static_cast<double>(low)));
  }
  return colours;
}

std::string list(const std::vector<Colour>& colours) {
  std::string out;
  for (const Colour& c : colours) out += text(out.empty() ? "" : ",", "\"", hex(c), "\"");
  return out;
}

}  // namespace

std::string hex(const Colour& c) {
  const auto byte = [](double v) { return static_cast<unsigned>(std::lround(std::clamp(v, 0.0, 255.0))); };
  std::array<char, 16> code{};
  std::snprintf(code.data(), code.size(), "#%02x%02x%02x", byte(c.red) & 0xFF, byte(c.green) & 0xFF,
                byte(c.blue) & 0xFF);
  return code.data();
}

Colour mixed(const Colour& a, const Colour& b, double weight) {
  const auto between = [&](double x, double y) { return x + (y - x) * weight; };
  return {between(a.red, b.red), between(a.green, b.green), between(a.blue, b.blue)};
}

const Palette& palette(bool dark) {
  static const Palette light_palette{
      .paper = of(0xffffff),
      .empty = of(0xfafbfc),
      .ink = of(0x1b1f24),
      .quiet = of(0x5a6470),
      .line = of(0xd5dae0),
      .edge = of(0x8a94a0),
      .soft = of(0xf0f2f5),
      .wait = of(0xe3e7eb),
      .accent = of(0x0b5fad),
      .ranks = of({0x0072b2, 0xe69f00, 0x009e73, 0xcc79a7, 0xd55e00, 0x56b4e9, 0x3b2a8c, 0x8f8f1f}),
      .rank_ramp = of({0x2a1a6e, 0x23558f, 0x1f8489, 0x4ba46a, 0xa5b93c, 0xe8c22e}),
      .step_ramp = of({0x1d2a6b, 0x5a2a86, 0xa32f74, 0xd8504c, 0xef8f32, 0xf3c552})};
  static const Palette dark_palette{
      .paper = of(0x14171a),
      .empty = of(0x191d21),
      .ink = of(0xe8ebee),
      .quiet = of(0xa3acb6),
      .line = of(0x353c44),
      .edge = of(0x78838f),
      .soft = of(0x22282e),
      .wait = of(0x2a3138),
      .accent = of(0x6cb6ff),
      .ranks = of({0x4ba3e3, 0xf2b134, 0x2ec4a0, 0xe7a3c8, 0xf0743a, 0xa5daf8, 0x9d8bf0, 0xc5c65a}),
      .rank_ramp = of({0x6a5bd0, 0x4a86cf, 0x3fb0b0, 0x74cc86, 0xc9d860, 0xfbe38a}),
      .step_ramp = of({0xfbe6a8, 0xf7b860, 0xee7f55, 0xd4578c, 0xa24fb0, 0x6f55b8})};
  return dark ? dark_palette : light_palette;
}

std::vector<Colour> rank_colours(const Palette& p, Index ranks) {
  if (ranks > static_cast<Index>(p.ranks.size())) return ramp(p.rank_ramp, ranks);
  return {p.ranks.begin(), p.ranks.begin() + ranks};
}

std::vector<Colour> step_colours(const Palette& p, Index steps) { return ramp(p.step_ramp, std::max(steps, Index{1})); }

Colour pale(const Palette& p, const Colour& c) { return mixed(c, p.empty, 0.55); }

std::string palettes_json() {
  const auto one = [](const Palette& p) {
    const std::array<std::pair<std::string_view, Colour>, 9> plain{{{"paper", p.paper},
                                                                    {"empty", p.empty},
                                                                    {"ink", p.ink},
                                                                    {"quiet", p.quiet},
                                                                    {"line", p.line},
                                                                    {"edge", p.edge},
                                                                    {"soft", p.soft},
                                                                    {"wait", p.wait},
                                                                    {"accent", p.accent}}};
    std::string named;
    for (const auto& [name, colour] : plain)
      named += text(named.empty() ? "" : ",", "\"", name, "\":\"", hex(colour), "\"");
    return text("{\"plain\":{", named, "},\"ranks\":[", list(p.ranks), "],\"rankRamp\":[", list(p.rank_ramp),
                "],\"stepRamp\":[", list(p.step_ramp), "]}");
  };
  return text("{\"light\":", one(palette(false)), ",\"dark\":", one(palette(true)), "}");
}

}  // namespace weft::draw
