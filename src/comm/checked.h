// Checked mode: a communicator whose messages carry call number, route, size and checksum, which the receiver compares;
// and what ranks have done over it, which is the same on all as long as they make the same calls.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_map>

#include "weft/communicator.h"

namespace weft {

// A checksum of the bytes of the blocks in order, which does not depend on how they are cut. On a GPU it is another
// one, and the call waits for it.
std::uint64_t checksum(std::span<const Block> blocks, const Place& place = {});

// `inner` must outlive it. Every message grows by 32 bytes, which `inner` counts as traffic and the result does not. So
// do those on GPUs, of its on(place), where sums are made by a kernel in the caller's stream and collectives are
// messages.
std::unique_ptr<Communicator> make_checked(Communicator& inner);

namespace detail {

// The forward calls that gave the same results on a rank: usually one; more if no row sees a key, or if a layer is
// recomputed.
struct Forwards {
  std::uint64_t last = 0;                   // number of the last one; 0 if none is known
  std::uint64_t which = ~std::uint64_t{0};  // the bit (number modulo 64) of each; all bits if none is known
  bool several = false;

  void add(std::uint64_t call) {
    const std::uint64_t bit = std::uint64_t{1} << call % 64;
    several = last != 0;
    which = several ? which | bit : bit;
    last = call;
  }
};

class Calls {
 public:
  std::uint64_t exchanges = 0;  // exchanges with checksums, of all executors and buffers
  std::uint64_t made = 0;       // comparisons made; the first is number 1
  std::uint64_t objects = 0;    // executors and buffers, numbered as they are made

  // Remembers which call gave results with this checksum.
  void remember(std::uint64_t results, std::uint64_t call) {
    const auto [entry, is_new] = by_results_.try_emplace(results);
    entry->second.add(call);
    if (is_new) order_.push_back(results);
    if (order_.size() <= kMost) return;
    by_results_.erase(order_.front());
    order_.pop_front();
  }
  Forwards forwards_of(std::uint64_t results) const {
    const auto found = by_results_.find(results);
    return found == by_results_.end() ? Forwards{} : found->second;
  }

 private:
  static constexpr std::size_t kMost = 4096;  // forwards whose backward is still to come: layers times batches

  std::unordered_map<std::uint64_t, Forwards> by_results_;
  std::deque<std::uint64_t> order_;
};

}  // namespace detail
}  // namespace weft
