// Ranks that share a processor slow each other down, so time goes from event to event. For tens of ranks.
#include <algorithm>
#include <limits>

#include "cost/engine.h"
#include "index.h"
#include "text.h"
#include "weft/error.h"

namespace weft::cost {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();

// The pattern with its messages listed by rank.
Pattern with_lists(const Pattern& given, Index ranks) {
  if (given.peers != Pattern::Peers::spans) return given;
  Pattern p = given;
  p.peers = Pattern::Peers::listed;
  std::vector<std::vector<std::uint32_t>> from(at(ranks)), to(at(ranks));
  for_each_message(given, ranks, [&](Index sender, Index receiver, Index count, double) {
    for (Index i = 0; i < count && sender != receiver; ++i) {
      from[at(receiver + i)].push_back(static_cast<std::uint32_t>(sender + i));
      to[at(sender + i)].push_back(static_cast<std::uint32_t>(receiver + i));
    }
  });
  p.from_begin = p.to_begin = {0};
  for (std::size_t r = 0; r < at(ranks); ++r) {
    p.from.insert(p.from.end(), from[r].begin(), from[r].end());
    p.to.insert(p.to.end(), to[r].begin(), to[r].end());
    p.from_begin.push_back(p.from.size());
    p.to_begin.push_back(p.to.size());
  }
  return p;
}

// A call as it is seen by every rank.
struct Call {
  explicit Call(Index ranks) : posted(at(ranks), kNever), arrival(at(ranks), kNever), taken(at(ranks), kNever) {}
  std::vector<double> posted, arrival, taken;
};

struct Rank {
  enum class State { ready, working, for_senders, for_arrival, done };
  State state = State::ready;
  std::size_t op = 0;
  double since = 0;  // of the state
  double left = 0;   // work, in seconds of a whole processor
  const Work* work = nullptr;
  bool adding = false;        // the pass after a kernel
  double link = 0;            // free from then on
  std::size_t next_call = 0;  // whose arrival is not known yet; those after it wait for the link
  bool queued = false;        // for its turn on the processor, or having it
  double turn_end = kNever;   // if it has its turn

  bool has_turn() const { return turn_end < kNever; }
};

class Shared {
 public:
  Shared(const Outline& outline, const Machine& machine, Pass pass, Record& record)
      : o_(outline), machine_(machine), record_(record), ops_(ops_of(outline, pass)), ranks_(at(outline.ranks)) {
    for (const Pattern& p : outline.patterns) patterns_.push_back(with_lists(p, outline.ranks));
    Index calls = 0;
    number_.resize(ops_.size(), 0);
    std::vector<Index> in_slot(slots_of(ops_), 0);
    for (std::size_t n = 0; n < ops_.size(); ++n) {
      if (ops_[n].kind == Op::Kind::post) {
        in_slot[ops_[n].call] = calls++;
        posts_.push_back(n);
      }
      number_[n] = in_slot[ops_[n].call];
    }
    calls_.assign(at(calls), Call(outline.ranks));
    const Index together = machine.processor_ranks == 0 ? outline.ranks : machine.processor_ranks;
    busy_.assign(at(ceil_div(outline.ranks, together)), 0);
    queues_.resize(busy_.size());
    together_ = together;
  }

  void run(const SimulateOptions& options) {
    propagate();
    while (advance()) {
      std::size_t least = ops_.size();
      for (const Rank& r : ranks_) least = std::min(least, r.op);
      const double done = static_cast<double>(least) / static_cast<double>(ops_.size());
      if (options.progress != nullptr && !options.progress(done, options.context))
        throw Error("the simulation was stopped", "let it run, or ask for fewer ranks");
    }
  }

 private:
  const Op& op(const Rank& r) const { return ops_[r.op]; }
  const Pattern& pattern(int n) const { return patterns_[at(n)]; }
  Call& call(const Rank& r) { return calls_[at(number_[r.op])]; }

  template <class F>
  void for_each_peer(const Pattern& p, Index r, bool senders, F&& f) const {
    switch (p.peers) {
      case Pattern::Peers::block:
        for (Index n = r / p.size * p.size; n < (r / p.size + 1) * p.size; ++n) f(n);
        return;
      case Pattern::Peers::same_place:
        for (Index n = r % p.size; n < o_.ranks; n += p.size) f(n);
        return;
      case Pattern::Peers::listed: {
        const auto& begin = senders ? p.from_begin : p.to_begin;
        for (std::size_t i = begin[at(r)]; i < begin[at(r) + 1]; ++i)
          f(static_cast<Index>((senders ? p.from : p.to)[i]));
        return;
      }
      case Pattern::Peers::spans:
        return;  // listed by with_lists
    }
  }

  // Goes on until the rank has to work or to wait.
  void step(Index n) {
    Rank& r = ranks_[at(n)];
    while (r.state == Rank::State::ready) {
      if (r.op == ops_.size()) {
        r.state = Rank::State::done;
        record_.end(n, now_);
        return;
      }
      begin(n, r);
    }
  }

  void begin(Index n, Rank& r) {
    const Op& now = op(r);
    switch (now.kind) {
      case Op::Kind::post:
        if (machine_.exchange_seconds > 0) return work(r, machine_.exchange_seconds);
        return post(n, r);
      case Op::Kind::wait:
        return enter(n, r, Rank::State::for_senders);
      case Op::Kind::compute: {
        r.work = work_of(n, now.step);
        if (r.work == nullptr) {
          ++r.op;
          return;
        }
        return work(r, r.work->seconds);
      }
      case Op::Kind::rows: {
        const auto seconds = static_cast<double>((*now.rows)[at(n)]);
        if (seconds == 0) {
          ++r.op;
          return;
        }
        return work(r, seconds);
      }
    }
  }

  void post(Index n, Rank& r) {
    call(r).posted[at(n)] = now_;
    arrivals(r, n);
    ++r.op;
  }

  const Work* work_of(Index n, Index step) const {
    const std::vector<Work>& all = o_.steps[at(step)].work;
    const Index phase = n % o_.stride, block = n / o_.stride / o_.repeat * o_.repeat;
    const auto rank = static_cast<std::uint32_t>(block * o_.stride + phase);
    const auto found =
        std::lower_bound(all.begin(), all.end(), rank, [](const Work& w, std::uint32_t r) { return w.rank < r; });
    return found != all.end() && found->rank == rank ? &*found : nullptr;
  }

  void work(Rank& r, double seconds) {
    r.state = Rank::State::working;
    r.since = now_;
    r.left = seconds;
  }

  void enter(Index n, Rank& r, Rank::State state) {
    r.state = state;
    r.since = now_;
    look(n, r);
  }

  // The rank's arrivals, and those of the ranks it sends to, may be known now.
  void arrivals(const Rank& r, Index n) {
    take_links(n);
    for_each_peer(pattern(op(r).pattern), n, false, [&](Index to) { take_links(to); });
    changed_ = true;
  }

  void take_links(Index to) {
    Rank& receiver = ranks_[at(to)];
    while (receiver.next_call < calls_.size() && takes_link(to, receiver)) ++receiver.next_call;
  }

  // Gives the link to the next call, after the calls before it, if all ranks that it needs have posted it.
  bool takes_link(Index to, Rank& receiver) {
    Call& c = calls_[receiver.next_call];
    const Op& posted = ops_[posts_[receiver.next_call]];
    const Pattern& p = pattern(posted.pattern);
    double ready = c.posted[at(to)];
    if (ready == kNever) return false;
    for_each_peer(p, to, true, [&](Index from) { ready = std::max(ready, c.posted[at(from)]); });
    if (ready == kNever) return false;
    const Load& load = p.loads[at(to)];
    const double begin = load.any() ? std::max(ready, receiver.link) : ready;
    c.arrival[at(to)] = load.any() ? begin + p.seconds[at(to)] : c.posted[at(to)];
    if (!load.any()) return true;
    receiver.link = c.arrival[at(to)];
    record_.exchange(to, posted, load, begin, c.arrival[at(to)]);
    record_.start(to, receiver.state == Rank::State::working ? receiver.since : now_,
                  {begin, c.arrival[at(to)], p.interference[at(to)]});
    return true;
  }

  // Lets the rank go on if what it waits for has arrived.
  void look(Index n, Rank& r) {
    if (r.state == Rank::State::for_senders) {
      if (call(r).arrival[at(n)] == kNever) return;
      record_.wait(n, op(r), r.since, now_);
      const double copying = copy_seconds(machine_, pattern(op(r).pattern).loads[at(n)]);
      if (copying > 0) return work(r, copying);
      copied(n, r);
    }
    if (r.state == Rank::State::for_arrival && until(n, r) <= now_) {
      record_.wait(n, op(r), r.since, now_);
      r.state = Rank::State::ready;
      ++r.op;
      changed_ = true;
    }
  }

  void copied(Index n, Rank& r) {
    changed_ = true;
    call(r).taken[at(n)] = now_;
    r.state = Rank::State::for_arrival;
    r.since = now_;
  }

  double until(Index n, const Rank& r) {
    Call& c = call(r);
    double end = c.arrival[at(n)];
    if (!machine_.progress)
      for_each_peer(pattern(op(r).pattern), n, false, [&](Index to) { end = std::max(end, c.taken[at(to)]); });
    return end;
  }

  // Fraction of a processor that the rank has; lowers `boundary` to the time until which that holds.
  double rate(Index n, double& boundary) const {
    const double running = static_cast<double>(busy_[at(n / together_)]);
    double rate = std::min(1.0, machine_.processor_kernels / running);
    if (takes_turns()) rate = ranks_[at(n)].has_turn() ? 1 : 0;
    const Rank& r = ranks_[at(n)];
    if (op(r).kind != Op::Kind::compute || r.adding) return rate;
    double lost = 0;
    for (const Record::Interval& i : record_.under_way(n)) {
      if (i.interference == 0) continue;
      if (i.begin > now_)
        boundary = std::min(boundary, i.begin);
      else if (i.end > now_) {
        boundary = std::min(boundary, i.end);
        lost = std::max(lost, i.interference);
      }
    }
    return rate * (1 - lost);
  }

  // Ranks that share a processor compute one after another, each until it waits or its timeslice is over.
  bool takes_turns() const { return machine_.timeslice > 0 && machine_.processor_kernels >= 1; }

  // Long work gets longer turns, so that there are not too many, and no turn is too short for the clock.
  double turn_of(const Rank& r) const { return std::max({machine_.timeslice, 1e-2 * r.left, 1e-12 * now_}); }

  // Those that have come to a wait leave the queue of their processor, those whose turn is over go to its end, and
  // those that began to work join it.
  void give_turns() {
    for (std::size_t p = 0; p < queues_.size(); ++p) {
      std::vector<Index>& queue = queues_[p];
      std::vector<Index> over;
      std::erase_if(queue, [&](Index n) {
        Rank& r = ranks_[at(n)];
        r.queued = r.state == Rank::State::working;
        if (r.queued && r.turn_end > now_) return false;
        if (r.queued) over.push_back(n);
        r.turn_end = kNever;
        return true;
      });
      queue.insert(queue.end(), over.begin(), over.end());
      const Index first = static_cast<Index>(p) * together_;
      for (Index n = first; n < min_of(o_.ranks, first + together_); ++n) {
        Rank& r = ranks_[at(n)];
        if (r.state != Rank::State::working || r.queued) continue;
        r.queued = true;
        queue.push_back(n);
      }
      const auto turns = static_cast<std::size_t>(machine_.processor_kernels);
      for (std::size_t i = 0; i < std::min(turns, queue.size()); ++i) {
        Rank& r = ranks_[at(queue[i])];
        if (!r.has_turn()) r.turn_end = now_ + turn_of(r);
      }
    }
  }

  // Advances to the next event; false if there is none.
  bool advance() {
    if (takes_turns()) give_turns();
    std::fill(busy_.begin(), busy_.end(), 0);
    for (Index n = 0; n < o_.ranks; ++n)
      if (ranks_[at(n)].state == Rank::State::working) ++busy_[at(n / together_)];
    double next = kNever;
    std::vector<double> rates(ranks_.size(), 0.0), ends(ranks_.size(), kNever);
    bool waiting = false;
    for (Index n = 0; n < o_.ranks; ++n) {
      const Rank& r = ranks_[at(n)];
      waiting = waiting || r.state == Rank::State::for_senders || r.state == Rank::State::for_arrival;
      if (r.state == Rank::State::working) {
        double boundary = kNever;
        rates[at(n)] = rate(n, boundary);
        if (rates[at(n)] == 0) continue;
        if (takes_turns()) boundary = std::min(boundary, r.turn_end);
        ends[at(n)] = now_ + r.left / rates[at(n)];
        next = std::min({next, ends[at(n)], boundary});
      } else if (r.state == Rank::State::for_arrival) {
        next = std::min(next, std::max(now_, until(n, r)));
      }
    }
    if (next == kNever) {
      if (waiting) throw Error("the simulated ranks wait for each other", "report this: no schedule should");
      return false;
    }
    const double passed = next - now_;
    now_ = next;
    constexpr double kRounding = 1e-15;
    std::vector<Index> moved;
    for (Index n = 0; n < o_.ranks; ++n) {
      Rank& r = ranks_[at(n)];
      if (r.state != Rank::State::working || rates[at(n)] == 0) continue;
      r.left -= passed * rates[at(n)];
      // By its end too: late in a long simulation what is left may be too little to move the clock.
      if (ends[at(n)] <= now_ || r.left <= kRounding + 1e-12 * passed) moved.push_back(n);
    }
    for (const Index n : moved) worked(n, ranks_[at(n)]);
    propagate();
    return true;
  }

  // Repeats until nothing changes: what one rank does may be what another waits for.
  void propagate() {
    do {
      changed_ = false;
      for (Index n = 0; n < o_.ranks; ++n) {
        look(n, ranks_[at(n)]);
        step(n);
      }
    } while (changed_);
  }

  void worked(Index n, Rank& r) {
    const Op& done = op(r);
    switch (done.kind) {
      case Op::Kind::post:
        record_.rows(n, done, r.since, now_);
        r.state = Rank::State::ready;
        return post(n, r);
      case Op::Kind::wait:  // copied
        record_.rows(n, done, r.since, now_);
        return copied(n, r);
      case Op::Kind::compute:
        if (!r.adding) {
          record_.compute(n, done, r.since, now_, r.work->pairs);
          if (r.work->rows > 0) {
            r.adding = true;
            return work(r, static_cast<double>(r.work->rows));
          }
        } else {
          record_.rows(n, {.kind = done.kind, .name = "add", .step = done.step}, r.since, now_);
          r.adding = false;
        }
        break;
      default:
        record_.rows(n, done, r.since, now_);
    }
    r.state = Rank::State::ready;
    ++r.op;
  }

  const Outline& o_;
  const Machine& machine_;
  Record& record_;
  std::vector<Op> ops_;
  std::vector<Pattern> patterns_;
  std::vector<Index> number_;       // of each op's call
  std::vector<std::size_t> posts_;  // ops that start calls, in the order in which every rank makes them
  std::vector<Call> calls_;
  std::vector<Rank> ranks_;
  std::vector<Index> busy_;                 // ranks at work, by processor
  std::vector<std::vector<Index>> queues_;  // the same, those that have their turn first
  Index together_ = 1;
  double now_ = 0;
  bool changed_ = false;
};

}  // namespace

void run_shared(const Outline& outline, const Machine& machine, Pass pass, const SimulateOptions& options,
                Record& record) {
  constexpr Index kMostRanks = 1024;
  if (outline.ranks > kMostRanks)
    throw Error(text(outline.ranks, " ranks that share processors"),
                text("use up to ", kMostRanks, ", or a machine whose ranks have processors of their own"));
  Shared(outline, machine, pass, record).run(options);
}

}  // namespace weft::cost
