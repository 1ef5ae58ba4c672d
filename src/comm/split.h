// What ranks tell each other when a communicator is split. Exported for transports that are libraries of their own; not
// installed.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "weft/communicator.h"

namespace weft {

struct SplitChoice {
  Index color = 0, key = 0, rank = 0;
  friend auto operator<=>(const SplitChoice&, const SplitChoice&) = default;
};

using StartExchange = std::function<std::unique_ptr<Request::Pending>(std::vector<Message>, std::vector<Message>)>;

// The choices of all ranks, sorted by color, key and rank. Collective; waits no longer than an exchange does.
WEFT_API std::vector<SplitChoice> gather_choices(SplitChoice mine, Index ranks, const StartExchange& start);
// Those of one color; `me`: where this rank's is among them.
WEFT_API std::vector<SplitChoice> choices_of(std::vector<SplitChoice> all, const SplitChoice& mine, Index& me);

}  // namespace weft
