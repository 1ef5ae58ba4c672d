// Rows followed through the moves of a schedule, message by message: what each rank's buffer holds in each step.
#pragma once

#include <string>
#include <vector>

#include "weft/schedule.h"

namespace weft::check {

// Follows moves straight from the owners, in one hop or two, of schedules without a swap of heads.
class Moves {
 public:
  // One schedule a rank, in their order; they must outlive this.
  explicit Moves(const std::vector<Schedule>& all) : all_(all) {}

  // The tokens in each rank's buffer in step n, kNoToken where nothing came. What is wrong with the messages is added
  // to `fault`: a row that comes twice or from nowhere, or two sides of a message that do not agree.
  std::vector<std::vector<Index>> step(std::size_t n, std::string& fault);

  // The same of query buffers: the own rows first, then what query moves bring; and what comes home from where the
  // results of those rows are: [query token] how often. Faults as above.
  std::vector<std::vector<Index>> queries(std::string& fault);
  std::vector<Index> home(std::string& fault);

  // Whose rows entered which node: [key token, node] of all steps so far, for one K/V head. More than 1: it came twice.
  const std::vector<Index>& entered() const { return entered_; }
  // Ranks of a node; 1: all moves are in one hop.
  Index node() const;

 private:
  using Tokens = std::vector<std::vector<Index>>;  // by rank, of a buffer's rows
  struct Side {
    const std::vector<PeerRows>* rows;
    const Tokens* tokens;
  };
  // Messages of all ranks: `from(rank)` lists what it sends and out of which buffers, in the order of its messages.
  template <class From, class To>
  void exchange(const From& from, const To& to, Tokens& into, std::string& fault);

  const std::vector<Schedule>& all_;
  std::vector<Index> entered_;
};

}  // namespace weft::check
