// Random attention problems for tests: buffers that start as NaN, views of every kind, slices that share no pair.
#pragma once

#include <cmath>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "check/dense.h"
#include "index.h"
#include "kernel/check_args.h"
#include "kernel/convert.h"
#include "weft/reference.h"

namespace weft::test {

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  Index index(Index low, Index high) {  // both included
    return low + static_cast<Index>(engine_() % static_cast<unsigned long long>(high - low + 1));
  }
  bool chance(double p) { return unit() < p; }
  double unit() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  double value() { return 4 * unit() - 2; }
  std::vector<double> values(Index count) {
    std::vector<double> result(at(count));
    for (double& x : result) x = value();
    return result;
  }

 private:
  std::mt19937_64 engine_;
};

enum class ViewKind { thd, sbhd, gaps, head_major };

// Owns the memory of a view. All bytes start as 0xff: NaN in every dtype, also between the elements.
class Buffer {
 public:
  Buffer() = default;
  Buffer(ViewKind kind, DType dtype, Index rows, Index heads, Index dim) {
    const Index length = kind == ViewKind::sbhd && rows % 3 == 0 ? rows / 3 : rows;  // three sequences if it divides
    bytes_.assign(at((rows * (heads + 1) * (dim + 2) + 1) * size_of(dtype)), 0xff);
    view_ = thd(bytes_.data(), dtype, rows, heads, dim);
    if (kind == ViewKind::sbhd && length > 0) view_ = sbhd(bytes_.data(), dtype, rows / length, length, heads, dim);
    if (kind == ViewKind::gaps) {
      view_.head_stride = dim + 1;
      view_.row_stride = heads * (dim + 1) + 1;
    }
    if (kind == ViewKind::head_major) {
      view_.head_stride = rows * dim;
      view_.row_stride = dim;
    }
  }
  Buffer(DType dtype, Index rows, Index heads, Index dim) : Buffer(ViewKind::thd, dtype, rows, heads, dim) {}

  const TensorView& view() const { return view_; }
  std::vector<double> values() const { return to_f64(view_); }
  void set(const std::vector<double>& values) { from_f64(values, view_); }
  // As set, but leaves NaN in rows that `used` does not name.
  void set_used(const std::vector<double>& values, const std::vector<bool>& used) {
    for (Index row = 0; row < view_.rows; ++row) {
      for (Index head = 0; head < view_.heads && used[at(row)]; ++head) {
        store_row(view_, row, head, values.data() + (row * view_.heads + head) * view_.dim);
      }
    }
  }

 private:
  std::vector<unsigned char> bytes_;
  TensorView view_;
};

// A grid of rectangles; some get one band, some two that touch.
inline std::vector<Slice> random_slices(Random& random, Index rows_q, Index rows_k) {
  const auto cuts = [&](Index rows) {
    std::vector<Index> result = {0};
    while (result.back() < rows) result.push_back(random.index(result.back() + 1, rows));
    return result;
  };
  const std::vector<Index> q = cuts(rows_q), k = cuts(rows_k);
  std::vector<Slice> slices;
  for (std::size_t i = 0; i + 1 < q.size(); ++i) {
    for (std::size_t j = 0; j + 1 < k.size(); ++j) {
      Slice slice{q[i], q[i + 1], k[j], k[j + 1]};
      if (random.chance(0.3)) continue;
      if (random.chance(0.5)) slice.hi = random.index(-rows_q, rows_k);
      if (random.chance(0.5)) slice.lo = min_of(slice.hi, random.index(-rows_q, rows_k));
      slices.push_back(slice);
      if (slice.hi < kUnlimited && random.chance(0.3)) {
        slice.lo = slice.hi + 1;
        slice.hi = slice.lo + random.index(0, 3);
        slices.push_back(slice);
      }
    }
  }
  return slices;
}

inline bool any_sees(const std::vector<Slice>& slices, Index q, Index k) {
  for (const Slice& slice : slices) {
    if (sees(slice, q, k)) return true;
  }
  return false;
}

// A problem, its inputs as tensors and the same inputs for the dense formula.
struct AttentionProblem {
  Index tq = 6, tk = 6, hq = 2, hk = 1, dqk = 4, dv = 4;
  DType dtype = DType::f64;
  ViewKind view = ViewKind::thd;
  std::optional<double> scale = {};
  double softcap = 0;
  Sink::Kind sink = Sink::Kind::none;
  std::vector<Slice> slices = {};

  Buffer q = {}, k = {}, v = {}, dout = {}, sink_logits = {};
  std::vector<bool> q_used = {}, k_used = {};

  // Fills the tensors; rows that see nothing or are not seen stay NaN.
  void fill(Random& random) {
    q_used.assign(at(tq), false);
    k_used.assign(at(tk), false);
    for (Index i = 0; i < tq; ++i) {
      for (Index j = 0; j < tk; ++j) {
        if (any_sees(slices, i, j)) q_used[at(i)] = k_used[at(j)] = true;
      }
    }
    q = Buffer(view, dtype, tq, hq, dqk);
    k = Buffer(view, dtype, tk, hk, dqk);
    v = Buffer(view, dtype, tk, hk, dv);
    dout = Buffer(view, dtype, tq, hq, dv);
    sink_logits = Buffer(DType::f64, 1, hq, 1);
    q.set_used(random.values(tq * hq * dqk), q_used);
    k.set_used(random.values(tk * hk * dqk), k_used);
    v.set_used(random.values(tk * hk * dv), k_used);
    dout.set_used(random.values(tq * hq * dv), q_used);
    sink_logits.set(random.values(hq));
  }

  Attention attention() const {
    Attention result{.scale = scale, .softcap = softcap, .sink = {.kind = sink}};
    if (sink == Sink::Kind::learnable) result.sink.logits = sink_logits.view();
    return result;
  }
  check::DenseProblem dense() const {
    check::DenseProblem p{tq, tk, hq, hk, dqk, dv, q.values(), k.values(), v.values(), {}};
    p.sees = [this](Index i, Index j) { return any_sees(slices, i, j); };
    p.scale = scale.value_or(1 / std::sqrt(static_cast<double>(dqk)));
    p.softcap = softcap;
    if (sink == Sink::Kind::off_by_one) p.sink.assign(at(hq), 0.0);
    if (sink == Sink::Kind::learnable) p.sink = sink_logits.values();
    return p;
  }
};

// With these slices, and tensors drawn by the seed.
inline AttentionProblem filled(AttentionProblem p, std::vector<Slice> slices, unsigned seed) {
  p.slices = std::move(slices);
  Random random(seed);
  p.fill(random);
  return p;
}

template <class Args>
void read_from(Args& args, const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v) {
  args.q = q;
  args.k = k;
  args.v = v;
}
inline void write_to(KernelBackwardArgs& args, const TensorView& dq, const TensorView& dk, const TensorView& dv) {
  args.dq = dq;
  args.dk = dk;
  args.dv = dv;
}

struct Forward {
  explicit Forward(const AttentionProblem& p, DType dtype = DType::f64, DType statistics = DType::f64)
      : out(p.view, dtype, p.tq, p.hq, p.dv), lse(statistics, p.tq, p.hq, 1), max_logit(statistics, 1, p.hq, 1) {}
  KernelForwardArgs args(const AttentionProblem& p) const {
    return {{.q = p.q.view(),
             .k = p.k.view(),
             .v = p.v.view(),
             .slices = p.slices,
             .attention = p.attention(),
             .out = out.view(),
             .lse = lse.view(),
             .max_logit = max_logit.view()}};
  }
  Buffer out, lse, max_logit;
};

struct Backward {
  explicit Backward(const AttentionProblem& p, DType dtype = DType::f64)
      : dq(p.view, dtype, p.tq, p.hq, p.dqk),
        dk(p.view, dtype, p.tk, p.hk, p.dqk),
        dv(p.view, dtype, p.tk, p.hk, p.dv),
        dsink(DType::f64, 1, p.hq, 1) {}
  KernelBackwardArgs args(const AttentionProblem& p) const {
    KernelBackwardArgs result{{.q = p.q.view(),
                               .k = p.k.view(),
                               .v = p.v.view(),
                               .slices = p.slices,
                               .attention = p.attention(),
                               .dout = p.dout.view(),
                               .dq = dq.view(),
                               .dk = dk.view(),
                               .dv = dv.view()}};
    if (p.sink == Sink::Kind::learnable) result.dsink = dsink.view();
    return result;
  }
  Buffer dq, dk, dv, dsink;
};

}  // namespace weft::test
