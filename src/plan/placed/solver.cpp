// Tries greedy placements for several targets, and keeps the one that is predicted to take least.
#include "plan/placed/solver.h"

#include <algorithm>
#include <numeric>
#include <optional>

#include "index.h"
#include "plan/placed/attempt.h"

namespace weft::detail {
namespace {

class Search {
 public:
  Search(std::span<const SequenceWork> sequences, Index ranks, const PlacedOptions& options)
      : sequences_(sequences), ranks_(ranks), options_(options) {
    for (std::size_t n = 0; n < sequences.size(); ++n)
      if (sequences[n].rows > 0) order_.push_back(static_cast<Index>(n));
    std::sort(order_.begin(), order_.end(), [&](Index a, Index b) {
      const SequenceWork &x = sequences_[at(a)], &y = sequences_[at(b)];
      return x.seconds != y.seconds ? x.seconds > y.seconds : x.rows != y.rows ? x.rows > y.rows : a < b;
    });
    for (const Index n : order_) total_ += sequences_[at(n)].seconds;
    filler_ = cost_of_short_rows();
  }

  // First the targets, then around the best of them what else differs.
  Attempt best() {
    Index rows = 0;
    for (const Index n : order_) rows += sequences_[at(n)].rows;
    const Index even = ceil_div(rows, ranks_), capacity = options_.capacity;
    const auto little_more = [&](Index share) { return min_of(capacity, even + even / share); };
    // In groups of heads most of an exchange is hidden.
    const double usual = options_.head_groups > 1 ? 1 / static_cast<double>(options_.head_groups) : 0.5;
    for (const double over : {1.05, 1.2, 1.0, 1.1, 1.35, 1.6}) {
      attempt({mean() * over, usual, 0, capacity, little_more(64)});
      attempt({mean() * over, usual, filler_, capacity, capacity});
    }
    for (const double over : {1.05, 1.35, 1.2, 1.6, 1.0, 1.1})
      attempt({mean() * over, usual, trial_.filler, capacity, little_more(64), true});
    const auto again = [&](double target, double exposed, Index filled) {
      attempt({target, exposed, trial_.filler, capacity, filled, trial_.wide});
    };
    for (const double exposed : {0.0, 2 * usual})
      for (const double over : {1.0, 1.05, 1.15, 1.35}) again(mean() * over, exposed, trial_.filled);
    for (const double times : {0.975, 1.025}) again(trial_.target * times, trial_.exposed, trial_.filled);
    for (const Index filled : {capacity, little_more(200), little_more(32)})
      again(trial_.target, trial_.exposed, filled);
    // Even rows are worth something too: buffers of all ranks are as long as the longest.
    attempt({trial_.target, trial_.exposed, trial_.filler, little_more(200), little_more(200), trial_.wide});
    return std::move(*best_);
  }

  double seconds() const { return seconds_; }

 private:
  // Sequences and ranks of all attempts together, which bounds the time.
  static constexpr Index kMost = 65'000;

  double mean() const { return total_ / static_cast<double>(ranks_); }

  void attempt(const Trial& trial) {
    const Index size = static_cast<Index>(order_.size()) + ranks_;
    if (best_ && spent_ + size > kMost) return;
    spent_ += size;
    Attempt now(sequences_, order_, ranks_, options_, trial);
    const double seconds = now.predicted();
    const std::ptrdiff_t cut =
        std::count_if(now.splits().begin(), now.splits().end(), [](const Split& s) { return s.gaps; });
    // Short sequences are cut only where that gains more than a prediction may be wrong.
    constexpr double kWorthACut = 0.98;
    if (best_ && seconds >= seconds_ * (cut > cut_ ? kWorthACut : 1)) return;
    cut_ = cut;
    best_.emplace(std::move(now));
    seconds_ = seconds;
    trial_ = trial;
  }

  // Seconds of a row of the sequences that have little work each.
  double cost_of_short_rows() const {
    constexpr double kLittle = 0.3;  // of a rank's mean
    double seconds = 0, rows = 0;
    for (const Index n : order_) {
      const SequenceWork& s = sequences_[at(n)];
      if (s.seconds >= kLittle * mean()) continue;
      seconds += s.seconds;
      rows += static_cast<double>(s.rows);
    }
    return rows > 0 ? seconds / rows : 0;
  }

  std::span<const SequenceWork> sequences_;
  Index ranks_;
  const PlacedOptions& options_;
  std::vector<Index> order_;  // by falling work
  double total_ = 0, filler_ = 0;
  Index spent_ = 0;
  std::ptrdiff_t cut_ = 0;  // sequences that fill gaps, of the best
  std::optional<Attempt> best_;
  double seconds_ = 0;
  Trial trial_;
};

// In the order of tokens: the first chunks of all ranks, then the second ones, the other way round.
std::vector<Piece> pieces_of(const Split& split) {
  std::vector<Piece> pieces;
  Index begin = 0;
  const auto add = [&](std::size_t n, Index count) {
    if (count > 0) pieces.push_back({split.ranks[n], begin, count});
    begin += count;
  };
  const std::size_t ranks = split.ranks.size();
  for (std::size_t n = 0; n < ranks; ++n) add(n, split.gaps ? split.share[n] : split.share[n] / 2);
  for (std::size_t n = ranks; n-- > 0 && !split.gaps;) add(n, split.share[n] - split.share[n] / 2);
  return pieces;
}

}  // namespace

Solution solve_placed(std::span<const SequenceWork> sequences, Index ranks, const PlacedOptions& options) {
  using Why = PlacedSequence::Why;
  Search search(sequences, ranks, options);
  const Attempt best = search.best();
  Solution out{.pieces = std::vector<std::vector<Piece>>(sequences.size()),
               .why = std::vector<Why>(sequences.size(), Why::whole),
               .seconds = search.seconds()};
  for (std::size_t n = 0; n < sequences.size(); ++n)
    if (best.whole()[n] >= 0) out.pieces[n] = {{best.whole()[n], 0, sequences[n].rows}};
  for (const Split& split : best.splits()) {
    const std::size_t n = at(split.sequence);
    out.pieces[n] = pieces_of(split);
    out.why[n] = sequences[n].rows > options.capacity ? Why::rows : split.gaps ? Why::room : Why::work;
  }
  return out;
}

}  // namespace weft::detail
