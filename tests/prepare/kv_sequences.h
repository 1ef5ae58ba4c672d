// A pack in micro-sequences through a K/V buffer, forward and backward: whole tensors, of which each rank writes the
// rows of its windows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>

#include "check/device_mirror.h"
#include "check/tensors.h"
#include "index.h"
#include "weft/kv_buffer.h"

namespace weft::test {

using check::Tensor;
using List = std::vector<Index>;

inline std::size_t index(Index i) { return at(i); }

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
  bool sink = false, drop = false, ahead = false, past_is_random = false, deterministic = false;
  bool deferred = false;
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
        lse(sum_type(r.dtype), rows, r.heads_q, 1),
        dq(r.dtype, rows, r.heads_q, r.dim_qk),
        dk(r.dtype, rows, r.heads_k, r.dim_qk),
        dv(r.dtype, rows, r.heads_k, r.dim_v),
        dsink(at(r.heads_q), 0.0),
        max_logit(at(r.heads_q), -INFINITY) {
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

// Whole tensors where a buffer wants them.
struct Views {
  ConstTensorView q, k, v, dout;
  TensorView out, lse, dq, dk, dv;
  Attention attention;
  Place place;
};

inline Views views_of(const Setting& r, Tensors& t, check::DeviceMirror& mirror) {
  return {.q = mirror.in(t.q.view),
          .k = mirror.in(t.k.view),
          .v = mirror.in(t.v.view),
          .dout = mirror.in(t.dout.view),
          .out = mirror.out(t.out.view),
          .lse = mirror.out(t.lse.view),
          .dq = mirror.out(t.dq.view),
          .dk = mirror.out(t.dk.view),
          .dv = mirror.out(t.dv.view),
          .attention = mirror.in(attention_of(r, t)),
          .place = mirror.place()};
}

inline KvBufferForwardArgs forward_args(const Views& v, Range rows) {
  return {.q = rows_of(v.q, rows),
          .attention = v.attention,
          .out = rows_of(v.out, rows),
          .lse = rows_of(v.lse, rows),
          .place = v.place};
}

inline KvBufferBackwardArgs backward_args(const Views& v, Range rows) {
  return {.q = rows_of(v.q, rows),
          .attention = v.attention,
          .dout = rows_of(v.dout, rows),
          .out = rows_of(v.out, rows),
          .lse = rows_of(v.lse, rows),
          .dq = rows_of(v.dq, rows),
          .dk = rows_of(v.dk, rows),
          .dv = rows_of(v.dv, rows),
          .place = v.place};
}

inline KvBufferForwardArgs forward_args(const Setting& r, Tensors& t, Range rows) {
  check::DeviceMirror same({});
  return forward_args(views_of(r, t, same), rows);
}
inline KvBufferForwardArgs forward_args_with_keys(const Setting& r, Tensors& t, Range rows) {
  KvBufferForwardArgs args = forward_args(r, t, rows);
  args.k = rows_of(t.k.view, rows);
  args.v = rows_of(t.v.view, rows);
  return args;
}
inline KvBufferBackwardArgs backward_args(const Setting& r, Tensors& t, Range rows) {
  check::DeviceMirror same({});
  return backward_args(views_of(r, t, same), rows);
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
                         Tensors& t, const Place& place = {}) {
  const bool there = place.kind != DeviceKind::cpu;  // results come back whole, so each rank has tensors of its own
  std::optional<Tensors> copy;
  if (there) copy.emplace(r);
  Tensors& mine = there ? *copy : t;
  check::DeviceMirror mirror(place);
  const Views views = views_of(r, mine, mirror);
  const Tensor max_logits(DType::f64, r.micros, r.heads_q, 1), dsinks(DType::f64, r.micros, r.heads_q, 1);
  const TensorView max_logit = mirror.out(max_logits.view), dsink = mirror.out(dsinks.view);
  mirror.send();
  const auto window = [&](Index m) { return micros.rows(comm.rank(), m); };
  const auto number = [&](const TensorView& of, Index m) { return rows_of(of, {m, m + 1}); };

  buffer.begin(micros, r.mask);
  if (!r.drop) fill_past(r, buffer);
  const auto gather = [&](Index m) {
    buffer.start_gather(m, rows_of(views.k, window(m)), rows_of(views.v, window(m)));
  };
  if (r.ahead) gather(0);
  for (Index m = 0; m < r.micros; ++m) {
    if (r.ahead && m + 1 < r.micros) gather(m + 1);
    KvBufferForwardArgs args = forward_args(views, window(m));
    if (!r.ahead) args.k = rows_of(views.k, window(m)), args.v = rows_of(views.v, window(m));
    args.max_logit = number(max_logit, m);
    buffer.forward(m, args);
  }
  for (Index m = r.micros; m-- > 0;) {
    while (const std::optional<Index> i = buffer.missing(m)) {
      if (there) {
        buffer.gather_again(*i, rows_of(views.k, window(*i)), rows_of(views.v, window(*i)));
        continue;
      }
      std::vector<std::byte> k = mine.k.bytes, v = mine.v.bytes;  // wanted for this call alone
      ConstTensorView view_k = mine.k.view, view_v = mine.v.view;
      view_k.data = k.data();
      view_v.data = v.data();
      buffer.gather_again(*i, rows_of(view_k, window(*i)), rows_of(view_v, window(*i)));
      std::fill(k.begin(), k.end(), std::byte{0xff});
      std::fill(v.begin(), v.end(), std::byte{0xff});
    }
    KvBufferBackwardArgs args = backward_args(views, window(m));
    if (r.sink) args.dsink = number(dsink, m);
    args.deterministic = r.deterministic;
    args.deferred = r.deferred;
    buffer.backward(m, args);
  }
  mirror.fetch();

  for (const auto& [from, to] :
       {std::pair{&mine.out, &t.out}, {&mine.lse, &t.lse}, {&mine.dq, &t.dq}, {&mine.dk, &t.dk}, {&mine.dv, &t.dv}}) {
    for (Index m = 0; there && m < r.micros; ++m) {
      const auto row = static_cast<std::ptrdiff_t>(from->row_bytes());
      std::copy(from->bytes.begin() + window(m).begin * row, from->bytes.begin() + window(m).end * row,
                to->bytes.begin() + window(m).begin * row);
    }
  }
  for (Index m = 0; comm.rank() == 0 && m < r.micros; ++m) {
    for (Index h = 0; h < r.heads_q; ++h) {
      t.max_logit[at(h)] = std::max(t.max_logit[at(h)], *max_logits.view.at<double>(m, h));
      if (r.sink) t.dsink[at(h)] += *dsinks.view.at<double>(m, h);
    }
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

inline void run_all(const Setting& r, Tensors& t, const std::string& kernel = {}) {
  const MicroSequences micros = micros_of(r);
  run_ranks(r.ranks, [&](Communicator& comm) {
    KvBufferOptions options = options_of(r, micros);
    options.kernel = kernel;
    options.place = check::place_of(kernel);
    KvBuffer buffer(comm, options);
    run_sequence(r, micros, buffer, comm, t, options.place);
  });
}

}  // namespace weft::test
