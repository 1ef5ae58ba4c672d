// The two passes of attention.
#pragma once

namespace weft {

enum class Pass { forward, backward };

}  // namespace weft
