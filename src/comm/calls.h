// What checked ranks have done over a communicator: the same on all of them as long as they keep in step.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>

namespace weft::detail {

class Calls {
 public:
  std::uint64_t exchanges = 0;  // with checksums, of all executors and buffers
  std::uint64_t made = 0;       // comparisons: the first is number 1
  std::uint64_t objects = 0;    // executors and buffers, numbered as they are made

  // The results of a forward, as a checksum of their bits, belong to that call.
  void remember(std::uint64_t results, std::uint64_t call) {
    const auto [at, is_new] = by_results_.try_emplace(results, call);
    if (!is_new) {
      at->second = kSeveral;
      return;
    }
    order_.push_back(results);
    if (order_.size() <= kMost) return;
    by_results_.erase(order_.front());
    order_.pop_front();
  }
  // The call that gave these results; 0 if that is not known: none did, several did (rows that see nothing, a layer that
  // is computed again), or it was long ago.
  std::uint64_t call_of(std::uint64_t results) const {
    const auto at = by_results_.find(results);
    return at == by_results_.end() ? kSeveral : at->second;
  }

 private:
  static constexpr std::uint64_t kSeveral = 0;
  static constexpr std::size_t kMost = 4096;  // forwards whose backward is still to come: layers times batches

  std::unordered_map<std::uint64_t, std::uint64_t> by_results_;
  std::deque<std::uint64_t> order_;
};

}  // namespace weft::detail
