// How far a long check has come, on stderr: a line that is written over on a terminal, elsewhere one now and then.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "weft/config.h"

namespace weft::tool {

class Progress {
 public:
  // "runs", "cases": what is counted.
  Progress(Index all, std::string what) : all_(all), what_(std::move(what)) {}
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void show(Index done, Index failed);  // by one thread at a time

 private:
  using Clock = std::chrono::steady_clock;

  Index all_;
  std::string what_;
  Clock::time_point begin_ = Clock::now(), last_ = begin_;
  bool shown_ = false;
};

// When to start nothing more.
class TimeLimit {
 public:
  TimeLimit() = default;  // never
  explicit TimeLimit(double seconds) : seconds_(seconds) {}

  bool given() const { return seconds_.has_value(); }
  bool over() const {
    return seconds_ && std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count() > *seconds_;
  }
  double seconds() const { return *seconds_; }

 private:
  std::optional<double> seconds_;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace weft::tool
