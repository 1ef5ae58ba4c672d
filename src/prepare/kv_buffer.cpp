#include "weft/kv_buffer.h"

#include <algorithm>
#include <deque>

#include "index.h"
#include "prepare/reach.h"
#include "run/agreement.h"
#include "run/head_numbers.h"
#include "run/in_use.h"
#include "run/messages.h"
#include "run/rows.h"
#include "run/seat.h"
#include "run/workspace.h"
#include "text.h"
#include "weft/error.h"
#include "weft/kernel.h"
#include "weft/support.h"

namespace weft {
namespace {

using run::ConstKv;
using run::Kv;
using run::Slot;

}  // namespace

Index key_rows(const MicroSequences& micros, const Mask& mask, KeyRows how) {
  if (!how.drop) return max_of(1, micros.rows().end);
  const prepare::Reach reach = prepare::reach_of(micros, micros.problem(mask));
  Index rows = 1;  // a buffer has at least one
  for (Index m = 0; m < micros.micros(); ++m) {
    const Index last = how.ahead ? min_of(m + 1, micros.micros() - 1) : m;
    rows = max_of(rows, micros.rows(last).end - reach.needed[at(m)]);
  }
  return rows;
}

struct KvBuffer::Parts {
  struct Sequence {
    MicroSequences micros;
    Problem problem;
    prepare::Reach reach;
  };
  struct Arrival {
    Index micro;
    Request request;
  };

  Parts(Communicator& comm, KvBufferOptions how)
      : options(std::move(how)),
        seat(comm, options.place, options.memory),
        agreement(options.checked ? std::make_unique<run::Agreement>(comm) : nullptr),
        communicator(agreement ? agreement->communicator() : seat.communicator()),
        workspace(seat.memory()) {
    if (agreement) agreement->compare(call(run::CallKind::make_buffer), run::fingerprints(options));
    kv = run::take_kv(workspace, Slot::keys_0, shape(options.dtype));
  }

  run::KvShape shape(DType dtype) const { return {options.rows, options.heads, options.dim_qk, options.dim_v, dtype}; }
  const Sequence& now() const {
    if (!sequence) throw Error("no sequence has begun", "call KvBuffer::begin first");
    return *sequence;
  }
  Index rank() const { return communicator.rank(); }
  run::CollectiveCall call(run::CallKind kind, Index micro = -1, Index layer = kNoLayer) const {
    return {kind, layer == kNoLayer ? options.layer : layer, micro};
  }
  Index next_backward() const { return (backwards ? back : gathered) - 1; }

  // Tokens as rows: one range, or two where the buffer ends in between.
  std::vector<Range> places(Range tokens) const {
    std::vector<Range> all;
    for (Index t = tokens.begin; t < tokens.end;) {
      const Index row = t % options.rows, count = min_of(tokens.end - t, options.rows - row);
      all.push_back({row, row + count});
      t += count;
    }
    return all;
  }
  void use(const Place& place) {
    seat.use(place, "K/V buffer");
    if (place.stream != options.place.stream) {  // what is under way is awaited by the stream that it began in
      while (!arrivals.empty()) wait_for(arrivals.front().micro);
      device::follow(place, options.place.stream);
    }
    options.place = place;
  }
  // What ranks compare of a call: with the keys that it will have.
  std::vector<run::Fingerprint> asked(ForwardArgs args) const {
    args.k = kv.k;
    args.v = kv.v;
    return run::fingerprints(args, options.kernel);
  }
  std::vector<run::Fingerprint> asked(BackwardArgs args) const {
    args.k = kv.k;
    args.v = kv.v;
    args.add_keys = true;
    return run::fingerprints(args, options.kernel);
  }
  std::vector<Slice> slices(Index micro) const;
  void check_own(const ConstTensorView& k, const ConstTensorView& v) const;
  void check_next(Index micro, const ConstTensorView& k, const ConstTensorView& v) const;
  void gather(Index micro, const ConstTensorView& k, const ConstTensorView& v);
  std::optional<Index> missing(Index micro) const;
  void start(Index micro, Range tokens, const ConstKv& own);
  void wait_for(Index micro);
  void check_room_for(Index micro) const;
  void need_gradients(Index micro);
  void give_back(Index micro, const BackwardArgs& args);

  KvBufferOptions options;
  run::Seat seat;
  std::unique_ptr<run::Agreement> agreement;  // if checked
  Communicator& communicator;
  run::Workspace workspace;
  Kv kv, gradients;  // gradients of sum_type
  std::optional<Sequence> sequence;
  Range held;                 // tokens in the buffer or on their way
  Index gathered = 0;         // micro-sequences that came, or are on their way, in the forward
  bool backwards = false;     // a backward has begun, and
  Index back = 0;             // backward(back - 1) is next
  Index gradients_begin = 0;  // gradients of earlier tokens are not cleared yet
  std::deque<Arrival> arrivals;
  Index bytes_gathered = 0;
  mutable run::InUse in_use;
};

// In rows of the buffer: where tokens go round its end, a slice becomes two.
std::vector<Slice> KvBuffer::Parts::slices(Index micro) const {
  const Sequence& s = now();
  const Range keys{held.begin, s.micros.rows(micro).end};
  std::vector<Slice> all;
  for (const Slice& whole : s.micros.slices(s.problem, rank(), micro, keys)) {
    for (Index t = whole.k_begin + keys.begin; t < whole.k_end + keys.begin;) {
      const Index round = t / options.rows * options.rows, shift = keys.begin - round;
      const Index end = min_of(whole.k_end + keys.begin, round + options.rows);
      const Slice part = trimmed({whole.q_begin, whole.q_end, t - round, end - round, shift_bound(whole.lo, shift),
                                  shift_bound(whole.hi, shift)},
                                 false);
      if (part.q_begin < part.q_end) all.push_back(part);
      t = end;
    }
  }
  return all;
}

void KvBuffer::Parts::check_own(const ConstTensorView& k, const ConstTensorView& v) const {
  const DType dtype[] = {options.dtype};
  const Index rows = now().micros.local();
  check_tensor(k, {.name = "k", .rows = rows, .heads = options.heads, .dim = options.dim_qk, .dtypes = dtype});
  check_tensor(v, {.name = "v", .rows = rows, .heads = options.heads, .dim = options.dim_v, .dtypes = dtype});
}

// Of every rank's window the part that lies in `tokens`, straight from the ranks' tensors into its rows here.
void KvBuffer::Parts::start(Index micro, Range tokens, const ConstKv& own) {
  const auto part = [&](Index of) {
    const Range window = now().micros.rows(of, micro);
    return Range{max_of(window.begin, tokens.begin), min_of(window.end, tokens.end)};
  };
  const Index first = now().micros.rows(rank(), micro).begin;
  std::vector<PeerRows> sends, receives;
  for (Index peer = 0; peer < communicator.ranks(); ++peer) {
    const Range mine = part(rank()), theirs = part(peer);
    if (mine.size() > 0) sends.push_back({peer, {{mine.begin - first, mine.end - first}}});
    if (theirs.size() > 0) receives.push_back({peer, places(theirs)});
  }
  arrivals.push_back(
      {micro, communicator.exchange(run::messages(sends, own), run::messages(receives, run::constant(kv)))});
  bytes_gathered += tokens.size() * options.heads * (options.dim_qk + options.dim_v) * size_of(options.dtype);
}

void KvBuffer::Parts::wait_for(Index micro) {
  const bool awaited =
      std::any_of(arrivals.begin(), arrivals.end(), [&](const Arrival& a) { return a.micro == micro; });
  while (awaited && !arrivals.empty()) {
    Arrival next = std::move(arrivals.front());
    arrivals.pop_front();
    try {
      next.request.wait();
    } catch (...) {
      sequence.reset();  // its keys never came: nothing may be computed with what lies there
      throw;
    }
    if (next.micro == micro) break;
  }
}

void KvBuffer::Parts::check_room_for(Index micro) const {
  const Index end = now().micros.rows(micro).end;
  if (end - held.begin > options.rows)
    throw Error(text("micro-sequence ", micro, " brings rows up to ", end, " while rows from ", held.begin,
                     " on are still needed: ", end - held.begin, " rows in a buffer of ", options.rows),
                "give it more rows (key_rows with `ahead`), or gather after the forward of the one before");
}

// That the micro-sequence is the one whose keys come next, and that there is room for them.
void KvBuffer::Parts::check_next(Index micro, const ConstTensorView& k, const ConstTensorView& v) const {
  now().micros.rows(micro);  // Error if there is no such micro-sequence
  if (micro != gathered || backwards)
    throw Error(text("gather of micro-sequence ", micro, ", and ", gathered, " is next"),
                backwards ? "begin a new sequence: this one is in its backward" : "gather each one once, in order");
  check_own(k, v);
  check_room_for(micro);
}

void KvBuffer::Parts::gather(Index micro, const ConstTensorView& k, const ConstTensorView& v) {
  const Range tokens = now().micros.rows(micro);
  held.end = tokens.end;
  start(micro, tokens, {k, v});
  ++gathered;
}

// The gradients of all keys that micro's queries see, and of its own keys, start as zeros.
void KvBuffer::Parts::need_gradients(Index micro) {
  if (gradients.k.data == nullptr)
    gradients = run::take_kv(workspace, Slot::key_gradients_0, shape(sum_type(options.dtype)));
  const Index end = now().micros.rows(micro).end;
  if (!backwards) gradients_begin = end;
  backwards = true;
  const Index begin = options.drop ? now().reach.first[at(micro)] : 0;
  if (begin >= gradients_begin) return;
  for (const Range& rows : places({begin, gradients_begin})) {
    for (TensorView view : {gradients.k, gradients.v}) {
      view.data = detail::advanced(view.data, view.dtype, view.offset(rows.begin, 0));
      view.rows = rows.size();
      run::clear(options.place, view);
    }
  }
  gradients_begin = begin;
}

// Nobody adds to the keys of `micro` any more: their gradients go to the ranks that own them, and are added in the
// order of ranks.
void KvBuffer::Parts::give_back(Index micro, const BackwardArgs& args) {
  const Index local = now().micros.local();
  const DType type = sum_type(options.dtype);
  const bool there_k = args.dk.dtype == type, there_v = args.dv.dtype == type;  // summed where they belong
  Kv mine = run::take_kv(workspace, Slot::own_key_gradients,
                         {local, options.heads, there_k ? 0 : options.dim_qk, there_v ? 0 : options.dim_v, type});
  if (there_k) mine.k = args.dk;
  if (there_v) mine.v = args.dv;
  std::vector<PeerRows> sends, own;
  for (Index peer = 0; peer < communicator.ranks() && local > 0; ++peer) {
    sends.push_back({peer, places(now().micros.rows(peer, micro))});
    own.push_back({peer, {{0, local}}});
  }
  communicator
      .exchange(run::messages(sends, run::constant(gradients)),
                run::at_once(run::messages(own, run::constant(mine), adding(type)), true))
      .wait();
  run::round_to(args.place, {args.dk, args.dv}, run::constant(mine));
}

KvBuffer::KvBuffer(Communicator& communicator, KvBufferOptions options) {
  if (options.rows < 1 || options.rows > kMaxTokens || options.heads < 1 || options.dim_qk < 1 || options.dim_v < 1)
    throw Error(text("a buffer of ", options.rows, " rows, ", options.heads, " heads, dims ", options.dim_qk, " and ",
                     options.dim_v),
                text("give at least 1 of each, and at most ", kMaxTokens, " rows"));
  for (const Index dim : {options.dim_qk, options.dim_v})
    checked_product("a K/V buffer", {options.rows, options.heads, dim, size_of(DType::f64)});
  require_support({.dtype = options.dtype});
  find_kernel(options.kernel);  // Error here rather than in the first call
  if (options.place.kind != DeviceKind::cpu && options.checked)
    throw Error("checked mode of a K/V buffer with tensors on a GPU",
                "check on the CPU, or leave it out: messages of a GPU carry no sums");
  parts_ = std::make_unique<Parts>(communicator, std::move(options));
}

KvBuffer::~KvBuffer() = default;
KvBuffer::KvBuffer(KvBuffer&&) noexcept = default;

void KvBuffer::begin(const MicroSequences& micros, const Mask& mask) {
  const run::InUse::Call guard(parts_->in_use, "K/V buffer");
  Parts& p = *parts_;
  if (micros.ranks() != p.communicator.ranks())
    throw Error(text("micro-sequences for ", micros.ranks(), " ranks on ", p.communicator.ranks()),
                "make them with communicator.ranks()");
  const Index rows = key_rows(micros, mask, {.drop = p.options.drop});
  if (rows > p.options.rows)
    throw Error(text("the sequence needs ", rows, " rows and the buffer has ", p.options.rows),
                text("give KvBufferOptions::rows = ", rows, " or more (key_rows)"));
  Problem problem = micros.problem(mask);
  prepare::Reach reach = prepare::reach_of(micros, problem);
  for (Index m = 0; m < micros.micros(); ++m) {
    if (reach.end[at(m)] <= micros.rows(m).end) continue;
    throw Error(text("queries of micro-sequence ", m, " (tokens ", micros.rows(m).begin, " .. ", micros.rows(m).end,
                     ") see keys up to ", reach.end[at(m)], ", which come later"),
                "use a causal mask, or micro-sequences that end where documents do");
  }
  if (p.agreement) p.agreement->compare(p.call(run::CallKind::begin), run::fingerprints(micros, problem));
  const Index begin = p.options.drop && micros.local() > 0 ? reach.needed.front() : Index{0};
  p.arrivals.clear();
  p.sequence.emplace(Parts::Sequence{micros, std::move(problem), std::move(reach)});
  p.held = {begin, micros.rows().begin};
  p.gathered = p.back = p.bytes_gathered = 0;
  p.backwards = false;
}

void KvBuffer::use(const Place& place) {
  const run::InUse::Call guard(parts_->in_use, "K/V buffer");
  parts_->use(place);
}

void KvBuffer::start_gather(Index micro, const ConstTensorView& k, const ConstTensorView& v) {
  const run::InUse::Call guard(parts_->in_use, "K/V buffer");
  Parts& p = *parts_;
  p.check_next(micro, k, v);
  if (p.agreement) p.agreement->compare(p.call(run::CallKind::gather, micro), {});
  p.gather(micro, k, v);
}

void KvBuffer::forward(Index micro, const ForwardArgs& args) {
  const run::InUse::Call guard(parts_->in_use, "K/V buffer");
  Parts& p = *parts_;
  p.use(args.place);
  if (!args.slices.empty() || args.device_plan != nullptr || args.partial.given())
    throw Error("slices, a device_plan or partial are given to a K/V buffer",
                "leave them out: they are the sequence's business");
  if (args.q.rows != p.now().micros.local())
    throw Error(text("q has ", args.q.rows, " rows and a window has ", p.now().micros.local()),
                "give the rows of this rank's window");
  const bool gathers = micro >= p.gathered;
  if (gathers) {
    p.check_next(micro, args.k, args.v);
  } else if (args.k.given() || args.v.given()) {
    throw Error(text("k or v of micro-sequence ", micro, " is given, and it was gathered before"),
                "leave them out here");
  }
  const run::CollectiveCall call = p.call(run::CallKind::forward, micro, args.layer);
  const std::uint64_t number = p.agreement ? p.agreement->compare(call, p.asked(args)) : 0;
  if (gathers) p.gather(micro, args.k, args.v);
  p.wait_for(micro);
  const std::vector<Slice> slices = p.slices(micro);
  std::optional<run::HeadNumbers> largest;
  if (args.max_logit.given())
    largest.emplace(args.place, p.workspace, args.q.heads, p.communicator.ranks(), kMinusInfinity<double>);
  ForwardArgs whole = args;
  whole.k = p.kv.k;
  whole.v = p.kv.v;
  whole.slices = slices;
  if (args.max_logit.given()) whole.max_logit = largest->view();
  attend(whole, p.options.kernel);
  if (args.max_logit.given()) largest->reduce_into(p.communicator, Reduce::max, args.max_logit);
  // Nobody is done before everybody is: an error anywhere is one everywhere.
  if (p.agreement) p.agreement->end(call, number, args.out, args.lse);
  // The last one's keys stay: its backward comes first.
  if (p.options.drop && micro + 1 < p.now().micros.micros())
    p.held.begin = max_of(p.held.begin, p.now().reach.needed[at(micro + 1)]);
}

std::optional<Index> KvBuffer::Parts::missing(Index micro) const {
  const MicroSequences& micros = now().micros;
  if (micro < 0 || micro >= micros.micros() || held.begin <= now().reach.first[at(micro)]) return {};
  if (held.begin <= micros.rows().begin)
    throw Error(text("rows before ", held.begin, " were filled in advance and have been dropped"),
                "use a buffer without `drop` for a first document that began in the past");
  return (held.begin - 1 - micros.rows().begin) / (micros.local() * micros.ranks());
}

std::optional<Index> KvBuffer::missing(Index micro) const {
  const run::InUse::Call guard(parts_->in_use, "K/V buffer");
  return parts_->missing(micro);
}

void KvBuffer::gather_again(Index micro, const ConstTensorView& k, const ConstTensorView& v) {
  const run::InUse::Call guard(parts_->in_use, "K/V buffer");
  Parts& p = *parts_;
  const Index next = p.next_backward();
  const std::optional<Index> wanted = p.missing(next);
  if (wanted != micro)
    throw Error(
        text("gather_again of micro-sequence ", micro, ", and ", wanted ? text(*wanted) : "none", " is missing"),
        "ask missing() which one is");
  p.check_own(k, v);
  if (p.agreement) p.agreement->compare(p.call(run::CallKind::gather_again, micro), {});
  const MicroSequences& micros = p.now().micros;
  p.held.end = micros.rows(next).end;  // later ones are done: their rows are free
  const Range tokens{max_of(micros.rows(micro).begin, p.now().reach.first[at(next)]), p.held.begin};
  p.start(micro, tokens, {k, v});
  p.wait_for(micro);
  p.held.begin = tokens.begin;
}

void KvBuffer::backward(Index micro, const BackwardArgs& args) {
  const run::InUse::Call guard(parts_->in_use, "K/V buffer");
  Parts& p = *parts_;
  p.use(args.place);
  const MicroSequences& micros = p.now().micros;
  const Index next = p.next_backward();
  if (micro != next || micro < 0)
    throw Error(text("backward of micro-sequence ", micro, ", and ", next < 0 ? "none" : text(next), " is next"),
                "go through the micro-sequences of the forward in reverse");
  if (!args.slices.empty() || args.device_plan != nullptr || args.k.given() || args.v.given() || args.add_keys)
    throw Error("k, v, slices, a device_plan or add_keys are given to the backward of a K/V buffer", "leave them out");
  if (!args.out.given() && micros.local() > 0)
    throw Error("out and lse are left out", "give both, as the forward wrote them");
  if (const std::optional<Index> wanted = p.missing(micro))
    throw Error(text("backward of micro-sequence ", micro, " needs dropped rows of micro-sequence ", *wanted),
                "call gather_again until missing() names none");
  const Index local = micros.local();
  const TensorSpec dk{.name = "dk", .rows = local, .heads = p.options.heads, .dim = p.options.dim_qk, .output = true};
  const TensorSpec dv{.name = "dv", .rows = local, .heads = p.options.heads, .dim = p.options.dim_v, .output = true};
  check_tensor(args.dk, dk);
  check_tensor(args.dv, dv);
  const run::CollectiveCall call = p.call(run::CallKind::backward, micro, args.layer);
  if (p.agreement) p.agreement->compare(call, p.asked(args), p.agreement->forwards_of(args.out, args.lse));
  while (!p.arrivals.empty()) p.wait_for(p.arrivals.front().micro);
  p.need_gradients(micro);
  p.held.end = micros.rows(micro).end;
  p.back = micro;

  const std::vector<Slice> slices = p.slices(micro);
  std::optional<run::HeadNumbers> dsink;
  if (args.dsink.given()) dsink.emplace(args.place, p.workspace, args.q.heads, p.communicator.ranks(), 0);
  BackwardArgs whole = args;
  whole.k = p.kv.k;
  whole.v = p.kv.v;
  whole.slices = slices;
  whole.dk = p.gradients.k;
  whole.dv = p.gradients.v;
  whole.add_keys = true;
  if (args.dsink.given()) whole.dsink = dsink->view();
  attend_backward(whole, p.options.kernel);
  p.give_back(micro, args);
  if (args.dsink.given()) dsink->reduce_into(p.communicator, Reduce::sum, args.dsink);
  if (p.agreement) p.agreement->end(call);
}

Index KvBuffer::buffer_begin() const { return parts_->held.begin; }
Index KvBuffer::row_of(Index token) const { return token % parts_->options.rows; }
TensorView KvBuffer::k() const { return parts_->kv.k; }
TensorView KvBuffer::v() const { return parts_->kv.v; }
TensorView KvBuffer::dk() const { return parts_->gradients.k; }
TensorView KvBuffer::dv() const { return parts_->gradients.v; }
KvBuffer::Use KvBuffer::use() const { return {parts_->workspace.held(), parts_->bytes_gathered}; }

}  // namespace weft
