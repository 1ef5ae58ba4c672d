#include "check/by_micro.h"

#include <algorithm>
#include <mutex>

#include "check/device_mirror.h"
#include "index.h"
#include "text.h"
#include "weft/communicator.h"
#include "weft/kv_buffer.h"

namespace weft::check {
namespace {

std::string words(const MicroWay& way) {
  return text(way.micros, " micro-sequence", way.micros == 1 ? "" : "s", way.even_work ? ", even work" : "",
              way.ahead ? ", keys ahead" : "", way.recomputed ? ", dropped, recomputed" : "");
}

MicroSplit split_of(const Case& c, const MicroWay& way) {
  MicroSplit split{.ranks = c.ranks, .micros = way.micros, .remainder = MicroSplit::Remainder::pad};
  if (way.even_work) split.even_work = c.mask;
  return split;
}

// What one rank has of one micro-sequence.
struct MicroWindow {
  MicroWindow(const Case& c, DType sums, Index rows)
      : q(c.dtype, rows, c.heads_q, c.dim_qk),
        k(c.dtype, rows, c.heads_k, c.dim_qk),
        v(c.dtype, rows, c.heads_k, c.dim_v),
        dout(c.dtype, rows, c.heads_q, c.dim_v),
        out(c.dtype, rows, c.heads_q, c.dim_v),
        lse(sums, rows, c.heads_q, 1),
        dq(sums, rows, c.heads_q, c.dim_qk),
        dk(sums, rows, c.heads_k, c.dim_qk),
        dv(sums, rows, c.heads_k, c.dim_v),
        max_logit(sums, 1, c.heads_q, 1),
        dsink(sums, 1, c.heads_q, 1) {}

  Tensor q, k, v, dout, out, lse, dq, dk, dv, max_logit, dsink;
  KvBufferForwardArgs forward = {};
  KvBufferBackwardArgs backward = {};
};

class MicroRanks {
 public:
  MicroRanks(Oracle& oracle, const MicroWay& way)
      : oracle_(oracle),
        case_(oracle.given()),
        way_(way),
        sequence_(oracle.problem().packing().q(), split_of(case_, way)),
        results_(oracle.nothing({.out = case_.dtype, .lse = sums(), .gradients = sums()})) {
    const KeyRows how{.drop = way.recomputed, .ahead = way.ahead};
    rows_ = key_rows(sequence_, case_.mask, how);
    results_.max_logit.assign(at(case_.heads_q), kMinusInfinity<double>);
    results_.dsink.assign(oracle.learnable() ? at(case_.heads_q) : 0, 0.0);
  }

  AttendReport run() {
    run_ranks(case_.ranks, [this](Communicator& communicator) { run_rank(communicator); });
    return {words(way_), oracle_.compare(results_), fault_, text("--micro ", way_.micros)};
  }

 private:
  DType sums() const { return sum_type(case_.dtype); }

  void run_rank(Communicator& communicator) {
    const weft::Place place = place_of(way_.kernel);
    DeviceMirror mirror(place);
    std::vector<MicroWindow> windows = windows_of(communicator.rank(), mirror);
    mirror.send();
    KvBuffer buffer(communicator, {.rows = rows_,
                                   .heads = case_.heads_k,
                                   .dim_qk = case_.dim_qk,
                                   .dim_v = case_.dim_v,
                                   .dtype = case_.dtype,
                                   .drop = way_.recomputed,
                                   .kernel = way_.kernel,
                                   .place = place,
                                   .checked = way_.checked});
    buffer.begin(sequence_, case_.mask);
    run_forward(buffer, windows);
    run_backward(buffer, windows);
    mirror.fetch();
    for (Index m = 0; m < way_.micros; ++m) put_back(communicator.rank(), m, windows[at(m)]);
  }

  std::vector<MicroWindow> windows_of(Index rank, DeviceMirror& mirror) {
    std::vector<MicroWindow> windows;
    windows.reserve(at(way_.micros));
    for (Index m = 0; m < way_.micros; ++m) {
      MicroWindow& w = windows.emplace_back(case_, sums(), sequence_.local(m));
      const Range rows = sequence_.rows(rank, m);
      for (auto [from, to] :
           {std::pair{&oracle_.q(), &w.q}, {&oracle_.k(), &w.k}, {&oracle_.v(), &w.v}, {&oracle_.dout(), &w.dout}}) {
        const Index end = min_of(rows.end, from->view.rows);
        if (end > rows.begin)
          std::copy(from->bytes.begin() + rows.begin * from->row_bytes(), from->bytes.begin() + end * from->row_bytes(),
                    to->bytes.begin());
      }
      w.forward = {.q = mirror.in(w.q.view),
                   .k = mirror.in(w.k.view),
                   .v = mirror.in(w.v.view),
                   .attention = mirror.in(oracle_.attention()),
                   .out = mirror.out(w.out.view),
                   .lse = mirror.out(w.lse.view),
                   .max_logit = mirror.out(w.max_logit.view),
                   .place = mirror.place()};
      w.backward = {.q = w.forward.q,
                    .attention = w.forward.attention,
                    .dout = mirror.in(w.dout.view),
                    .out = w.forward.out,
                    .lse = w.forward.lse,
                    .dq = mirror.out(w.dq.view),
                    .dk = mirror.out(w.dk.view),
                    .dv = mirror.out(w.dv.view),
                    .dsink = oracle_.learnable() ? mirror.out(w.dsink.view) : TensorView{},
                    .place = mirror.place()};
    }
    return windows;
  }

  void run_forward(KvBuffer& buffer, const std::vector<MicroWindow>& windows) const {
    for (Index m = 0; m < way_.micros; ++m) {
      KvBufferForwardArgs args = windows[at(m)].forward;
      if (way_.ahead) {
        for (Index n = m == 0 ? 0 : m + 1; n < min_of(m + 2, way_.micros); ++n)
          buffer.start_gather(n, windows[at(n)].forward.k, windows[at(n)].forward.v);
        args.k = args.v = {};
      }
      buffer.forward(m, args);
    }
  }

  void run_backward(KvBuffer& buffer, const std::vector<MicroWindow>& windows) const {
    for (Index m = way_.micros; m-- > 0;) {
      while (const std::optional<Index> again = buffer.missing(m))
        buffer.gather_again(*again, windows[at(*again)].forward.k, windows[at(*again)].forward.v);
      if (way_.recomputed) {
        KvBufferForwardArgs args = windows[at(m)].forward;
        args.k = args.v = {};
        buffer.forward(m, args);
      }
      buffer.backward(m, windows[at(m)].backward);
    }
  }

  // Ranks write to different tokens; max_logit and dsink are over all ranks.
  void put_back(Index rank, Index micro, const MicroWindow& w) {
    const Range rows = sequence_.rows(rank, micro);
    for (auto [name, from, to] : {std::tuple{"out", &w.out, &results_.out},
                                  {"lse", &w.lse, &results_.lse},
                                  {"dq", &w.dq, &results_.dq},
                                  {"dk", &w.dk, &results_.dk},
                                  {"dv", &w.dv, &results_.dv}}) {
      const Index end = max_of(rows.begin, min_of(rows.end, to->view.rows)), bytes = to->row_bytes();
      std::copy_n(from->bytes.begin(), (end - rows.begin) * bytes, to->bytes.begin() + rows.begin * bytes);
      if (std::string_view(name) != "lse") check_padding(name, *from, end - rows.begin);
    }
    if (rank > 0) return;
    for (Index h = 0; h < case_.heads_q; ++h) {
      double& largest = results_.max_logit[at(h)];
      largest = std::max(largest, load_one(w.max_logit.view, 0, h));
      if (oracle_.learnable()) results_.dsink[at(h)] += load_one(w.dsink.view, 0, h);
    }
  }

  // Rows past the pack's end are zeros.
  void check_padding(std::string_view name, const Tensor& t, Index first) {
    std::vector<double> got(at(t.view.dim));
    for (Index row = first; row < t.view.rows; ++row) {
      for (Index h = 0; h < t.view.heads; ++h) {
        load_row(t.view, row, h, got.data());
        if (std::all_of(got.begin(), got.end(), [](double x) { return x == 0; })) continue;
        const std::lock_guard lock(mutex_);
        if (!fault_) fault_ = text(name, " of row ", row, " of a window, which is padding, is ", got.front());
      }
    }
  }

  Oracle& oracle_;
  const Case& case_;
  const MicroWay& way_;
  MicroSequences sequence_;
  Index rows_ = 0;
  Results results_;
  std::mutex mutex_;
  std::optional<std::string> fault_;
};

}  // namespace

std::optional<std::string> micro_refusal(const Case& c, const Problem& problem, const MicroWay& way) {
  if (!problem.packing().self()) return "micro-sequences are for self-attention";
  const MicroSequences sequence(problem.packing().q(), split_of(c, way));
  for (const Slice& s : problem.global_slices()) {
    for (Index m = 0; m < way.micros; ++m) {
      const Range seen = touched_keys(within_rows(s, sequence.rows(m)));
      if (seen.size() > 0 && seen.end > sequence.rows(m).end)
        return text("queries of micro-sequence ", m, " see keys up to ", seen.end, ", which come later");
    }
  }
  return {};
}

Case in_micro_sequences(Case c) {
  const bool cross = c.k.has_value();
  c.k.reset();
  c.k_runs.clear();
  if (c.tree) return c;  // rows come after what they see
  if (!c.mask.slices || cross) {
    c.mask.slices.reset();
    c.mask.causal = true;
    return c;
  }
  for (Slice& s : *c.mask.slices) s.hi = min_of(s.hi, 0);
  std::erase_if(*c.mask.slices, [](const Slice& s) { return s.lo > s.hi; });
  return c;
}

AttendReport check_micro(Oracle& oracle, const MicroWay& way) { return MicroRanks(oracle, way).run(); }

}  // namespace weft::check
