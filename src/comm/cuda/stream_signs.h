// Fingerprints of a pass that travel in the order of a stream: NCCL sends and receives them in memory of the host,
// which the GPU reaches as its own, so that no kernel and no copy is added. The host looks at what came once the stream
// has.
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "comm/cuda/transports.h"
#include "comm/sign.h"
#include "cuda/handle_pool.h"
#include "index.h"

namespace weft::cuda {

class StreamSigns {
 public:
  static constexpr Index kBytes = sizeof(detail::CallSign);

  StreamSigns() = default;
  StreamSigns(Index self, detail::SignedPeers peers) : self_(self), peers_(std::move(peers)) {
    if (peers_.empty()) return;
    memory_ = std::make_unique<PooledPinned>((1 + peers_.from.size()) * sizeof(detail::CallSign));
    std::memset(memory_->get(), 0, (1 + peers_.from.size()) * sizeof(detail::CallSign));
    std::memcpy(memory_->get(), &peers_.mine, sizeof(detail::CallSign));
  }

  const detail::SignedPeers& peers() const { return peers_; }
  bool empty() const { return memory_ == nullptr; }
  char* sent() const { return memory_->get(); }
  // Where that of peers().from[i] goes.
  char* received(std::size_t i) const { return memory_->get() + (1 + i) * sizeof(detail::CallSign); }

  // Of a collective, whose peers are all ranks.
  GatheredSigns gathered() const { return {.mine = sent(), .all = received(0), .bytes = kBytes}; }

  // A stream may write to the memory for ever.
  void abandon() noexcept { static_cast<void>(memory_.release()); }

  // Once the stream has come past them.
  std::optional<std::string> disagreement() const {
    std::vector<detail::RankSign> known;
    for (std::size_t i = 0; !empty() && i < peers_.from.size(); ++i) {
      detail::CallSign sign;
      std::memcpy(&sign, received(i), sizeof sign);
      if (sign.given()) known.emplace_back(peers_.from[i], sign);
    }
    return detail::disagreement(self_, peers_.mine, known);
  }

 private:
  Index self_ = 0;
  detail::SignedPeers peers_;
  std::unique_ptr<PooledPinned> memory_;  // the one that is sent, then those that come
};

}  // namespace weft::cuda
