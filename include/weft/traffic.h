// What a rank sends and receives.
#pragma once

#include "weft/config.h"

namespace weft {

// Bytes and messages between different ranks; what a rank sends to itself is not counted.
struct WEFT_API Traffic {
  Index bytes_sent = 0, bytes_received = 0;
  Index messages_sent = 0, messages_received = 0;
  // Of the bytes, those that leave the rank's node and those that come from other nodes. Ranks r of equal r / node are
  // a node; with node = 1 all ranks are on one level, and nothing is counted here.
  Index bytes_sent_between = 0, bytes_received_between = 0;

  Traffic& operator+=(const Traffic& other);
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

}  // namespace weft
