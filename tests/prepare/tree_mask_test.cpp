// The slices of trees, and attention by them, against the sequences one by one.
#include <algorithm>
#include <cmath>
#include <random>

#include <gtest/gtest.h>

#include "check/tensors.h"
#include "index.h"
#include "prepare/random_trees.h"
#include "weft/attention.h"
#include "weft/tree.h"

namespace weft {
namespace {

using namespace test;

std::vector<Mask> masks(std::mt19937_64& engine) {
  const Index left = static_cast<Index>(engine() % 14), chunk = 1 + static_cast<Index>(engine() % 12);
  return {{.causal = true},
          {.causal = true, .left = left},
          {.causal = true, .chunk = chunk},
          {.causal = true, .left = left, .right = 3, .chunk = chunk}};
}

TEST(Tree, RowsSeeWhatTheirSequencesSee) {
  std::mt19937_64 engine(11);
  for (int round = 0; round < 400; ++round) {
    const Tree tree = round % 2 == 0 ? tree_from(random_sequences(engine)) : random_nodes(engine, 9, 9);
    const Tree padded = tree.padded_to(1 + round % 5, tree.padded_to(1 + round % 5).rows() + round % 3);
    for (const Mask& mask : masks(engine)) {
      expect_rows_see_what_sequences_see(tree, mask);
      expect_rows_see_what_sequences_see(padded, mask);
    }
  }
}

// One row's tensors of f64, by token.
struct Tokens {
  Tokens(std::mt19937_64& engine, Index rows)
      : q(random(engine, rows, 2, 4)), k(random(engine, rows, 1, 4)), v(random(engine, rows, 1, 3)) {}
  static check::Tensor random(std::mt19937_64& engine, Index rows, Index heads, Index dim) {
    return check::random_tensor(engine, DType::f64, rows, heads, dim, [](Index) { return true; });
  }
  check::Tensor q, k, v;
};

check::Tensor rows_of(const check::Tensor& from, const List& rows) {
  check::Tensor to(DType::f64, static_cast<Index>(rows.size()), from.view.heads, from.view.dim);
  for (std::size_t i = 0; i < rows.size(); ++i)
    std::copy_n(from.bytes.begin() + rows[i] * from.row_bytes(), from.row_bytes(),
                to.bytes.begin() + static_cast<Index>(i) * from.row_bytes());
  return to;
}

double* numbers(check::Tensor& t) { return reinterpret_cast<double*>(t.bytes.data()); }

struct Attended {
  check::Tensor out, lse, dq, dk, dv;
};
Attended attended(const check::Tensor& q, const check::Tensor& k, const check::Tensor& v, const check::Tensor& dout,
                  const std::vector<Slice>& slices) {
  const auto like = [](const check::Tensor& t) { return check::f64_tensor(t); };
  Attended a{like(dout), check::Tensor(DType::f64, q.view.rows, 2, 1), like(q), like(k), like(v)};
  attend({.q = q.view, .k = k.view, .v = v.view, .slices = slices, .out = a.out.view, .lse = a.lse.view}, "reference");
  attend_backward({.q = q.view,
                   .k = k.view,
                   .v = v.view,
                   .slices = slices,
                   .dout = dout.view,
                   .out = a.out.view,
                   .lse = a.lse.view,
                   .dq = a.dq.view,
                   .dk = a.dk.view,
                   .dv = a.dv.view},
                  "reference");
  return a;
}

double largest_difference(check::Tensor& a, check::Tensor& b) {
  double largest = 0;
  for (Index i = 0; i < a.view.rows * a.view.heads * a.view.dim; ++i)
    largest = std::max(largest, std::abs(numbers(a)[i] - numbers(b)[i]));
  return largest;
}

// Adds rows of `part` to those rows of the whole.
void add_rows(check::Tensor& whole, check::Tensor& part, const List& rows) {
  const Index width = whole.view.heads * whole.view.dim;
  for (std::size_t i = 0; i < rows.size(); ++i)
    for (Index x = 0; x < width; ++x)
      numbers(whole)[rows[i] * width + x] += numbers(part)[static_cast<Index>(i) * width + x];
}

// The output of every row is that of its token in each sequence. With the sum of the sequences' dout as the tree's, the
// tree's gradients are the sums of theirs.
TEST(Tree, AttentionIsThatOfTheSequences) {
  std::mt19937_64 engine(13);
  for (int round = 0; round < 40; ++round) {
    const Tree tree = round % 2 == 0 ? tree_from(random_sequences(engine)) : random_nodes(engine, 8, 7);
    const Lists paths = paths_of(tree);
    const Tokens tokens(engine, tree.rows());
    std::vector<check::Tensor> douts;
    check::Tensor dout(DType::f64, tree.rows(), 2, 3);
    std::fill_n(numbers(dout), dout.bytes.size() / sizeof(double), 0.0);
    for (const List& path : paths) {
      douts.push_back(Tokens::random(engine, static_cast<Index>(path.size()), 2, 3));
      add_rows(dout, douts.back(), path);
    }
    for (const Mask& mask : masks(engine)) {
      Attended whole = attended(tokens.q, tokens.k, tokens.v, dout, tree.slices(mask));
      Attended sums{check::f64_tensor(whole.out), check::f64_tensor(whole.lse), check::f64_tensor(whole.dq),
                    check::f64_tensor(whole.dk), check::f64_tensor(whole.dv)};
      for (check::Tensor* t : {&sums.dq, &sums.dk, &sums.dv})
        std::fill_n(numbers(*t), t->bytes.size() / sizeof(double), 0.0);
      for (std::size_t s = 0; s < paths.size(); ++s) {
        const Problem alone(Stream::from_lengths(List{static_cast<Index>(paths[s].size())}), mask);
        Attended one = attended(rows_of(tokens.q, paths[s]), rows_of(tokens.k, paths[s]), rows_of(tokens.v, paths[s]),
                                douts[s], alone.global_slices());
        check::Tensor out = rows_of(whole.out, paths[s]), lse = rows_of(whole.lse, paths[s]);
        ASSERT_LT(largest_difference(out, one.out), 1e-13);
        ASSERT_LT(largest_difference(lse, one.lse), 1e-13);
        add_rows(sums.dq, one.dq, paths[s]);
        add_rows(sums.dk, one.dk, paths[s]);
        add_rows(sums.dv, one.dv, paths[s]);
      }
      ASSERT_LT(largest_difference(sums.dq, whole.dq), 1e-12);
      ASSERT_LT(largest_difference(sums.dk, whole.dk), 1e-12);
      ASSERT_LT(largest_difference(sums.dv, whole.dv), 1e-12);
    }
  }
}

// A last child is no only child, though its parent ends where it does.
TEST(Tree, LastChildrenHaveSlicesOfTheirOwn) {
  const Tree tree = tree_from({-1, 0, 0}, {1, 5, 8});
  expect_rows_see_what_sequences_see(tree, {.causal = true});
  EXPECT_EQ(tree.slices().size(), 3U);
}

// A slice a node, or a few where a window or chunks are narrower than the tree is deep.
TEST(Tree, TenThousandNodesMakeFewSlices) {
  List parents{-1}, lengths{4096};
  for (Index i = 1; i < 10'000; ++i) {
    parents.push_back((i - 1) / 2);
    lengths.push_back(64);
  }
  const Tree binary = tree_from(parents, lengths);
  EXPECT_EQ(binary.slices().size(), 9'999U);  // one node is an only child
  // All 13 nodes of a path below the root lie within this window; the root itself does not.
  EXPECT_LE(binary.slices({.causal = true, .left = 1024}).size(), 20'000U);
  // Of itself and its parent; a first child goes on where its parent ends.
  EXPECT_LE(binary.slices({.causal = true, .left = 64}).size(), 15'000U);
  for (Index i = 1; i < 10'000; ++i) parents[at(i)] = i - 1;
  const Tree chain = tree_from(parents, lengths);
  EXPECT_EQ(chain.slices().size(), 1U);
  EXPECT_LE(chain.slices({.causal = true, .left = 128}).size(), 10'002U);   // the last two are in reach whole
  EXPECT_LE(chain.slices({.causal = true, .chunk = 256}).size(), 10'016U);  // the root has 16 chunks
}

}  // namespace
}  // namespace weft
