#include "terminal/progress.h"

#include <cstdio>

#include <fmt/format.h>
#include <unistd.h>

#include "terminal/numbers.h"
#include "terminal/terminal.h"

namespace weft::tool {
namespace {

bool on_terminal() {
  static const bool terminal = isatty(fileno(stderr)) == 1;
  return terminal;
}

}  // namespace

void Progress::show(Index done, Index failed) {
  constexpr int kWidth = 30;
  constexpr std::chrono::milliseconds kOften{100};
  constexpr std::chrono::seconds kSeldom{10};
  const Clock::time_point now = Clock::now();
  if ((shown_ || !on_terminal()) && now - last_ < (on_terminal() ? Clock::duration(kOften) : Clock::duration(kSeldom)))
    return;
  last_ = now;
  shown_ = true;
  const std::string words = fmt::format("{} of {} {}, {} failed", grouped(done), grouped(all_), what_, grouped(failed));
  if (on_terminal())
    fmt::print(stderr, "\r{} {}", bar(static_cast<double>(done) / static_cast<double>(all_), kWidth), words);
  else
    fmt::print(stderr, "weft: {:.0f} s: {}\n", std::chrono::duration<double>(now - begin_).count(), words);
  std::fflush(stderr);
}

Progress::~Progress() {
  if (!shown_ || !on_terminal()) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
}

}  // namespace weft::tool
