// Executors on ranks whose transport has collectives of its own: which calls they make, and the same results.
#include <gtest/gtest.h>

#include "comm/plain_ranks.h"
#include "index.h"
#include "ranks.h"

namespace weft::test {
namespace {

// The collectives of threads, counted.
class OwnCollectives final : public PlainRanks {
 public:
  using PlainRanks::PlainRanks;
  std::string_view name() const override { return "own collectives"; }
  bool has_collectives() const override { return true; }
  Index gathers = 0, sums = 0;

 private:
  // A list cut into one list a rank, of equal bytes.
  std::vector<Message> cut(std::span<const Block> all) const {
    Index bytes = 0;
    for (const Block& b : all) bytes += b.size();
    const Index each = bytes / ranks();
    std::vector<Message> messages;
    for (const Block& b : all) {
      if (messages.empty() || messages.back().size() == each)
        messages.push_back({.peer = static_cast<Index>(messages.size())});
      messages.back().blocks.push_back(b);
      EXPECT_LE(messages.back().size(), each);
    }
    return messages;
  }
  std::unique_ptr<Request::Pending> start_all_gather_lists(std::span<const Block> mine,
                                                           std::span<const Block> all) override {
    ++gathers;
    std::vector<Message> sends;
    for (Index r = 0; r < ranks(); ++r) sends.push_back({.peer = r, .blocks = {mine.begin(), mine.end()}});
    return forwarded(inner().exchange(std::move(sends), cut(all)));
  }
  std::unique_ptr<Request::Pending> start_reduce_scatter_lists(std::span<const Block> parts,
                                                               std::span<const Block> mine) override {
    ++sums;
    std::vector<Message> receives;
    for (Index r = 0; r < ranks(); ++r)
      receives.push_back({.peer = r,
                          .blocks = {mine.begin(), mine.end()},
                          .combine = r == 0 ? Message::Combine::replace : Message::Combine::add,
                          .at_once = true});
    return forwarded(inner().exchange(cut(parts), std::move(receives)));
  }
};

struct Calls {
  Index gathers = 0, sums = 0;
  friend bool operator==(const Calls&, const Calls&) = default;
};

// The calls of one rank, and whether results and traffic are those without collectives.
Calls calls_of(Index tokens, LayoutKind kind, const ScheduleOptions& options, bool deterministic = false) {
  constexpr Index kFour = 4;
  const Problem problem(Stream::from_lengths(std::vector<Index>{tokens - 20, 20}), {.causal = true});
  const RanksProblem p{.problem = problem, .heads_q = 4, .heads_k = 2, .dim_qk = 24, .dim_v = 16};
  RanksInput in(p);
  const Layouts layouts = make_layouts(kind, problem, kFour);
  const ExecutorOptions how{.deterministic = deterministic};
  const RanksResult want = run_on_ranks(p, in, layouts, options, how);
  RanksResult got = empty_result(p, kFour);
  std::mutex mutex;
  Calls calls;
  run_ranks(kFour, [&](Communicator& threads) {
    OwnCollectives c(threads);
    run_one_rank(c, p, in, layouts, options, how, got, mutex);
    if (c.rank() == 0) calls = {c.gathers, c.sums};
  });
  EXPECT_TRUE(same_bytes(got, want)) << words(options);
  EXPECT_EQ(got.forward, want.forward);
  EXPECT_EQ(got.backward, want.backward);
  return calls;
}

TEST(ExecutorCollectives, EqualGathersAreOneCall) {
  for (const LayoutKind kind : {LayoutKind::zigzag, LayoutKind::contiguous}) {
    for (const KeyOrder order : {KeyOrder::sequence, KeyOrder::rank}) {
      EXPECT_EQ(calls_of(160, kind, {.key_order = order}), (Calls{2, 1}));  // both passes gather, one returns
      EXPECT_EQ(calls_of(160, kind, {.key_order = order, .head_groups = 2}), (Calls{4, 2}));
      EXPECT_EQ(calls_of(160, kind, {.key_order = order}, true), (Calls{2, 0}));  // sums in the order of ranks
    }
  }
}

TEST(ExecutorCollectives, OtherMovesAreMessages) {
  // In sequence order only rows that hold tokens move: 163 tokens are not as many on every rank.
  EXPECT_EQ(calls_of(163, LayoutKind::zigzag, {.key_order = KeyOrder::sequence}), (Calls{0, 0}));
  EXPECT_EQ(calls_of(163, LayoutKind::zigzag, {.key_order = KeyOrder::rank}), (Calls{2, 1}));
  EXPECT_EQ(calls_of(160, LayoutKind::zigzag, {.node = 2}), (Calls{0, 0}));
  EXPECT_EQ(calls_of(160, LayoutKind::zigzag, {.kind = ScheduleKind::ring}), (Calls{0, 0}));
  EXPECT_EQ(calls_of(160, LayoutKind::zigzag, {.kind = ScheduleKind::hybrid, .outer = ScheduleKind::all_gather}),
            (Calls{0, 0}));
}

}  // namespace
}  // namespace weft::test
