#include "weft/kv_buffer.h"

#include <algorithm>
#include <deque>

#include "index.h"
#include "prepare/key_places.h"
#include "run/agreement.h"
#include "run/execution_context.h"
#include "run/head_numbers.h"
#include "run/kernel_args.h"
#include "run/rows.h"
#include "run/workspace.h"
#include "text.h"
#include "weft/support.h"

namespace weft {

using run::ConstKv;
using run::Kv;
using run::Slot;

namespace {

// Collective, if the options say checked; else null. Error if the ranks' options differ.
std::unique_ptr<run::Agreement> agreement_of(Communicator& ranks, const KvBufferOptions& options) {
  if (!options.checked) return nullptr;
  auto agreement = std::make_unique<run::Agreement>(ranks);
  agreement->compare({run::CallKind::make_buffer, options.layer}, run::fingerprints(options));
  return agreement;
}

}  // namespace

Index key_rows(const MicroSequences& micros, const Mask& mask, KeyRows how) {
  return KeyPlaces::least_rows(micros, micros.problem(mask), how);
}

struct KvBuffer::Data {
  struct Sequence {
    MicroSequences micros;
    Problem problem;
    KeyPlaces places;
    detail::CallSign sign = {};
  };
  struct Arrival {
    Index micro;
    Request request;
  };
  // Gradients on their way to this rank, which owns the keys.
  struct Return {
    Request request;
    Kv sums, outputs;
  };

  Data(Communicator& comm, KvBufferOptions how)
      : options(std::move(how)),
        agreement(agreement_of(comm, options)),
        context(agreement ? agreement->communicator() : comm, options.place, options.memory),
        communicator(context.communicator()),
        workspace(context.memory()) {
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
  // The fingerprint of a pass, which its messages carry; none on checked ranks, which compare more than that.
  template <class... Args>
  std::optional<detail::SignedPass> begin_pass(detail::PassKind kind, Index micro, Index layer,
                                               const Args&... args) const {
    if (agreement != nullptr || communicator.ranks() == 1) return std::nullopt;
    const run::SignedCallInfo info{.layer = layer == kNoLayer ? options.layer : layer, .micro = micro};
    return std::optional<detail::SignedPass>(std::in_place, communicator, run::with_call(now().sign, args..., info),
                                             kind);
  }
  Index next_backward() const { return (backwards ? back : gathered) - 1; }

  void use(const Place& place) {
    context.use(place, "K/V buffer");
    if (place.stream != options.place.stream) {  // the stream that a gather began in waits for it
      while (!arrivals.empty()) wait_for(arrivals.front().micro);
      finish_return();
      device::follow(place, options.place.stream);
    }
    options.place = place;
  }
  std::vector<Slice> slices(Index micro) const;
  void check_window(Index micro, std::string_view k_name, const ConstTensorView& k, std::string_view v_name,
                    const ConstTensorView& v, std::span<const DType> dtypes, bool output) const;
  void check_own(Index micro, const ConstTensorView& k, const ConstTensorView& v) const {
    check_window(micro, "k", k, "v", v, {&options.dtype, 1}, false);
  }
  void check_next(Index micro, const ConstTensorView& k, const ConstTensorView& v) const;
  void gather(Index micro, const ConstTensorView& k, const ConstTensorView& v);
  void drop_after(Index micro);
  void skip_complete();
  Index first_held() const;
  std::optional<Index> missing(Index micro) const;
  void start(Index micro, std::span<const Range> tokens, const ConstKv& own);
  void wait_for(Index micro);
  void check_room_for(Index micro) const;
  void need_gradients(Index micro);
  void clear_gradients(std::span<const Range> tokens);
  void start_return(Index micro, const KvBufferBackwardArgs& args);
  void finish_return();

  KvBufferOptions options;
  std::unique_ptr<run::Agreement> agreement;  // if checked; `context` is then one of its communicator
  run::ExecutionContext context;
  Communicator& communicator;
  run::Workspace workspace;
  Kv kv, gradients;  // gradients of sum_type
  std::optional<Sequence> sequence;
  // Keys that queries of micro-sequence `since` or later ones see are in the buffer or to come. Of those that
  // micro-sequence since - 1 sees last, `absent` are dropped; of those before all are.
  Index since = 0;
  std::vector<Range> absent;
  Index gathered = 0;      // micro-sequences whose gather has begun in the forward
  Index attended = 0;      // micro-sequences whose forward is done
  bool backwards = false;  // a backward has begun
  Index back = 0;          // backward(back - 1) is next, once one has begun
  std::deque<Arrival> arrivals;
  std::optional<Return> returning;
  Index bytes_gathered = 0;
  mutable run::InUse in_use;
};

// Slices in rows of the buffer.
std::vector<Slice> KvBuffer::Data::slices(Index micro) const {
  const Sequence& s = now();
  const Range keys{first_held(), s.micros.rows(micro).end};
  std::vector<Slice> all;
  for (Slice slice : s.micros.slices(s.problem, rank(), micro, keys)) {
    slice.k_begin += keys.begin;
    slice.k_end += keys.begin;
    slice.lo = shift_bound(slice.lo, keys.begin);
    slice.hi = shift_bound(slice.hi, keys.begin);
    s.places.place(slice, all);
  }
  return all;
}

// Drops the keys that no query after this micro-sequence sees.
void KvBuffer::Data::drop_after(Index micro) {
  const std::span<const Range> last = now().places.last_seen(micro);
  since = micro + 1;
  absent.assign(last.begin(), last.end());
  skip_complete();
}

// Of micro-sequences that see no key last nothing is absent.
void KvBuffer::Data::skip_complete() {
  while (absent.empty() && since > 0 && --since > 0) {
    const std::span<const Range> last = now().places.last_seen(since - 1);
    absent.assign(last.begin(), last.end());
  }
}

// No token before this one is held.
Index KvBuffer::Data::first_held() const {
  if (!sequence) return 0;
  const KeyPlaces& places = now().places;
  Index first = now().micros.rows().end;
  for (Index m = since; m < now().micros.micros(); ++m)
    if (!places.last_seen(m).empty()) first = min_of(first, places.last_seen(m).front().begin);
  if (since > 0 && absent.back().end < places.last_seen(since - 1).back().end) first = min_of(first, absent.back().end);
  return first;
}

// That K and V, or their gradients, have the shape of the rank's window.
void KvBuffer::Data::check_window(Index micro, std::string_view k_name, const ConstTensorView& k,
                                  std::string_view v_name, const ConstTensorView& v, std::span<const DType> dtypes,
                                  bool output) const {
  TensorSpec spec{.name = k_name,
                  .rows = now().micros.local(micro),
                  .heads = options.heads,
                  .dim = options.dim_qk,
                  .dtypes = dtypes,
                  .output = output};
  check_tensor(k, spec);
  spec.name = v_name;
  spec.dim = options.dim_v;
  check_tensor(v, spec);
}

// Starts the all-gather of `tokens`: of every rank's window the rows that lie in them, from the ranks' tensors straight
// into the buffer.
void KvBuffer::Data::start(Index micro, std::span<const Range> tokens, const ConstKv& own) {
  const auto part = [&](Index of, const Range& some) {
    const Range window = now().micros.rows(of, micro);
    return Range{max_of(window.begin, some.begin), min_of(window.end, some.end)};
  };
  const Index first = now().micros.rows(rank(), micro).begin;
  std::vector<PeerRows> sends, receives;
  for (Index peer = 0; peer < communicator.ranks(); ++peer) {
    PeerRows send{peer, {}}, receive{peer, {}};
    for (const Range& some : tokens) {
      if (const Range mine = part(rank(), some); mine.size() > 0)
        send.rows.push_back({mine.begin - first, mine.end - first});
      if (const Range theirs = part(peer, some); theirs.size() > 0)
        for (const Range& rows : now().places.rows_of(theirs)) receive.rows.push_back(rows);
    }
    if (!send.rows.empty()) sends.push_back(std::move(send));
    if (!receive.rows.empty()) receives.push_back(std::move(receive));
  }
  arrivals.push_back(
      {micro, communicator.exchange(run::messages(sends, own), run::messages(receives, run::constant(kv)))});
  for (const Range& some : tokens)
    bytes_gathered += some.size() * options.heads * (options.dim_qk + options.dim_v) * size_of(options.dtype);
}

void KvBuffer::Data::wait_for(Index micro) {
  const bool awaited =
      std::any_of(arrivals.begin(), arrivals.end(), [&](const Arrival& a) { return a.micro == micro; });
  while (awaited && !arrivals.empty()) {
    Arrival next = std::move(arrivals.front());
    arrivals.pop_front();
    try {
      next.request.wait();
    } catch (...) {
      sequence.reset();  // its keys did not arrive: nothing may be computed with the rows of the buffer
      throw;
    }
    if (next.micro == micro) break;
  }
}

void KvBuffer::Data::check_room_for(Index micro) const {
  if (!now().places.has_room(micro, attended))
    throw Error(text("micro-sequence ", micro, " brings the keys of ", now().micros.rows(micro).size(),
                     " tokens while micro-sequence ", attended, " is still to be attended, and a buffer of ",
                     options.rows, " rows has no room for them beside what that one needs"),
                "give it more rows (key_rows with `ahead`), or gather after the forward of the one before");
}

// Error unless this micro-sequence is the next one to gather, and there is room for its keys.
void KvBuffer::Data::check_next(Index micro, const ConstTensorView& k, const ConstTensorView& v) const {
  now().micros.rows(micro);  // Error if there is no such micro-sequence
  if (micro != gathered || backwards)
    throw Error(text("gather of micro-sequence ", micro, ", and ", gathered, " is next"),
                backwards ? "begin a new sequence: this one is in its backward" : "gather each one once, in order");
  check_own(micro, k, v);
  check_room_for(micro);
}

void KvBuffer::Data::gather(Index micro, const ConstTensorView& k, const ConstTensorView& v) {
  const Range tokens = now().micros.rows(micro);
  start(micro, {&tokens, 1}, {k, v});
  ++gathered;
}

// The gradients of all keys that micro's queries see, and of its own keys, start as zeros.
void KvBuffer::Data::need_gradients(Index micro) {
  if (gradients.k.data == nullptr)
    gradients = run::take_kv(workspace, Slot::key_gradients_0, shape(sum_type(options.dtype)));
  // Those that later queries see too were cleared for these.
  for (Index m = backwards ? micro : now().micros.micros() - 1; m >= micro; --m)
    clear_gradients(now().places.last_seen(m));
  backwards = true;
}

void KvBuffer::Data::clear_gradients(std::span<const Range> tokens) {
  for (const Range& some : tokens) {
    for (const Range& rows : now().places.rows_of(some)) {
      for (TensorView view : {gradients.k, gradients.v}) {
        view.data = detail::advanced(view.data, view.dtype, view.offset(rows.begin, 0));
        view.rows = rows.size();
        run::clear(options.place, view);
      }
    }
  }
}

// The gradients of micro's keys are complete: a reduce-scatter takes them to the ranks that own the keys, where they
// are added in the order of ranks.
void KvBuffer::Data::start_return(Index micro, const KvBufferBackwardArgs& args) {
  const Index local = now().micros.local(micro), most = now().micros.local();  // memory for the largest window
  const DType type = sum_type(options.dtype);
  const bool there_k = args.dk.dtype == type, there_v = args.dv.dtype == type;  // summed in the outputs themselves
  Kv mine = run::take_kv(workspace, Slot::own_key_gradients,
                         {most, options.heads, there_k ? 0 : options.dim_qk, there_v ? 0 : options.dim_v, type});
  mine.k.rows = mine.v.rows = local;
  if (there_k) mine.k = args.dk;
  if (there_v) mine.v = args.dv;
  std::vector<PeerRows> sends, own;
  for (Index peer = 0; peer < communicator.ranks() && local > 0; ++peer) {
    sends.push_back({peer, now().places.rows_of(now().micros.rows(peer, micro))});
    own.push_back({peer, {{0, local}}});
  }
  Request request = communicator.exchange(run::messages(sends, run::constant(gradients)),
                                          run::at_once(run::messages(own, run::constant(mine), adding(type)), true));
  returning.emplace(Return{std::move(request), mine, {args.dk, args.dv}});
}

void KvBuffer::Data::finish_return() {
  if (!returning) return;
  Return now = std::move(*returning);
  returning.reset();
  now.request.wait();
  run::round_to(options.place, now.outputs, run::constant(now.sums));
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
  data_ = std::make_unique<Data>(communicator, std::move(options));
}

KvBuffer::~KvBuffer() = default;
KvBuffer::KvBuffer(KvBuffer&&) noexcept = default;

void KvBuffer::begin(const MicroSequences& micros, const Mask& mask) {
  const run::InUse::Call guard(data_->in_use, "K/V buffer");
  Data& d = *data_;
  if (micros.ranks() != d.communicator.ranks())
    throw Error(text("micro-sequences for ", micros.ranks(), " ranks on ", d.communicator.ranks()),
                "make them with communicator.ranks()");
  Problem problem = micros.problem(mask);
  std::optional<KeyPlaces> places = KeyPlaces::in_rows(micros, problem, d.options.rows, d.options.drop);
  if (!places) {
    const Index rows = KeyPlaces::least_rows(micros, problem, {.drop = d.options.drop});
    throw Error(text("the sequence needs ", rows, " rows and the buffer has ", d.options.rows),
                text("give KvBufferOptions::rows = ", rows, " or more (key_rows)"));
  }
  require_earlier_keys(micros, problem);
  if (d.agreement) d.agreement->compare(d.call(run::CallKind::begin), run::fingerprints(micros, problem));
  d.arrivals.clear();
  d.returning.reset();  // of a backward that was given up
  const detail::CallSign sign = run::sign_of(micros, problem, d.options);
  d.sequence.emplace(Data::Sequence{micros, std::move(problem), std::move(*places), sign});
  d.since = 0;
  d.absent.clear();
  d.gathered = d.attended = d.back = d.bytes_gathered = 0;
  d.backwards = false;
}

void KvBuffer::use(const Place& place) {
  const run::InUse::Call guard(data_->in_use, "K/V buffer");
  data_->use(place);
}

void KvBuffer::start_gather(Index micro, const ConstTensorView& k, const ConstTensorView& v) {
  const run::InUse::Call guard(data_->in_use, "K/V buffer");
  Data& d = *data_;
  d.check_next(micro, k, v);
  if (d.agreement) d.agreement->compare(d.call(run::CallKind::gather, micro), {});
  const auto pass = d.begin_pass(detail::PassKind::gather, micro, kNoLayer);
  d.gather(micro, k, v);
}

void KvBuffer::forward(Index micro, const KvBufferForwardArgs& args) {
  const run::InUse::Call guard(data_->in_use, "K/V buffer");
  Data& d = *data_;
  d.use(args.place);
  if (const Index rows = d.now().micros.local(micro); args.q.rows != rows)
    throw Error(text("q has ", args.q.rows, " rows and the window of micro-sequence ", micro, " has ", rows),
                "give the rows of this rank's window");
  const bool gathers = micro >= d.gathered;
  if (gathers) {
    d.check_next(micro, args.k, args.v);
  } else if (args.k.given() || args.v.given()) {
    throw Error(text("k or v of micro-sequence ", micro, " is given, and it was gathered before"),
                "leave them out here");
  }
  const run::CollectiveCall call = d.call(run::CallKind::forward, micro, args.layer);
  KernelForwardArgs kernel_args = run::forward_call(args, run::constant(d.kv));
  const std::uint64_t number =
      d.agreement ? d.agreement->compare(call, run::fingerprints(kernel_args, d.options.kernel)) : 0;
  const auto pass = d.begin_pass(detail::PassKind::forward, micro, args.layer, kernel_args);
  if (gathers) d.gather(micro, args.k, args.v);
  d.wait_for(micro);
  const std::vector<Slice> slices = d.slices(micro);
  kernel_args.slices = slices;
  std::optional<run::HeadNumbers> largest;
  if (args.max_logit.given()) {
    largest.emplace(args.place, d.workspace, args.q.heads, d.communicator.ranks(), kMinusInfinity<double>);
    kernel_args.max_logit = largest->view();
  }
  attend(kernel_args, d.options.kernel);
  if (largest) largest->reduce_into(d.communicator, Reduce::max, args.max_logit);
  // No rank returns before all are done, so that an error on one is an error on all.
  if (d.agreement) d.agreement->end(call, number, args.out, args.lse, args.place);
  // The keys of the last micro-sequence stay: its backward comes first. One that is attended again needs what was
  // gathered again for it in its backward too.
  const bool again = micro < d.attended;
  d.attended = max_of(d.attended, micro + 1);
  if (d.options.drop && !again && micro + 1 < d.now().micros.micros()) d.drop_after(micro);
}

std::optional<Index> KvBuffer::Data::missing(Index micro) const {
  const MicroSequences& micros = now().micros;
  if (micro < 0 || micro >= since) return {};
  const Index end = absent.back().end;
  if (end <= micros.rows().begin)
    throw Error(text("rows before ", end, " were filled in advance and have been dropped"),
                "use a buffer without `drop` for a first document that began in the past");
  return micros.micro_of(end - 1);
}

std::optional<Index> KvBuffer::missing(Index micro) const {
  const run::InUse::Call guard(data_->in_use, "K/V buffer");
  return data_->missing(micro);
}

void KvBuffer::gather_again(Index micro, const ConstTensorView& k, const ConstTensorView& v) {
  const run::InUse::Call guard(data_->in_use, "K/V buffer");
  Data& d = *data_;
  const Index next = d.next_backward();
  const std::optional<Index> wanted = d.missing(next);
  if (wanted != micro)
    throw Error(
        text("gather_again of micro-sequence ", micro, ", and ", wanted ? text(*wanted) : "none", " is missing"),
        "ask missing() which one is");
  d.check_own(micro, k, v);
  if (d.agreement) d.agreement->compare(d.call(run::CallKind::gather_again, micro), {});
  const auto pass = d.begin_pass(detail::PassKind::gather_again, micro, kNoLayer);
  const Index begin = d.now().micros.rows(micro).begin;
  std::vector<Range> tokens;
  while (!d.absent.empty() && d.absent.back().end > begin) {
    Range& last = d.absent.back();
    tokens.push_back({max_of(last.begin, begin), last.end});
    last.end = tokens.back().begin;
    if (last.size() == 0) d.absent.pop_back();
  }
  d.start(micro, tokens, {k, v});
  d.wait_for(micro);
  d.skip_complete();
}

void KvBuffer::backward(Index micro, const KvBufferBackwardArgs& args) {
  const run::InUse::Call guard(data_->in_use, "K/V buffer");
  Data& d = *data_;
  d.use(args.place);
  const MicroSequences& micros = d.now().micros;
  const Index next = d.next_backward();
  if (micro != next || micro < 0)
    throw Error(text("backward of micro-sequence ", micro, ", and ", next < 0 ? "none" : text(next), " is next"),
                "go through the micro-sequences of the forward in reverse");
  if (!args.out.given() && micros.local(micro) > 0)
    throw Error("out and lse are left out", "give both, as the forward wrote them");
  if (const std::optional<Index> wanted = d.missing(micro))
    throw Error(text("backward of micro-sequence ", micro, " needs dropped rows of micro-sequence ", *wanted),
                "call gather_again until missing() names none");
  d.check_window(micro, "dk", args.dk, "dv", args.dv, kDTypes, true);
  const run::CollectiveCall call = d.call(run::CallKind::backward, micro, args.layer);
  KernelBackwardArgs kernel_args = run::backward_call(args, run::constant(d.kv));
  kernel_args.deterministic = args.deterministic;
  kernel_args.add_keys = true;
  if (d.agreement)
    d.agreement->compare(call, run::fingerprints(kernel_args, d.options.kernel),
                         d.agreement->forwards_of(args.out, args.lse, args.place));
  while (!d.arrivals.empty()) d.wait_for(d.arrivals.front().micro);
  if (d.options.drop) d.finish_return();  // earlier tokens may take its rows
  const auto pass = d.begin_pass(detail::PassKind::backward, micro, args.layer, kernel_args);
  d.need_gradients(micro);
  d.back = micro;

  const std::vector<Slice> slices = d.slices(micro);
  kernel_args.slices = slices;
  kernel_args.dk = d.gradients.k;
  kernel_args.dv = d.gradients.v;
  std::optional<run::HeadNumbers> dsink;
  if (args.dsink.given()) {
    dsink.emplace(args.place, d.workspace, args.q.heads, d.communicator.ranks(), 0);
    kernel_args.dsink = dsink->view();
  }
  attend_backward(kernel_args, d.options.kernel);
  d.finish_return();
  d.start_return(micro, args);
  if (!args.deferred || d.agreement || micro == 0) d.finish_return();
  if (dsink) dsink->reduce_into(d.communicator, Reduce::sum, args.dsink);
  if (d.agreement) d.agreement->end(call);
}

Index KvBuffer::buffer_begin() const { return data_->first_held(); }
Index KvBuffer::row_of(Index token) const {
  const std::vector<Range> rows = data_->now().places.rows_of({token, token + 1});
  if (rows.empty()) throw Error(text("token ", token, " has no row in the buffer"), "ask for one that queries see");
  return rows.front().begin;
}
TensorView KvBuffer::k() const { return data_->kv.k; }
TensorView KvBuffer::v() const { return data_->kv.v; }
TensorView KvBuffer::dk() const { return data_->gradients.k; }
TensorView KvBuffer::dv() const { return data_->gradients.v; }
KvBuffer::Use KvBuffer::use() const { return {data_->workspace.held(), data_->bytes_gathered}; }

}  // namespace weft
