// Threads. Calls from many threads (ranks) share one pool, so that none adds threads of its own.
#pragma once

#include <functional>

#include "weft/config.h"

namespace weft::cpu {

// Runs body(worker) on up to as many threads as allowed, at least once; workers pull their work from a shared counter,
// so fewer of them only take longer. An exception of any worker is thrown here.
void on_all_threads(const std::function<void()>& body);
int threads();

}  // namespace weft::cpu
