#include "terminal/terminal.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include <fmt/format.h>
#include <unistd.h>

#include "index.h"

namespace weft::tool {

namespace {

bool use_colour() {
  static const bool wanted = [] {
    const char* off = std::getenv("NO_COLOR");
    return isatty(fileno(stdout)) == 1 && (off == nullptr || *off == '\0');
  }();
  return wanted;
}

}  // namespace

char letter(Index rank, bool upper) { return static_cast<char>((upper ? 'A' : 'a') + rank % kLetters); }

std::string coloured(const std::string& text, Index rank, bool solid) {
  // Of the 256-colour palette: bright enough to read as letters on black and as ground under black letters.
  constexpr std::array kColours = {75, 215, 114, 211, 185, 141, 80, 173, 152, 176, 107, 222};
  if (!use_colour()) return text;
  const int colour = kColours[at(rank) % kColours.size()];
  return solid ? fmt::format("\x1b[48;5;{};38;5;16m{}\x1b[0m", colour, text)
               : fmt::format("\x1b[38;5;{}m{}\x1b[0m", colour, text);
}

std::string bar(double fraction, int width) {
  constexpr std::array kEighths = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const long eighths = std::lround(std::clamp(fraction, 0.0, 1.0) * width * 8);
  const long whole = eighths / 8;
  const std::size_t rest = at(eighths % 8);
  std::string text;
  for (long i = 0; i < whole; ++i) text += "█";
  text += kEighths[rest];
  for (long i = whole + (rest > 0 ? 1 : 0); i < width; ++i) text += " ";
  return text;
}

}  // namespace weft::tool
