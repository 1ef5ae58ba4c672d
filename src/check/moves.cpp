#include "check/moves.h"

#include "index.h"
#include "text.h"

namespace weft::check {

Index Moves::node() const {
  const ScheduleOptions& o = all_.front().options;
  return uses(o, "node") && o.node < all_.front().ranks ? o.node : 1;
}

template <class From, class To>
void Moves::exchange(const From& from, const To& to, Tokens& into, std::string& fault) {
  // What each rank sends to each other one, row by row, message by message.
  const auto ranks = all_.size();
  std::vector<std::vector<std::vector<Index>>> sent(ranks * ranks);
  for (std::size_t r = 0; r < ranks; ++r)
    for (const Side& side : from(r))
      for (const PeerRows& p : *side.rows) {
        std::vector<Index>& message = sent[r * ranks + at(p.peer)].emplace_back();
        for (const Range& range : p.rows)
          for (Index row = range.begin; row < range.end; ++row) message.push_back((*side.tokens)[r][at(row)]);
      }
  std::vector<std::size_t> taken(ranks * ranks, 0);
  for (std::size_t r = 0; r < ranks; ++r) {
    std::vector<bool> written(into[r].size(), false);
    for (const PeerRows& p : *to(r)) {
      const std::size_t pair = at(p.peer) * ranks + r;
      if (taken[pair] == sent[pair].size()) {
        fault = text("rank ", r, " waits for a message of rank ", p.peer, " that nobody sends");
        return;
      }
      const std::vector<Index>& message = sent[pair][taken[pair]++];
      std::size_t n = 0;
      for (const Range& range : p.rows)
        for (Index row = range.begin; row < range.end && n < message.size(); ++row, ++n) {
          if (written[at(row)]) fault = text("row ", row, " of rank ", r, " comes twice");
          written[at(row)] = true;
          into[r][at(row)] = message[n];
        }
      Index rows = 0;
      for (const Range& range : p.rows) rows += range.size();
      if (rows != static_cast<Index>(message.size()))
        fault = text("rank ", p.peer, " sends ", message.size(), " rows to rank ", r, ", which expects ", rows);
    }
  }
  for (std::size_t pair = 0; pair < sent.size(); ++pair)
    if (taken[pair] != sent[pair].size())
      fault = text("rank ", pair % ranks, " does not take all messages of rank ", pair / ranks);
}

std::vector<std::vector<Index>> Moves::step(std::size_t n, std::string& fault) {
  Tokens own, relays, buffers;
  for (const Schedule& s : all_) {
    const Step& step = s.steps[n];
    own.push_back(s.layouts.k.tokens(s.rank));
    buffers.push_back(step.move ? std::vector<Index>(at(step.key_rows), kNoToken) : own.back());
    relays.emplace_back(step.move && step.move->relay ? at(step.move->relay->rows) : 0, kNoToken);
  }
  if (!all_.front().steps[n].move) return buffers;
  const auto move = [&](std::size_t r) -> const Move& { return *all_[r].steps[n].move; };
  const bool relayed = move(0).relay.has_value();
  if (relayed) {
    exchange([&](std::size_t r) { return std::vector<Side>{{&move(r).relay->sends, &own}}; },
             [&](std::size_t r) { return &move(r).relay->receives; }, relays, fault);
    const Index nodes = all_.front().ranks / node();
    entered_.resize(at(all_.front().layouts.k.stream().tokens() * nodes), 0);
    for (std::size_t r = 0; r < all_.size() && all_.front().steps[n].heads_k.begin == 0; ++r)
      for (const Index token : relays[r])
        if (token != kNoToken) ++entered_[at(token * nodes + static_cast<Index>(r) / node())];
  }
  exchange(
      [&](std::size_t r) {
        std::vector<Side> sides{{&move(r).sends, &own}};
        if (relayed) sides.push_back({&move(r).relay->passes, &relays});
        return sides;
      },
      [&](std::size_t r) { return &move(r).receives; }, buffers, fault);
  return buffers;
}

}  // namespace weft::check
