#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <queue>
#include <set>
#include <string>

#include "index.h"
#include "text.h"
#include "weft/plan.h"
#include "weft/prepare.h"

namespace weft {
namespace {

Index padded(Index length, Index multiple) { return ceil_div(length, multiple) * multiple; }
// The longest part of a document that a pack can hold.
Index longest_piece(const PackOptions& o) { return floor_div(o.budget, o.multiple) * o.multiple; }

void check(std::span<const Index> lengths, const PackOptions& o) {
  if (o.budget < 1 || o.budget > kMaxTokens)
    throw Error(text("a pack of ", o.budget, " rows"), text("give a budget from 1 to ", kMaxTokens));
  if (o.multiple < 1 || o.multiple > o.budget)
    throw Error(text("documents padded to a multiple of ", o.multiple, " in packs of ", o.budget, " rows"),
                text("use a multiple from 1 to ", o.budget));
  if (!(o.pair_limit == 0 || o.pair_limit > 1) || o.pair_limit > static_cast<double>(kMaxTokens))
    throw Error(text("packs of at most ", o.pair_limit, " times the mean number of pairs"),
                "use a limit above 1, 1.1 for instance, or 0 for none");
  if (o.pair_limit > 0 && o.keep_order)
    throw Error(text("a limit of ", o.pair_limit, " times the mean number of pairs together with keep_order"),
                "leave one of them out: even packs mix long documents with short ones");
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i] < 0 || lengths[i] > kMaxTokens)
      throw Error(text("document ", i, " has length ", lengths[i]), text("use lengths from 0 to ", kMaxTokens));
    if (o.too_long == PackOptions::TooLong::refuse && padded(lengths[i], o.multiple) > o.budget)
      throw Error(text("document ", i, ": padded length ", padded(lengths[i], o.multiple), " is above the budget of ",
                       o.budget, " rows"),
                  "give a larger budget, or split it (PackOptions::TooLong::split)");
  }
}

// Documents as they are, or cut into parts as long as a pack can hold and a rest.
std::vector<Piece> pieces_of(std::span<const Index> lengths, const PackOptions& o) {
  const Index longest = longest_piece(o);
  std::vector<Piece> pieces;
  pieces.reserve(lengths.size());
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    Index begin = 0;
    for (; lengths[i] - begin > longest; begin += longest) pieces.push_back({static_cast<Index>(i), begin, longest});
    pieces.push_back({static_cast<Index>(i), begin, lengths[i] - begin});
  }
  return pieces;
}

// The room that is left in each pack, the fullest first.
class Rooms {
 public:
  explicit Rooms(Packs& to) : to_(to) {}

  void put_best(const Piece& piece, Index rows) {
    const auto found = rooms_.lower_bound({rows, 0});
    const Room room = found != rooms_.end() ? *found : open();
    if (found != rooms_.end()) rooms_.erase(found);
    put(piece, rows, room);
  }
  void put_last(const Piece& piece, Index rows) {
    const bool fits = !rooms_.empty() && rooms_.begin()->rows >= rows;
    const Room room = fits ? *rooms_.begin() : open();
    rooms_.clear();
    put(piece, rows, room);
  }

 private:
  struct Room {
    Index rows, pack;
    auto operator<=>(const Room&) const = default;  // of equal rooms the oldest pack
  };

  Room open() {
    to_.packs.emplace_back();
    return {to_.options.budget, static_cast<Index>(to_.packs.size()) - 1};
  }
  void put(const Piece& piece, Index rows, Room room) {
    to_.packs[at(room.pack)].push_back(piece);
    rooms_.insert({room.rows - rows, room.pack});
  }

  Packs& to_;
  std::set<Room> rooms_;
};

double pairs_of(Index length) { return static_cast<double>(length) * static_cast<double>(length + 1) / 2; }

// A pack while pieces are dealt out, the longest first.
struct OpenPack {
  Index room = 0;    // rows
  double pairs = 0;  // visible ones
  Index number = 0;
};

// Deals the pieces, sorted by falling length, out to so many packs, each to the one with the fewest pairs that has
// room. None if one does not fit, or if a pack would get more than `most` pairs.
//
// A pack that has no room for the piece at hand waits until pieces are short enough. Packs in `next` have room for the
// piece at hand and for all after it, so a piece costs one step of each heap.
std::optional<std::vector<std::vector<Piece>>> deal(const std::vector<Piece>& pieces, const PackOptions& o, Index count,
                                                    double most) {
  const auto more_pairs = [](const OpenPack& a, const OpenPack& b) {
    return a.pairs != b.pairs ? a.pairs > b.pairs : a.number > b.number;
  };
  // The longest piece that the pack could still take.
  const auto takes = [&](const OpenPack& p) {
    const double left = most - p.pairs;
    const double longest = left <= 0 ? 0 : std::floor((std::sqrt(1 + 8 * left) - 1) / 2);
    return min_of(floor_div(p.room, o.multiple) * o.multiple, static_cast<Index>(std::min(longest, 0x1p40)));
  };
  const auto takes_less = [&](const OpenPack& a, const OpenPack& b) {
    const Index x = takes(a), y = takes(b);
    return x != y ? x < y : a.number > b.number;
  };
  std::priority_queue<OpenPack, std::vector<OpenPack>, decltype(more_pairs)> next(more_pairs);
  std::priority_queue<OpenPack, std::vector<OpenPack>, decltype(takes_less)> waiting(takes_less);
  for (Index n = 0; n < count; ++n) next.push({o.budget, 0, n});
  std::vector<std::vector<Piece>> packs(at(count));
  for (const Piece& piece : pieces) {
    for (; !waiting.empty() && takes(waiting.top()) >= piece.length; waiting.pop()) next.push(waiting.top());
    if (next.empty()) return {};
    OpenPack pack = next.top();
    next.pop();
    packs[at(pack.number)].push_back(piece);
    pack.room -= padded(piece.length, o.multiple);
    pack.pairs += pairs_of(piece.length);
    if (takes(pack) >= piece.length)
      next.push(pack);
    else
      waiting.push(pack);
  }
  return packs;
}

// As few packs as the tokens need, and one in a hundred more each time until all fit.
std::vector<std::vector<Piece>> deal_evenly(const std::vector<Piece>& pieces, const PackOptions& o) {
  if (pieces.empty()) return {};
  Index rows = 0;
  double pairs = 0;
  for (const Piece& piece : pieces) {
    rows += padded(piece.length, o.multiple);
    pairs += pairs_of(piece.length);
  }
  for (Index count = max_of(1, ceil_div(rows, o.budget));; count += 1 + count / 100) {
    const double mean = pairs / static_cast<double>(count);
    const double most = std::max(o.pair_limit * mean, pairs_of(pieces.front().length));
    if (auto packs = deal(pieces, o, count, most)) {
      std::erase_if(*packs, [](const std::vector<Piece>& pack) { return pack.empty(); });
      return std::move(*packs);
    }
  }
}

double over_mean(const std::vector<double>& values) {
  const double sum = std::accumulate(values.begin(), values.end(), 0.0);
  if (sum == 0) return 1;
  return *std::max_element(values.begin(), values.end()) * static_cast<double>(values.size()) / sum;
}

PackReport report_of(const Packs& packs) {
  PackReport r{.packs = static_cast<Index>(packs.packs.size())};
  std::vector<double> tokens, pairs;
  for (const std::vector<Piece>& pack : packs.packs) {
    Index in_pack = 0;
    double pairs_in_pack = 0;
    for (const Piece& piece : pack) {
      in_pack += piece.length;
      pairs_in_pack += pairs_of(piece.length);
      r.padding += padded(piece.length, packs.options.multiple) - piece.length;
      r.split_documents += piece.begin == longest_piece(packs.options) ? 1 : 0;  // second parts
    }
    r.tokens += in_pack;
    tokens.push_back(static_cast<double>(in_pack));
    pairs.push_back(pairs_in_pack);
  }
  const Index rows = r.packs * packs.options.budget;
  r.empty = rows - r.tokens - r.padding;
  r.least_packs = ceil_div(r.tokens, packs.options.budget);
  r.waste = rows == 0 ? 0 : static_cast<double>(rows - r.tokens) / static_cast<double>(rows);
  r.token_balance = over_mean(tokens);
  r.pair_balance = over_mean(pairs);
  return r;
}

}  // namespace

Packs pack_documents(std::span<const Index> lengths, const PackOptions& options) {
  check(lengths, options);
  Packs packs{options, {}, {}};
  std::vector<Piece> pieces = pieces_of(lengths, options);
  Rooms rooms(packs);
  if (!options.keep_order)
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
      if (a.length != b.length) return a.length > b.length;
      return a.document != b.document ? a.document < b.document : a.begin < b.begin;
    });
  if (options.pair_limit > 0) packs.packs = deal_evenly(pieces, options);
  for (const Piece& piece : pieces) {
    if (options.pair_limit > 0) break;
    const Index rows = padded(piece.length, options.multiple);
    if (options.keep_order)
      rooms.put_last(piece, rows);
    else
      rooms.put_best(piece, rows);
  }
  for (std::vector<Piece>& pack : packs.packs)
    std::sort(pack.begin(), pack.end(), [](const Piece& a, const Piece& b) {
      return a.document != b.document ? a.document < b.document : a.begin < b.begin;
    });
  packs.report = report_of(packs);
  return packs;
}

Stream Packs::stream(Index pack) const {
  if (pack < 0 || pack >= static_cast<Index>(packs.size()))
    throw Error(text("pack ", pack, " of ", packs.size()), "name one that there is");
  std::vector<Index> offsets{0}, used;
  for (const Piece& piece : packs[at(pack)]) {
    offsets.push_back(offsets.back() + padded(piece.length, options.multiple));
    used.push_back(piece.length);
  }
  return Stream::from_used(offsets, used, options.budget);
}

}  // namespace weft
