// A pack in micro-sequences through a K/V buffer, forward and backward: whole tensors, of which each rank writes the
// rows of its windows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "check/tensors.h"
#include "weft/kv_buffer.h"

namespace weft::test {

using check::Tensor;
using List = std::vector<Index>;

inline std::size_t index(Index i) { return static_cast<std::size_t>(i); }

template <class Void>
BasicTensorView<Void> rows_of(BasicTensorView<Void> view, Range rows) {
  view.data = detail::advanced(view.data, view.dtype, view.row_offset(rows.begin));
  view.rows = rows.size();
  return view;
}

struct Setting {
  List lengths;
  Mask mask = {.causal = true};
  Index ranks = 1, micros = 1;
  DType dtype = DType::f32;
  Index begin = 0;  // rows before the documents
  Index heads_q = 4, heads_k = 2, dim_qk = 24, dim_v = 16;
  double softcap = 0;
  bool sink = false, drop = false, ahead = false, past_is_random = false;
  unsigned seed = 1;
};

inline MicroSequences micros_of(const Setting& run) {
  List offsets{run.begin};
  for (const Index n : run.lengths) offsets.push_back(offsets.back() + n);
  return MicroSequences(Stream::from_used(offsets, run.lengths),
                        {.ranks = run.ranks, .micros = run.micros, .remainder = MicroSplit::Remainder::pad});
}

// Whole tensors in rows of the sequence; NaN where there is no token.
struct Tensors {
  explicit Tensors(const Setting& r) : Tensors(r, micros_of(r).rows().end, std::mt19937_64(r.seed)) {}

  Tensor q, k, v, dout, out, lse, dq, dk, dv;
  std::vector<float> sink;
  std::vector<double> dsink, max_logit;  // over all micro-sequences

 private:
  Tensors(const Setting& r, Index rows, std::mt19937_64 engine)
      : q(make(r, engine, rows, r.heads_q, r.dim_qk)),
        k(make(r, engine, rows, r.heads_k, r.dim_qk)),
        v(make(r, engine, rows, r.heads_k, r.dim_v)),
        dout(make(r, engine, rows, r.heads_q, r.dim_v)),
        out(r.dtype, rows, r.heads_q, r.dim_v),
        lse(DType::f32, rows, r.heads_q, 1),
        dq(r.dtype, rows, r.heads_q, r.dim_qk),
        dk(r.dtype, rows, r.heads_k, r.dim_qk),
        dv(r.dtype, rows, r.heads_k, r.dim_v),
        dsink(index(r.heads_q), 0.0),
        max_logit(index(r.heads_q), -INFINITY) {
    for (Index h = 0; h < r.heads_q; ++h) sink.push_back(static_cast<float>(check::normal(engine)));
  }
  static Tensor make(const Setting& r, std::mt19937_64& engine, Index rows, Index heads, Index dim) {
    const Index end = r.begin + std::accumulate(r.lengths.begin(), r.lengths.end(), Index{0});
    return check::random_tensor(engine, r.dtype, rows, heads, dim, [&](Index t) { return t >= r.begin && t < end; });
  }
};

inline Attention attention_of(const Setting& r, const Tensors& t) {
  Attention a{.softcap = r.softcap};
  if (r.sink) a.sink = Sink::learnable(per_head(t.sink.data(), DType::f32, r.heads_q));
  return a;
}

inline ForwardArgs forward_args(const Setting& r, Tensors& t, Range rows) {
  return {.q = rows_of(t.q.view, rows),
          .attention = attention_of(r, t),
          .out = rows_of(t.out.view, rows),
          .lse = rows_of(t.lse.view, rows)};
}

inline BackwardArgs backward_args(const Setting& r, Tensors& t, Range rows) {
  return {.q = rows_of(t.q.view, rows),
          .attention = attention_of(r, t),
          .dout = rows_of(t.dout.view, rows),
          .out = rows_of(t.out.view, rows),
          .lse = rows_of(t.lse.view, rows),
          .dq = rows_of(t.dq.view, rows),
          .dk = rows_of(t.dk.view, rows),
          .dv = rows_of(t.dv.view, rows)};
}

inline void fill_past(const Setting& r, const KvBuffer& buffer) {
  std::mt19937_64 engine(99);
  for (const TensorView& view : {buffer.k(), buffer.v()}) {
    const Tensor past = check::random_tensor(engine, view.dtype, r.begin, view.heads, view.dim,
                                             [&](Index) { return r.past_is_random; });
    if (r.begin > 0) std::memcpy(view.data, past.bytes.data(), past.bytes.size());
  }
}

// All micro-sequences forward, then in reverse; called by every rank, which writes its windows' rows.
inline void run_sequence(const Setting& r, const MicroSequences& micros, KvBuffer& buffer, Communicator& comm,
                         Tensors& t) {
  const auto own = [&](const Tensor& x, Index m) {
    return rows_of(ConstTensorView(x.view), micros.rows(comm.rank(), m));
  };
  std::vector<double> numbers(index(r.heads_q));
  const TensorView per = per_head(numbers.data(), DType::f64, r.heads_q);
  buffer.begin(micros, r.mask);
  if (!r.drop) fill_past(r, buffer);
  if (r.ahead) buffer.start_gather(0, own(t.k, 0), own(t.v, 0));
  for (Index m = 0; m < r.micros; ++m) {
    if (r.ahead && m + 1 < r.micros) buffer.start_gather(m + 1, own(t.k, m + 1), own(t.v, m + 1));
    ForwardArgs args = forward_args(r, t, micros.rows(comm.rank(), m));
    if (!r.ahead) args.k = own(t.k, m), args.v = own(t.v, m);
    args.max_logit = per;
    buffer.forward(m, args);
    for (std::size_t h = 0; comm.rank() == 0 && h < numbers.size(); ++h)
      t.max_logit[h] = std::max(t.max_logit[h], numbers[h]);
  }
  for (Index m = r.micros; m-- > 0;) {
    while (const std::optional<Index> i = buffer.missing(m)) buffer.gather_again(*i, own(t.k, *i), own(t.v, *i));
    BackwardArgs args = backward_args(r, t, micros.rows(comm.rank(), m));
    if (r.sink) args.dsink = per;
    buffer.backward(m, args);
    for (std::size_t h = 0; r.sink && comm.rank() == 0 && h < numbers.size(); ++h) t.dsink[h] += numbers[h];
  }
}

inline KvBufferOptions options_of(const Setting& r, const MicroSequences& micros) {
  return {.rows = key_rows(micros, r.mask, {.drop = r.drop, .ahead = r.ahead}),
          .heads = r.heads_k,
          .dim_qk = r.dim_qk,
          .dim_v = r.dim_v,
          .dtype = r.dtype,
          .drop = r.drop};
}

inline void run_all(const Setting& r, Tensors& t) {
  const MicroSequences micros = micros_of(r);
  run_ranks(r.ranks, [&](Communicator& comm) {
    KvBuffer buffer(comm, options_of(r, micros));
    run_sequence(r, micros, buffer, comm, t);
  });
}

}  // namespace weft::test
