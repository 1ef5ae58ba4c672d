// What checked ranks have done over a communicator: the same on all of them as long as they keep in step.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>

namespace weft::detail {

// The calls that gave the same results on a rank: most often one, more if rows see nothing or a layer is computed
// again.
struct Forwards {
  std::uint64_t last = 0;                   // 0: none is known
  std::uint64_t which = ~std::uint64_t{0};  // a bit for each, its number modulo 64; all if none is known
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
  std::uint64_t exchanges = 0;  // with checksums, of all executors and buffers
  std::uint64_t made = 0;       // comparisons: the first is number 1
  std::uint64_t objects = 0;    // executors and buffers, numbered as they are made

  // The results of a forward, as a checksum of their bits, belong to that call.
  void remember(std::uint64_t results, std::uint64_t call) {
    const auto [at, is_new] = by_results_.try_emplace(results);
    at->second.add(call);
    if (is_new) order_.push_back(results);
    if (order_.size() <= kMost) return;
    by_results_.erase(order_.front());
    order_.pop_front();
  }
  Forwards forwards_of(std::uint64_t results) const {
    const auto at = by_results_.find(results);
    return at == by_results_.end() ? Forwards{} : at->second;
  }

 private:
  static constexpr std::size_t kMost = 4096;  // forwards whose backward is still to come: layers times batches

  std::unordered_map<std::uint64_t, Forwards> by_results_;
  std::deque<std::uint64_t> order_;
};

}  // namespace weft::detail
