// The two passes of attention.
#pragma once

namespace weft {

// Which of the two passes is meant.
enum class Pass { forward, backward };

}  // namespace weft
