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

std::vector<std::vector<Index>> Moves::queries(std::string& fault) {
  Tokens own, buffers;
  for (const Schedule& s : all_) {
    own.push_back(s.layouts.q.tokens(s.rank));
    buffers.push_back(own.back());
    buffers.back().resize(at(s.query_rows()), kNoToken);
  }
  for (std::size_t m = 0; m < all_.front().query_moves.size(); ++m)
    exchange([&](std::size_t r) { return std::vector<Side>{{&all_[r].query_moves[m].sends, &own}}; },
             [&](std::size_t r) { return &all_[r].query_moves[m].receives; }, buffers, fault);
  return buffers;
}

std::vector<Index> Moves::home(std::string& fault) {
  const Tokens buffers = queries(fault);
  std::vector<Index> times(at(all_.front().layouts.q.stream().tokens()), 0);
  for (std::size_t m = 0; m < all_.front().query_moves.size(); ++m) {
    Tokens back;
    for (const Schedule& s : all_) back.emplace_back(at(s.q_rows), kNoToken);
    exchange([&](std::size_t r) { return std::vector<Side>{{&all_[r].query_moves[m].receives, &buffers}}; },
             [&](std::size_t r) { return &all_[r].query_moves[m].sends; }, back, fault);
    for (std::size_t r = 0; r < all_.size(); ++r) {
      if (back[r] != all_[r].layouts.q.tokens(all_[r].rank))
        fault = text("results of other rows come home to rank ", r);
      for (const Index token : back[r])
        if (token != kNoToken) ++times[at(token)];
    }
  }
  return times;
}

std::vector<std::vector<Index>> Moves::step(std::size_t n, std::string& fault) {
  for (; all_.front().steps[n].again; --n)  // the keys of the last step with a move
    if (n == 0) {
      fault = "the first step reads keys of a step before it";
      return Tokens(all_.size());
    }
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
