#include "check/law.h"

#include <algorithm>
#include <cstdint>
#include <sstream>

#include "check/definition.h"
#include "check/moves.h"
#include "index.h"
#include "weft/error.h"
#include "weft/plan.h"

namespace weft::check {
namespace {

struct Violation {
  std::string text;
};

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  throw Violation{out.str()};
}

class Checker {
 public:
  explicit Checker(const Case& c)
      : case_(c), problem_(problem_of(c)), layouts_(layouts_of(c, problem_)), definition_(c) {
    for (Index q = 0; q < definition_.q_tokens(); ++q)
      for (Index k = 0; k < definition_.k_tokens(); ++k) visible_.push_back(definition_.visible(q, k));
  }

  LawReport run() {
    LawReport report;
    report.pairs = std::count(visible_.begin(), visible_.end(), 1);
    try {
      check_layout(layouts_.q, false);
      check_layout(layouts_.k, true);
      if (problem_.visible_pairs() != report.pairs)
        fail("the problem counts ", problem_.visible_pairs(), " visible pairs, there are ", report.pairs);
      check_shares();
      check_all_keys(report);
    } catch (const Violation& v) {
      report.violation = v.text;
    }
    report.nontrivial = case_.ranks > 1 && report.planned && crosses_ranks();
    return report;
  }

 private:
  bool visible(Index q, Index k) const { return visible_[at(q * definition_.k_tokens() + k)] != 0; }

  void check_all_keys(LawReport& report) {
    const Index n = case_.ranks;
    const Layout& k = layouts_.k;
    report.planned = layouts_.q.rank_order().stride() == k.rank_order().stride();
    if (!report.planned) return;  // the planner refuses: there is nothing to hold the law
    if (k.rank_order().stride() == 1) check("keys in sequence order", 1, {stream_buffer(definition_.k_tokens())});
    report.slices = check("keys in rank order", 1, {rank_buffer(k, {0, n, 1})});
    std::vector<Buffer> ring;
    for (Index r = 0; r < n; ++r) ring.push_back(rank_buffer(k, {r, 1, 1}));
    check("keys of one rank after another", 1, ring);
    for (Index a = 2; a <= n; ++a) {  // a mesh: queries of `a` neighbours together, keys of every a-th rank together
      if (n % a != 0) continue;
      std::vector<Buffer> columns;
      for (Index r = 0; r < a; ++r) columns.push_back(rank_buffer(k, {r, n / a, a}));
      check("a mesh", a, columns);
    }
    for (Index node = 2; node < n; ++node) {
      if (n % node != 0) continue;
      check_moves({.kind = ScheduleKind::exact, .stages = 2, .node = node});
      check_moves({.kind = ScheduleKind::exact, .head_groups = 2, .node = node});
      check_moves({.kind = ScheduleKind::all_gather, .node = node});
      check_moves({.kind = ScheduleKind::ring, .node = node});
    }
    if (n > 1) check_moves({.kind = ScheduleKind::exact, .head_groups = 2});
    for (Index side = 2; side <= n; ++side)
      if (n % side == 0) check_moves({.kind = ScheduleKind::mesh, .ranks_per_step = 1 + side % 2, .query_ranks = side});
  }

  // The steps of a schedule in two hops, of one that moves queries, or of one in head groups, on what its messages
  // bring: a row enters a node once, if it is wanted there; results of a query row come home from every rank that it
  // went to; each head group attends every pair, so that its steps are checked by themselves.
  void check_moves(const ScheduleOptions& options) {
    const std::string how = words(options);
    std::vector<Schedule> all;
    for (Index r = 0; r < case_.ranks; ++r)
      all.push_back(make_schedule(problem_, layouts_, r, {options.head_groups, options.head_groups}, options));
    Moves moves(all);
    std::vector<std::vector<std::uint8_t>> covered(at(options.head_groups),
                                                   std::vector<std::uint8_t>(visible_.size(), 0));
    std::string queries_fault;
    const std::vector<std::vector<Index>> queries = moves.queries(queries_fault);
    const std::vector<Index> home = moves.home(queries_fault);
    for (Index q = 0; q < definition_.q_tokens(); ++q)
      if (definition_.q(q).real() && home[at(q)] != all.front().query_ranks - 1)
        fail(how, ": results of query ", q, " come home ", home[at(q)], " times");
    if (!queries_fault.empty()) fail(how, ", queries: ", queries_fault);
    for (std::size_t n = 0; n < all.front().steps.size(); ++n) {
      std::string fault;
      const std::vector<std::vector<Index>> held = moves.step(n, fault);
      if (!fault.empty()) fail(how, ", step ", n, ": ", fault);
      for (Index r = 0; r < case_.ranks; ++r) {
        const Step& step = all[at(r)].steps[n];
        const auto first = queries[at(r)].begin();
        // Nobody looks at their runs.
        const Buffer q{layouts_.q.runs(r), {first + step.queries.begin, first + step.queries.end}};
        const Buffer k{q.runs, held[at(r)]};
        for (const Slice& s : all[at(r)].plans[at(step.plan)].slices)
          cover(how, r, s, q, k, covered[at(step.heads_k.begin)]);
      }
    }
    for (const std::vector<std::uint8_t>& of_head : covered) check_covered(how, of_head);
    if (uses(options, "node") && options.node > 1) check_entered(moves, options);
  }

  void check_entered(const Moves& moves, const ScheduleOptions& options) {
    const Index node = options.node, nodes = case_.ranks / node;
    std::vector<std::uint8_t> wanted(at(definition_.k_tokens() * nodes), 0);
    std::vector<Index> owner(at(definition_.k_tokens()), -1);
    for (Index r = 0; r < case_.ranks; ++r)
      for (const Index t : layouts_.k.tokens(r))
        if (t != kNoToken) owner[at(t)] = r / node;
    for (Index r = 0; r < case_.ranks; ++r)
      for (const Index q : layouts_.q.tokens(r))
        for (Index k = 0; q != kNoToken && k < definition_.k_tokens(); ++k)
          if (visible(q, k)) wanted[at(k * nodes + r / node)] = 1;
    for (Index k = 0; k < definition_.k_tokens(); ++k)
      for (Index n = 0; n < nodes; ++n) {
        const bool foreign = owner[at(k)] >= 0 && owner[at(k)] != n;
        const bool due = foreign && (options.kind != ScheduleKind::exact || wanted[at(k * nodes + n)] != 0);
        if (moves.entered()[at(k * nodes + n)] != (due ? 1 : 0))
          fail(words(options), ": key ", k, " enters node ", n, " ", moves.entered()[at(k * nodes + n)],
               " times instead of ", due ? 1 : 0);
      }
  }

  // Every rank: disjoint tokens, in the rows that the definition gives them; together all that is dealt out.
  void check_layout(const Layout& layout, bool keys) {
    const std::vector<std::vector<Index>> expected = definition_.owned(keys);
    std::vector<int> held(at(layout.stream().tokens()), 0);
    std::vector<Index> counts;
    for (Index r = 0; r < layout.ranks(); ++r) {
      std::vector<Index> own = layout.tokens(r);
      if (static_cast<Index>(own.size()) != layout.rows()) fail("rank ", r, " has ", own.size(), " rows");
      Index count = 0;
      for (const Index t : own) {
        if (t == kNoToken) continue;
        ++count;
        if (++held[at(t)] > 1) fail("token ", t, " is held twice");
      }
      counts.push_back(count);
      if (expected.empty()) continue;
      own.resize(at(count));  // padding rows come last
      if (own != expected[at(r)]) fail("rank ", r, " does not hold the rows of its layout");
    }
    const Range dealt = layout.stream().extent();
    for (Index t = dealt.begin; t < dealt.end; ++t) {
      const bool real = (keys ? definition_.k(t) : definition_.q(t)).real();
      const bool needed = real || layout.kind() != LayoutKind::explicit_runs;  // those may leave padding out
      if (needed && held[at(t)] == 0) fail("token ", t, " is held by no rank");
    }
    const bool uneven = layout.kind() == LayoutKind::explicit_runs || layout.kind() == LayoutKind::dual_chunk ||
                        (layout.kind() == LayoutKind::placed && keys && case_.k);
    const Index even = dealt.size() / layout.ranks() + 2, more = layout.kind() == LayoutKind::placed ? even / 16 : 0;
    if (!uneven && layout.rows() > even + more)
      fail("a rank's buffer of ", layout.rows(), " rows is longer than an even share of ", dealt.size());
  }

  void check_shares() {
    std::vector<Index> expected;
    for (Index r = 0; r < case_.ranks; ++r) {
      Index pairs = 0;
      for (const Index q : layouts_.q.tokens(r))
        for (Index k = 0; q != kNoToken && k < definition_.k_tokens(); ++k) pairs += visible(q, k);
      expected.push_back(pairs);
    }
    if (pairs_by_rank(problem_, layouts_.q) != expected) fail("pairs_by_rank is not what the ranks' queries see");
  }

  // All ranks' plans against each of the key buffers, queries of `group` neighbouring ranks in one buffer.
  Index check(const std::string& how, Index group, const std::vector<Buffer>& keys) {
    std::vector<std::uint8_t> covered(visible_.size(), 0);
    Index slices = 0;
    for (Index r = 0; r < case_.ranks; r += group) {
      const Buffer q = rank_buffer(layouts_.q, {r, group, 1});
      for (const Buffer& k : keys) {
        const Plan plan = make_plan(problem_, q.runs, k.runs);
        if (plan.q_rows != static_cast<Index>(q.tokens.size()) || plan.k_rows != static_cast<Index>(k.tokens.size()))
          fail(how, ", rank ", r, ": the plan is for buffers of other sizes");
        for (const Slice& s : plan.slices) cover(how, r, s, q, k, covered);
        check_counts(how, r, plan, q, k);
        check_table(how, r, plan, q, k);
        slices += static_cast<Index>(plan.slices.size());
      }
    }
    check_covered(how, covered);
    return slices;
  }

  void check_covered(const std::string& how, const std::vector<std::uint8_t>& covered) const {
    for (Index q = 0; q < definition_.q_tokens(); ++q) {
      for (Index k = 0; k < definition_.k_tokens(); ++k) {
        const int times = covered[at(q * definition_.k_tokens() + k)];
        if (times != (visible(q, k) ? 1 : 0))
          fail(how, ": query ", q, " and key ", k, " are ", visible(q, k) ? "visible" : "not visible", " and lie in ",
               times, " slices");
      }
    }
  }

  void cover(const std::string& how, Index rank, const Slice& s, const Buffer& q, const Buffer& k,
             std::vector<std::uint8_t>& covered) {
    if (s.q_begin < 0 || s.q_begin >= s.q_end || s.q_end > static_cast<Index>(q.tokens.size()) || s.k_begin < 0 ||
        s.k_begin >= s.k_end || s.k_end > static_cast<Index>(k.tokens.size()))
      fail(how, ", rank ", rank, ": a slice is empty or leaves its buffers");
    for (Index j = s.k_begin; j < s.k_end; ++j) {
      const Index token = k.tokens[at(j)];
      if (token == kNoToken || !definition_.k(token).real())
        fail(how, ", rank ", rank, ": key row ", j, " is padding and lies in a slice");
    }
    const bool plain = !case_.mask.slices;
    if (plain && k.runs.in_sequence_order() && s.k_begin != definition_.first_key(s.k_begin))
      fail(how, ", rank ", rank, ": a slice begins at key ", s.k_begin, ", not where its sequence or chunk does");
    for (Index i = s.q_begin; i < s.q_end; ++i) {
      const Index token = q.tokens[at(i)];
      if (token == kNoToken || !definition_.q(token).real())
        fail(how, ", rank ", rank, ": query row ", i, " is padding and lies in a slice");
      const Index first = std::max(s.k_begin, i + std::max(s.lo, -kMaxTokens));
      const Index last = std::min(s.k_end - 1, i + std::min(s.hi, kMaxTokens));
      for (Index j = first; j <= last; ++j) {
        const Index key = k.tokens[at(j)];
        ++covered[at(token * definition_.k_tokens() + key)];
      }
    }
  }

  // The closed forms against counting.
  void check_counts(const std::string& how, Index rank, const Plan& plan, const Buffer& q, const Buffer& k) {
    Index pairs = 0;
    std::vector<bool> touched(k.tokens.size(), false);
    for (const Index qt : q.tokens) {
      if (qt == kNoToken) continue;
      for (std::size_t j = 0; j < k.tokens.size(); ++j) {
        if (k.tokens[j] == kNoToken || !visible(qt, k.tokens[j])) continue;
        ++pairs;
        touched[j] = true;
      }
    }
    if (visible_pairs(plan) != pairs)
      fail(how, ", rank ", rank, ": the plan counts ", visible_pairs(plan), " pairs, its queries see ", pairs);
    for (const Range& r : touched_keys(plan)) {
      for (Index j = r.begin; j < r.end; ++j) {
        if (!touched[at(j)]) fail(how, ", rank ", rank, ": key row ", j, " is not touched");
        touched[at(j)] = false;
      }
    }
    if (std::find(touched.begin(), touched.end(), true) != touched.end())
      fail(how, ", rank ", rank, ": a touched key row is not listed, or twice");
  }

  // Looked up in tables instead of by arithmetic, the plan must be the same set of slices.
  void check_table(const std::string& how, Index rank, Plan plan, const Buffer& q, const Buffer& k) {
    if (k.runs.in_sequence_order()) return;  // its k_begin is kept, a table's is not
    RunList q_table = RunList::from_runs(q.runs.runs(), q.runs.rows());
    RunList k_table = RunList::from_runs(k.runs.runs(), k.runs.rows());
    if (q_table.stride() != k_table.stride()) return;  // buffers of single rows have no stride of their own
    Plan other = make_plan(problem_, q_table, k_table);
    if (q_table.stride() != q.runs.stride()) return;
    const auto before = [](const Slice& a, const Slice& b) {
      return std::tie(a.q_begin, a.k_begin, a.q_end, a.k_end, a.lo, a.hi) <
             std::tie(b.q_begin, b.k_begin, b.q_end, b.k_end, b.lo, b.hi);
    };
    std::sort(plan.slices.begin(), plan.slices.end(), before);
    std::sort(other.slices.begin(), other.slices.end(), before);
    if (plan.slices != other.slices) fail(how, ", rank ", rank, ": arithmetic and table give different slices");
  }

  bool crosses_ranks() const {
    std::vector<Index> owner(at(definition_.k_tokens()), -1);
    for (Index r = 0; r < case_.ranks; ++r)
      for (const Index t : layouts_.k.tokens(r))
        if (t != kNoToken) owner[at(t)] = r;
    for (Index r = 0; r < case_.ranks; ++r)
      for (const Index q : layouts_.q.tokens(r))
        for (Index k = 0; q != kNoToken && k < definition_.k_tokens(); ++k)
          if (visible(q, k) && owner[at(k)] != r) return true;
    return false;
  }

  const Case& case_;
  Problem problem_;
  Layouts layouts_;
  Definition definition_;
  std::vector<std::uint8_t> visible_;  // [query tokens, key tokens]
};

}  // namespace

LawReport check_law(const Case& c) { return Checker(c).run(); }

}  // namespace weft::check
