// K and V made of a source by each rank: every schedule against the reference, bytes, and what exists at once.
#include <atomic>
#include <cmath>
#include <memory_resource>

#include <gtest/gtest.h>

#include "exact_ranks.h"
#include "index.h"
#include "ranks.h"
#include "refusal.h"
#include "sanitized.h"
#include "weft/support.h"

namespace weft::test {
namespace {

constexpr Index kWidth = 5;

// Counts the bytes that are held, and the most of them at once.
class Counting : public std::pmr::memory_resource {
 public:
  std::size_t most = 0;

 private:
  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    most = std::max(most, held_ += bytes);
    return std::pmr::new_delete_resource()->allocate(bytes, alignment);
  }
  void do_deallocate(void* p, std::size_t bytes, std::size_t alignment) override {
    held_ -= bytes;
    std::pmr::new_delete_resource()->deallocate(p, bytes, alignment);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }

  std::size_t held_ = 0;
};

// A linear map of a row to each head, times a number that depends on the position: what a latent and a rotation do.
class Maker {
 public:
  explicit Maker(const RanksProblem& p, std::pmr::memory_resource* memory = std::pmr::new_delete_resource())
      : p_(p), memory_(memory) {
    std::mt19937_64 engine(p.seed + 1);
    for (auto* of : {&to_k_, &to_v_}) {
      of->resize(at(kWidth * p.heads_k * (of == &to_k_ ? p.dim_qk : p.dim_v)));
      for (double& x : *of) x = check::normal(engine) / 2;
    }
  }

  KeyValueViews expand(const SourceRows& rows) {
    const auto seen = each_seen(rows);
    k_.reset();  // before the next ones are made
    v_.reset();
    most_heads = max_of(most_heads, rows.heads.size());
    ++calls;
    return {made(rows, seen, to_k_, p_.dim_qk, k_), made(rows, seen, to_v_, p_.dim_v, v_)};
  }
  void reduce(const SourceRows& rows, const KeyValueViews& gradients, const TensorView& to) const {
    const auto seen = each_seen(rows);
    EXPECT_EQ(gradients.k.rows, static_cast<Index>(seen.size()));
    for (std::size_t i = 0; i < seen.size(); ++i)
      for (Index h = rows.heads.begin; h < rows.heads.end; ++h)
        for (const auto& [gradient, map] : {std::pair{&gradients.k, &to_k_}, {&gradients.v, &to_v_}})
          add(gradient->at<double>(static_cast<Index>(i), h - rows.heads.begin), *map, gradient->dim, h, seen[i], to);
  }
  Source source(const ConstTensorView& rows) {
    return {.rows = rows,
            .expand = [this](const SourceRows& asked) { return expand(asked); },
            .reduce = [this](const SourceRows& asked, const KeyValueViews& gradients,
                             const TensorView& to) { reduce(asked, gradients, to); }};
  }

  Index most_heads = 0, calls = 0;

 private:
  using Seen = std::vector<std::pair<Index, Index>>;  // row, position

  static Seen each_seen(const SourceRows& rows) {
    Seen seen;
    for (const Range& r : rows.seen)
      for (Index row = r.begin; row < r.end; ++row) seen.emplace_back(row, rows.positions[seen.size()]);
    EXPECT_EQ(seen.size(), rows.tokens.size());
    return seen;
  }
  static double turn(Index position, Index i) {
    return std::cos(0.1 * static_cast<double>(position) + static_cast<double>(i));
  }
  double weight(const std::vector<double>& map, Index dim, Index j, Index head, Index i) const {
    return map[at((j * p_.heads_k + head) * dim + i)];
  }
  // Of the rows that are seen, in `held`.
  ConstTensorView made(const SourceRows& rows, const Seen& seen, const std::vector<double>& map, Index dim,
                       std::optional<std::pmr::vector<double>>& held) const {
    const Index heads = rows.heads.size();
    held.emplace(seen.size() * at(heads * dim), 0.0, memory_);
    double* to = held->data();
    for (const auto& [row, position] : seen)
      for (Index h = rows.heads.begin; h < rows.heads.end; ++h)
        for (Index i = 0; i < dim; ++i, ++to)
          for (Index j = 0; j < kWidth; ++j)
            *to += rows.rows.at<double>(row, 0)[j] * weight(map, dim, j, h, i) * turn(position, i);
    return thd(static_cast<const void*>(held->data()), DType::f64, static_cast<Index>(seen.size()), heads, dim);
  }
  void add(const double* from, const std::vector<double>& map, Index dim, Index head, std::pair<Index, Index> place,
           const TensorView& to) const {
    for (Index j = 0; j < kWidth; ++j)
      for (Index i = 0; i < dim; ++i)
        to.at<double>(place.first, 0)[j] += from[i] * weight(map, dim, j, head, i) * turn(place.second, i);
  }

  RanksProblem p_;
  std::vector<double> to_k_, to_v_;
  std::pmr::memory_resource* memory_;
  std::optional<std::pmr::vector<double>> k_, v_;
};

// All rows, as if they were one buffer.
struct Whole {
  explicit Whole(const Stream& stream) {
    for (Index i = 0; i < stream.sequences(); ++i) {
      if (stream.used(i) == 0) continue;
      seen.push_back({stream.offset(i), stream.offset(i) + stream.used(i)});
      for (Index n = 0; n < stream.used(i); ++n) {
        tokens.push_back(stream.offset(i) + n);
        positions.push_back(n);
      }
    }
  }
  std::vector<Range> seen;
  std::vector<Index> tokens, positions;
};

struct SourceProblem {
  explicit SourceProblem(RanksProblem problem)
      : p(std::move(problem)), maker(p), in(p), rows(DType::f64, p.problem.packing().k().tokens(), 1, kWidth) {
    const Whole whole(p.problem.packing().k());
    std::mt19937_64 engine(p.seed + 2);
    for (const Range& r : whole.seen)  // padding stays NaN
      for (Index row = r.begin; row < r.end; ++row)
        for (Index j = 0; j < kWidth; ++j) rows.view.at<double>(row, 0)[j] = check::normal(engine);
    const SourceRows all{rows.view, whole.seen, whole.tokens, whole.positions, {0, p.heads_k}};
    const KeyValueViews kv = maker.expand(all);
    for (std::size_t i = 0; i < whole.tokens.size(); ++i)
      for (const auto& [from, to] : {std::pair{&kv.k, &in.k.view}, {&kv.v, &in.v.view}})
        copy_row(*from, static_cast<Index>(i), *to, whole.tokens[i]);
    exact.emplace(p, in);
    dsource.emplace(DType::f64, rows.view.rows, 1, kWidth);
    std::fill(dsource->bytes.begin(), dsource->bytes.end(), std::byte{});
    const check::Tensor dk = seen_of(exact->dk, whole.tokens), dv = seen_of(exact->dv, whole.tokens);
    maker.reduce(all, {dk.view, dv.view}, dsource->view);
  }
  // Both contiguous.
  static void copy_row(const ConstTensorView& from, Index row, const TensorView& to, Index to_row) {
    std::copy_n(from.at<double>(row, 0), from.heads * from.dim, to.at<double>(to_row, 0));
  }
  static check::Tensor seen_of(const check::Tensor& all, const std::vector<Index>& rows) {
    check::Tensor seen(DType::f64, static_cast<Index>(rows.size()), all.view.heads, all.view.dim);
    for (std::size_t i = 0; i < rows.size(); ++i) copy_row(all.view, rows[i], seen.view, static_cast<Index>(i));
    return seen;
  }
  RanksProblem p;
  Maker maker;
  RanksInput in;
  check::Tensor rows;
  std::optional<Exact> exact;
  std::optional<check::Tensor> dsource;
};

struct SourceResult {
  double error = 0;
  std::atomic<Index> most_heads = 0, most_calls = 0;
  Counting expanded, workspace;  // of rank 0: K and V, and what the executor holds
};

void run_rank(Communicator& comm, SourceProblem& s, const Layouts& layouts, const ScheduleOptions& options,
              const ExecutorOptions& how, RanksResult& r, check::Tensor& dsource, std::mutex& mutex,
              SourceResult& result) {
  const Index rank = comm.rank();
  const RanksProblem& p = s.p;
  RankTensors<> t(sizes_of(p, layouts));
  check::Tensor own(DType::f64, layouts.k.rows(), 1, kWidth), gradient(DType::f64, layouts.k.rows(), 1, kWidth);
  {
    const std::lock_guard lock(mutex);
    shard(layouts, rank, s.in, t);
    layouts.k.shard(rank, s.rows.rows(), own.rows());
  }
  Maker maker(p, rank == 0 ? &result.expanded : std::pmr::new_delete_resource());
  const Source source = maker.source(own.view);
  const Schedule schedule = make_schedule(p.problem, layouts, rank, {p.heads_q, p.heads_k}, options);
  ExecutorOptions counted = how;
  if (rank == 0) counted.memory = &result.workspace;
  Executor executor(comm, schedule, counted);
  check::DeviceMirror here({});
  RankArgs args = t.args(here, attention_of(p, s.in));
  args.forward.k = args.forward.v = args.backward.k = args.backward.v = {};
  args.backward.dk = args.backward.dv = {};
  args.forward.source = args.backward.source = &source;
  args.backward.dsource = gradient.view;
  args.forward.max_logit = t.max_logit.view;
  const check::Tensor lse(DType::f64, layouts.q.rows(), p.heads_q, 1);  // of f32, gradients would be so too
  args.forward.lse = lse.view;
  args.backward.lse = lse.view;
  if (p.sink) args.backward.dsink = t.dsink.view;
  const TensorShape shape{.dtype = DType::f64,
                          .dim_qk = p.dim_qk,
                          .dim_v = p.dim_v,
                          .lse = DType::f64,
                          .max_logit = true,
                          .dsink = p.sink,
                          .source = kWidth};
  comm.set_node(uses(options, "node") ? options.node : 1);
  comm.reset_traffic();
  executor.forward(args.forward);
  if (!how.checked) {
    EXPECT_EQ(comm.traffic(), traffic(schedule, shape, Pass::forward));
  }
  comm.reset_traffic();
  executor.backward(args.backward);
  if (!how.checked) {
    EXPECT_EQ(comm.traffic(), traffic(schedule, shape, Pass::backward));
  }
  const std::lock_guard lock(mutex);
  layouts.q.unshard(rank, t.out.rows(), r.out.rows());
  layouts.q.unshard(rank, t.dq.rows(), r.dq.rows());
  layouts.k.unshard(rank, gradient.rows(), dsource.rows());
  std::copy(t.dsink.bytes.begin(), t.dsink.bytes.end(), r.dsink.bytes.begin());
  result.most_heads = max_of(result.most_heads, maker.most_heads);
  result.most_calls = max_of(result.most_calls, maker.calls);
}

// The largest relative error of out, dq and dsource.
void run_source(SourceProblem& s, const Layouts& layouts, const ScheduleOptions& options, SourceResult& result,
                const ExecutorOptions& how = {}) {
  RanksResult r = empty_result(s.p, layouts.q.ranks());
  check::Tensor dsource(DType::f64, s.rows.view.rows, 1, kWidth);
  std::fill(dsource.bytes.begin(), dsource.bytes.end(), std::byte{});
  std::mutex mutex;
  run_ranks(layouts.q.ranks(),
            [&](Communicator& comm) { run_rank(comm, s, layouts, options, how, r, dsource, mutex, result); });
  result.error = std::max(
      {relative_error(r.out, s.exact->out), relative_error(r.dq, s.exact->dq), relative_error(dsource, *s.dsource)});
  if (s.p.sink) {
    EXPECT_LT(relative_error(r.dsink, s.exact->dsink), 2e-6);
  }
}

std::vector<ScheduleOptions> schedules(Index heads_k, bool sequence, Index ranks) {
  std::vector<ScheduleOptions> all = {{.kind = ScheduleKind::ring},  {.kind = ScheduleKind::ring, .ranks_per_step = 1},
                                      {.key_order = KeyOrder::rank}, {.kind = ScheduleKind::all_to_all},
                                      {.kind = ScheduleKind::exact}, {.kind = ScheduleKind::exact, .stages = 1}};
  if (sequence) all.push_back({.key_order = KeyOrder::sequence});
  if (heads_k > 1) {
    all.push_back({.head_groups = 2});
    all.push_back({.kind = ScheduleKind::exact, .head_groups = 2});
    if (ranks % 2 == 0 && ranks > 2) all.push_back({.kind = ScheduleKind::exact, .head_groups = 2, .node = 2});
    all.push_back({.kind = ScheduleKind::all_to_all, .head_groups = 2});
  }
  if (ranks % 2 == 0)
    for (const ScheduleKind across : {ScheduleKind::ring, ScheduleKind::all_gather}) {
      all.push_back({.kind = ScheduleKind::hybrid, .ulysses = 2, .outer = across});
      if (heads_k > 1) all.push_back({.kind = ScheduleKind::hybrid, .head_groups = 2, .ulysses = 2, .outer = across});
    }
  if (ranks % 2 == 0 && ranks > 2)
    for (const ScheduleKind kind : {ScheduleKind::all_gather, ScheduleKind::ring, ScheduleKind::exact})
      all.push_back({.kind = kind, .node = 2});
  return all;
}

Stream padded(std::vector<Index> lengths) { return Stream::from_lengths(lengths).padded_to(16); }

void expect_the_reference_by_every_schedule(const std::vector<std::pair<Index, Index>>& heads) {
  const std::vector<Problem> problems = {
      Problem(padded({37, 0, 5, 64, 1}), {.causal = true}),
      Problem(padded({37, 0, 5, 64, 1}), {.left = 7, .right = 3}),
      Problem(Packing(padded({20, 33, 4}), padded({31, 12, 40})), {.causal = true, .align = Align::bottom_right}),
  };
  for (const Problem& problem : problems)
    for (const auto& [heads_q, heads_k] : heads) {
      SourceProblem s({.problem = problem,
                       .heads_q = heads_q,
                       .heads_k = heads_k,
                       .dim_qk = 6,
                       .dim_v = 4,
                       .dtype = DType::f64,
                       .sink = true});
      for (const Index ranks : kSanitized ? std::vector<Index>{4} : std::vector<Index>{1, 2, 3, 4, 8})
        for (const LayoutKind kind : {LayoutKind::dual_chunk, LayoutKind::zigzag, LayoutKind::striped,
                                      LayoutKind::balanced, LayoutKind::placed}) {
          if (kind == LayoutKind::dual_chunk && ranks == 3) continue;
          if (kind == LayoutKind::balanced && !problem.packing().self()) continue;
          if (kind != LayoutKind::zigzag && heads_k == 1) continue;
          const Layouts layouts = make_layouts(kind, problem, ranks);
          for (const ScheduleOptions& options : schedules(heads_k, kind != LayoutKind::striped || ranks == 1, ranks)) {
            SCOPED_TRACE(testing::Message() << name(kind) << " " << ranks << " ranks " << heads_q << ":" << heads_k
                                            << " " << words(options));
            SourceResult result;
            run_source(s, layouts, options, result);
            EXPECT_LT(result.error, 1e-13);
          }
        }
    }
}

TEST(Source, EqualsTheReferenceByEverySchedule) { expect_the_reference_by_every_schedule({{4, 2}}); }
TEST(Source, EqualsTheReferenceWithOtherHeads) { expect_the_reference_by_every_schedule({{4, 4}, {3, 1}}); }

TEST(Source, HeadGroupsExpandOneGroupAtATimeAndGatherOnce) {
  SourceProblem s({.problem = Problem(padded({96}), {.causal = true}),
                   .heads_q = 8,
                   .heads_k = 8,
                   .dim_qk = 6,
                   .dim_v = 4,
                   .dtype = DType::f64});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, s.p.problem, 4);
  const TensorShape shape{.dtype = DType::f64, .dim_qk = 6, .dim_v = 4, .source = kWidth};
  const auto bytes = [&](Index groups) {
    return traffic(make_schedule(s.p.problem, layouts, 0, {8, 8}, {.head_groups = groups}), shape, Pass::forward)
        .bytes_received;
  };
  for (const Index groups : {1, 2, 8}) {
    SourceResult result;
    run_source(s, layouts, {.head_groups = groups}, result);
    EXPECT_LT(result.error, 1e-13);
    EXPECT_EQ(result.most_heads, 8 / groups);
    EXPECT_EQ(result.most_calls, 2 * groups);  // forward, and once more in the backward
    EXPECT_EQ(bytes(groups), 3 * 24 * kWidth * 8);
  }
}

// Rank 0 sees all 96 keys. Between G = 1 and G = 8 the most that is held at once differs by seven eighths of K and V,
// and, in the executor, of their gradients.
TEST(Source, HeadGroupsHoldKeysAndValuesOfOneGroup) {
  SourceProblem s({.problem = Problem(padded({96}), {.causal = true}),
                   .heads_q = 8,
                   .heads_k = 8,
                   .dim_qk = 6,
                   .dim_v = 4,
                   .dtype = DType::f64});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, s.p.problem, 4);
  constexpr std::size_t kAll = std::size_t{96} * 8 * (6 + 4) * 8;
  std::size_t workspace_of_one = 0;
  for (const Index groups : {1, 2, 8}) {
    SourceResult result;
    run_source(s, layouts, {.head_groups = groups}, result);
    EXPECT_EQ(result.expanded.most, kAll / at(groups));
    if (groups == 1) workspace_of_one = result.workspace.most;
    EXPECT_EQ(workspace_of_one - result.workspace.most, kAll - kAll / at(groups));
  }
}

TEST(Source, CheckedRanks) {
  SourceProblem s({.problem = Problem(padded({50, 30}), {.causal = true}),
                   .heads_q = 2,
                   .heads_k = 2,
                   .dim_qk = 6,
                   .dim_v = 4,
                   .dtype = DType::f64});
  for (const ScheduleKind kind : {ScheduleKind::all_gather, ScheduleKind::ring, ScheduleKind::all_to_all}) {
    SourceResult result;
    run_source(s, make_layouts(LayoutKind::zigzag, s.p.problem, 4), {.kind = kind}, result, {.checked = true});
    EXPECT_LT(result.error, 1e-13);
  }
}

// DeepSeek-V3: 128 heads of 192 and 128 numbers, made of 512 + 64.
TEST(Source, MovesASeventiethOfTheBytes) {
  constexpr Index kEight = 8;
  const Problem problem(Stream::from_lengths(std::vector<Index>{65536}), {.causal = true});
  const Layouts layouts = make_layouts(LayoutKind::zigzag, problem, kEight);
  for (const auto& [tensor_parallel, least] : {std::pair<Index, double>{1, 60}, {4, 17}, {8, 8.8}}) {
    const Index heads = 128 / tensor_parallel;
    for (const ScheduleKind kind : {ScheduleKind::all_gather, ScheduleKind::ring, ScheduleKind::exact}) {
      const Schedule schedule = make_schedule(problem, layouts, 0, {heads, heads}, {.kind = kind});
      TensorShape shape{.dtype = DType::bf16, .dim_qk = 192, .dim_v = 128};
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        shape.source = 0;
        const auto heads_moved = static_cast<double>(traffic(schedule, shape, pass).bytes_received);
        shape.source = 576;
        const auto latent_moved = static_cast<double>(traffic(schedule, shape, pass).bytes_received);
        EXPECT_GT(heads_moved / latent_moved, least) << name(kind);
      }
    }
  }
}

TEST(Source, RefusesWhatDoesNotFit) {
  const Problem problem(Stream::from_lengths(std::vector<Index>{16}), {.causal = true});
  run_ranks(1, [&](Communicator& comm) {
    Executor executor(comm, make_schedule(problem, make_layouts(LayoutKind::zigzag, problem, 1), 0, {2, 2}));
    const RankTensors<> t(16, 2, 8, 1);
    const check::Tensor latent(DType::f32, 16, 1, kWidth), f64(DType::f64, 16, 1, kWidth);
    RankArgs args = t.args();
    Source source{.rows = latent.view, .expand = [](const SourceRows&) { return KeyValueViews{}; }, .reduce = {}};
    args.forward.source = &source;
    weft::expect_refusal([&] { executor.forward(args.forward); }, {"together with a source", "leave them out"});
    args.forward.k = args.forward.v = {};
    weft::expect_refusal([&] { executor.forward(args.forward); }, {"k of expand"});
    source.rows = f64.view;
    weft::expect_refusal([&] { executor.forward(args.forward); }, {"source is f64", "f32"});
    source.rows = latent.view;
    source.expand = {};
    weft::expect_refusal([&] { executor.forward(args.forward); }, {"no function expand"});
  });
  for (const ScheduleKind kind : {ScheduleKind::all_gather, ScheduleKind::ring, ScheduleKind::all_to_all,
                                  ScheduleKind::hybrid, ScheduleKind::exact})
    EXPECT_FALSE(refusal({.schedule = kind, .source = true}));
  run_ranks(2, [&](Communicator& comm) {
    Executor executor(comm, make_schedule(problem, make_layouts(LayoutKind::zigzag, problem, 2), comm.rank(), {2, 2},
                                          {.kind = ScheduleKind::mesh}));
    const RankTensors<> t(8, 2, 8, 1);
    const check::Tensor latent(DType::f32, 8, 1, kWidth);
    RankArgs args = t.args();
    const Source source{.rows = latent.view, .expand = [](const SourceRows&) { return KeyValueViews{}; }, .reduce = {}};
    args.forward.source = &source;
    args.forward.k = args.forward.v = {};
    weft::expect_refusal([&] { executor.forward(args.forward); }, {"schedule mesh moves more than rows of K and V"});
  });
}

}  // namespace
}  // namespace weft::test
