// Plain dense softmax attention, written from the formula.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "index.h"
#include "weft/slice.h"

namespace weft::check {

// All in f64 and global tokens. Rows that see nothing, or that nobody sees, are never read.
struct DenseProblem {
  Index tokens_q = 0, tokens_k = 0, heads_q = 1, heads_k = 1, dim_qk = 1, dim_v = 1;
  std::vector<double> q = {};  // [tq, hq, dqk]
  std::vector<double> k = {};  // [tk, hk, dqk]
  std::vector<double> v = {};  // [tk, hk, dv]
  std::function<bool(Index q, Index k)> sees = {};
  // The same as runs of keys, rising; not needed, but without it all pairs are looked at.
  std::function<void(Index q, std::vector<Range>& to)> ranges = {};
  double scale = 1;
  double softcap = 0;                // 0: off
  std::vector<double> sink = {};     // [hq] logits; empty: none (off-by-one: zeros)
  std::vector<Index> head_map = {};  // [hq] K/V head of each query head; empty: heads in equal groups

  Index kv_head(Index head) const { return head_map.empty() ? head / (heads_q / heads_k) : head_map[at(head)]; }
};

// A bound is what one unit of relative rounding in each input, product and sum can do to the element at most, to first
// order: the sum of absolute terms. An error of bound · 2^-53 · (a small number) is as good as f64 can do.
struct Bounded {
  std::vector<double> value;
  std::vector<double> bound;
};

struct DenseForward {
  Bounded out;        // [tq, hq, dv]
  Bounded lse;        // [tq, hq]
  Bounded max_logit;  // [hq]
};

struct DenseBackward {
  Bounded dq;     // [tq, hq, dqk]
  Bounded dk;     // [tk, hk, dqk]
  Bounded dv;     // [tk, hk, dv]
  Bounded dsink;  // [hq]; zeros without a sink
};

DenseForward dense_forward(const DenseProblem& problem);
DenseBackward dense_backward(const DenseProblem& problem, std::span<const double> dout);  // [tq, hq, dv]

// The worst element decides, with its coordinates; the norm tells a bad spot from a bad tensor.
struct Comparison {
  double ratio = 0;  // largest |got - expected| / bound; infinity for NaN and for an error where the bound is 0
  double got = 0, expected = 0, bound = 0;
  Index row = 0, head = 0, i = 0;  // of the worst element
  double relative_norm = 0;        // |got - expected| / |expected| over finite elements; by |bound| if expected is 0
};

// All [rows, heads, dim]. A wrong number of elements is infinitely wrong.
Comparison worst_element(std::span<const double> got, const Bounded& expected, Index heads, Index dim);

}  // namespace weft::check
