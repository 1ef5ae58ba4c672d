// Runs one function on several threads at once.
#pragma once

#include <exception>
#include <thread>
#include <vector>

#include "index.h"
#include "weft/config.h"

namespace weft::tool {

// Calls work() on so many threads, this one among them; rethrows the first exception after all have ended.
template <class Work>
void on_threads(Index threads, Work&& work) {
  std::vector<std::exception_ptr> errors(at(threads));
  const auto guarded = [&](std::size_t thread) {
    try {
      work();
    } catch (...) {
      errors[thread] = std::current_exception();
    }
  };
  std::vector<std::thread> others;
  for (std::size_t t = 1; t < errors.size(); ++t) others.emplace_back(guarded, t);
  guarded(0);
  for (std::thread& t : others) t.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace weft::tool
