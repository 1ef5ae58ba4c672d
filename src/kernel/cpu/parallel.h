// The thread pool of the CPU kernels. Calls from several threads (ranks) share it.
#pragma once

#include <functional>

#include "weft/config.h"

namespace weft::cpu {

// Runs body() on as many threads as are allowed and worth it, at least once; workers pull their work from a shared
// counter, so fewer of them only take longer. An exception of any worker is thrown here.
void on_threads(Index worth, const std::function<void()>& body);
// How many threads a call is worth: one for every million products, which take a core some ten microseconds.
Index worth_threads(Index pairs, Index width);

}  // namespace weft::cpu
