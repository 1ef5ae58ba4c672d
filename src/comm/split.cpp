#include "comm/split.h"

#include <algorithm>

#include "index.h"

namespace weft {

std::vector<SplitChoice> gather_choices(SplitChoice mine, Index ranks, const StartExchange& start) {
  std::vector<SplitChoice> all(at(ranks));
  const auto block = [](SplitChoice& c) { return Block{.data = &c, .rows = 1, .bytes = sizeof(SplitChoice)}; };
  std::vector<Message> sends, receives;
  for (Index peer = 0; peer < ranks; ++peer) {
    sends.push_back({peer, {block(mine)}});
    receives.push_back({peer, {block(all[at(peer)])}});
  }
  start(std::move(sends), std::move(receives))->wait();
  std::sort(all.begin(), all.end());
  return all;
}

std::vector<SplitChoice> choices_of(std::vector<SplitChoice> all, const SplitChoice& mine, Index& me) {
  std::erase_if(all, [&](const SplitChoice& c) { return c.color != mine.color; });
  me = std::find(all.begin(), all.end(), mine) - all.begin();
  return all;
}

}  // namespace weft
