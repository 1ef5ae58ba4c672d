#include <algorithm>
#include <map>

#include "draw/flight/flight.h"
#include "draw/svg_writer.h"
#include "index.h"
#include "text.h"

namespace weft::draw {
namespace {

std::string rank_list(const std::vector<Index>& ranks) {
  constexpr std::size_t kShown = 12;
  std::string words = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kShown); ++i) words += text(i == 0 ? "" : ", ", ranks[i]);
  return ranks.size() > kShown ? text(words, " and ", ranks.size() - kShown, " more") : words;
}

std::string seconds_text(double seconds) { return decimal(seconds, 3) + " s"; }

std::string last_call(const FlightRank& rank) {
  if (rank.calls.empty()) return "it has made none";
  const FlightCall& last = rank.calls.back();
  const std::string call = text("its last is #", last.number, " ", last.name());
  if (!last.over()) return text(call, ", ", last.state, " for ", seconds_text(last.seconds));
  return text(call, ", ", last.state, " ", seconds_text(rank.time - last.begun - last.seconds),
              " before this was written");
}

}  // namespace

std::string FlightCall::name() const {
  if (pass.empty()) return kind;
  return step < 0 ? text(kind, " of ", pass) : text(kind, " of ", pass, " step ", step);
}

const FlightCall* FlightRank::find(Index number) const {
  const auto found =
      std::lower_bound(calls.begin(), calls.end(), number, [](const FlightCall& c, Index n) { return c.number < n; });
  return found == calls.end() || found->number != number ? nullptr : &*found;
}

Parting parting(const Flight& flight) {
  Parting result;
  Index first = 0, last = -1;  // calls that all ranks would still have in their records
  for (const FlightRank& rank : flight.recorded) {
    if (rank.calls.empty()) continue;
    first = max_of(first, rank.calls.front().number);
    last = max_of(last, rank.calls.back().number);
  }
  std::vector<Index> unheard;
  for (Index rank = 0; rank < flight.ranks; ++rank)
    if (std::none_of(flight.recorded.begin(), flight.recorded.end(),
                     [&](const FlightRank& r) { return r.rank == rank; }))
      unheard.push_back(rank);
  for (Index call = first; call <= last; ++call) {
    std::map<std::string, std::vector<Index>> by_name;  // ranks that made a call of that name; "": none
    for (const FlightRank& rank : flight.recorded) {
      const FlightCall* made = rank.find(call);
      by_name[made == nullptr ? "" : made->name()].push_back(rank.rank);
    }
    if (by_name.size() < 2) continue;
    result.call = call;
    const auto most = std::max_element(by_name.begin(), by_name.end(), [](const auto& a, const auto& b) {
      return std::pair(!a.first.empty(), a.second.size()) < std::pair(!b.first.empty(), b.second.size());
    });
    result.words.push_back(text("They parted at call #", call, ", ", most->first, ": ", rank_list(most->second),
                                most->second.size() == 1 ? " has made it" : " have made it"));
    for (const auto& [name, ranks] : by_name) {
      if (name == most->first) continue;
      for (const FlightRank& rank : flight.recorded)
        if (std::find(ranks.begin(), ranks.end(), rank.rank) != ranks.end())
          result.words.push_back(name.empty() ? text("rank ", rank.rank, " has not: ", last_call(rank))
                                              : text("rank ", rank.rank, " made another one: ", name));
    }
    break;
  }
  if (result.call < 0) {
    std::vector<Index> waiting;
    for (const FlightRank& rank : flight.recorded)
      if (!rank.calls.empty() && !rank.calls.back().over()) waiting.push_back(rank.rank);
    result.words.push_back(text("All records agree up to call #", last, waiting.empty() ? "" : "; in it wait ",
                                waiting.empty() ? "" : rank_list(waiting)));
  }
  if (!unheard.empty())
    result.words.push_back(
        text("There is no record of ", rank_list(unheard), ": look there first, or give its file too"));
  return result;
}

}  // namespace weft::draw
