// WEFT_PLAIN_MEMORY=1: for memory checkers, which then know each piece of memory.
#include <cstdlib>

#include "cuda/handle_pool.h"

namespace weft {
namespace {

[[maybe_unused]] const bool asked = [] {
  const char* value = std::getenv("WEFT_PLAIN_MEMORY");
  if (value != nullptr && *value == '1') cuda::use_unpooled_memory();
  return true;
}();

}  // namespace
}  // namespace weft
