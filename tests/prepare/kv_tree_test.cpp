// Trees in micro-sequences: of the keys in the buffer those of a path stay, and rows of branches that are done are used
// again.
#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "prepare/kv_sequences.h"
#include "prepare/random_trees.h"

namespace weft::test {
namespace {

Setting setting_of(const Tree& tree, const Mask& mask) {
  const Packing packing = tree.packing();
  Setting r{.lengths = {}, .mask = {.slices = tree.slices(mask)}, .deterministic = true};
  for (Index root = 0; root < packing.q().sequences(); ++root) r.lengths.push_back(packing.q().used(root));
  return r;
}

// The most tokens that are there at one time: those of the micro-sequence, and earlier ones that it or a later one
// sees; with `ahead` also those of the next one, which come while it is attended.
Index most_alive(const Problem& problem, const MicroSequences& micros, bool ahead) {
  std::vector<Index> last(at(micros.rows().end));
  for (Index t = 0; t < micros.rows().end; ++t) last[at(t)] = micros.micro_of(t);
  for (const Slice& s : problem.global_slices())
    for (Index q = s.q_begin; q < s.q_end; ++q)
      for (Index k = s.k_begin; k < s.k_end; ++k)
        if (sees(s, q, k)) last[at(k)] = max_of(last[at(k)], micros.micro_of(q));
  Index most = 1;
  for (Index m = 0; m < micros.micros(); ++m) {
    const Index end = micros.rows(ahead ? min_of(m + 1, micros.micros() - 1) : m).end;
    Index alive = 0;
    for (Index t = 0; t < end; ++t) alive += last[at(t)] >= m ? 1 : 0;
    most = max_of(most, alive);
  }
  return most;
}

// In the rows that both have: parts are padded to more.
void expect_same(const Tensor& got, const Tensor& want, const char* name) {
  const Range rows{0, want.view.rows};
  const std::vector<double> a = to_f64(rows_of(ConstTensorView(got.view), rows)), b = to_f64(want.view);
  for (std::size_t i = 0; i < a.size(); ++i)
    ASSERT_TRUE(a[i] == b[i] || std::abs(a[i] - b[i]) <= 1e-11 * (1 + std::abs(b[i])))
        << name << " " << i << ": " << a[i] << ", and in one piece " << b[i];
}

// Whatever a buffer held before must not be read.
void fill_with_nan(KvBuffer& buffer) {
  for (const TensorView& view : {buffer.k(), buffer.v()}) {
    auto* numbers = static_cast<double*>(view.data);
    std::fill(numbers, numbers + view.rows * view.heads * view.dim, std::numeric_limits<double>::quiet_NaN());
  }
}

TEST(KvTree, EqualsThePassInOnePiece) {
  std::mt19937_64 engine(7);
  Index fewer = 0;
  for (int n = 0; n < 60; ++n) {
    const Tree tree = random_nodes(engine, 12, 9);
    const std::vector<Mask> masks{{.causal = true}, {.causal = true, .left = 6}, {.causal = true, .chunk = 5}};
    Setting r = setting_of(tree, masks[engine() % masks.size()]);
    r.dtype = DType::f64;
    r.heads_q = 2, r.heads_k = 1, r.dim_qk = 6, r.dim_v = 4;
    r.seed = static_cast<unsigned>(n + 1);
    Setting parts = r;
    parts.ranks = 1 + static_cast<Index>(engine() % 3), parts.micros = 1 + static_cast<Index>(engine() % 6);
    parts.drop = true, parts.ahead = engine() % 2 == 0, parts.deferred = engine() % 2 == 0;
    const MicroSequences micros = micros_of(parts);
    const Problem problem = micros.problem(r.mask);
    const Index rows = key_rows(micros, r.mask, {.drop = true, .ahead = parts.ahead});
    EXPECT_EQ(rows, most_alive(problem, micros, parts.ahead));
    fewer += rows < micros.rows().end ? 1 : 0;
    Tensors whole(r), t(parts);
    run_all(r, whole);
    run_ranks(parts.ranks, [&](Communicator& comm) {
      KvBuffer buffer(comm, options_of(parts, micros));
      for (int again = 0; again < 2; ++again) {
        fill_with_nan(buffer);
        run_sequence(parts, micros, buffer, comm, t);
      }
    });
    for (const auto& [name, got, want] : {std::tuple{"out", &t.out, &whole.out},
                                          {"lse", &t.lse, &whole.lse},
                                          {"dq", &t.dq, &whole.dq},
                                          {"dk", &t.dk, &whole.dk},
                                          {"dv", &t.dv, &whole.dv}}) {
      expect_same(*got, *want, name);
    }
  }
  EXPECT_GT(fewer, 30);
}

// 16 answers to a prompt: prompt and one answer are held, not all answers.
TEST(KvTree, HoldsOnePath) {
  List parents{kNoNode}, lengths{512};
  for (int i = 0; i < 16; ++i) parents.push_back(0), lengths.push_back(64);
  const Tree tree = tree_from(parents, lengths);
  const Setting r = setting_of(tree, {.causal = true});
  const auto rows_in = [&](Index micros, bool ahead) {
    Setting parts = r;
    parts.micros = micros;
    return key_rows(micros_of(parts), r.mask, {.drop = true, .ahead = ahead});
  };
  EXPECT_EQ(tree.rows(), 512 + 16 * 64);
  EXPECT_EQ(rows_in(24, false), 512 + 64);  // a micro-sequence an answer
  EXPECT_EQ(rows_in(24, true), 512 + 2 * 64);
  EXPECT_EQ(rows_in(48, false), 512 + 64);      // half of one
  EXPECT_EQ(rows_in(12, false), 512 + 2 * 64);  // two
}

TEST(KvTree, RowsAreOfTheSequence) {
  const Tree tree = tree_from(List{kNoNode, 0, 0, 0}, List{4, 4, 4, 4});
  Setting r = setting_of(tree, {.causal = true});
  r.micros = 4, r.drop = true;
  const MicroSequences micros = micros_of(r);
  run_ranks(1, [&](Communicator& comm) {
    KvBuffer buffer(comm, options_of(r, micros));
    EXPECT_THROW(buffer.row_of(0), Error);
    buffer.begin(micros, r.mask);
    EXPECT_EQ(buffer.k().rows, 8);
    for (Index t = 0; t < 16; ++t) EXPECT_EQ(buffer.row_of(t), t < 4 ? t : 4 + t % 4) << t;
    EXPECT_EQ(buffer.buffer_begin(), 0);
    KvBufferOptions small = options_of(r, micros);
    small.rows = 7;
    KvBuffer too_small(comm, small);
    try {
      too_small.begin(micros, r.mask);
      FAIL();
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find("needs 8 rows and the buffer has 7"), std::string::npos) << e.what();
    }
  });
}

}  // namespace
}  // namespace weft::test
