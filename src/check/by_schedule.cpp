#include "check/by_schedule.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <mutex>

#include "check/attend.h"
#include "check/device_mirror.h"
#include "index.h"
#include "text.h"
#include "weft/communicator.h"
#include "weft/executor.h"

namespace weft::check {
namespace {

// A rank's own rows of a tensor; all bits set at first.
struct Local {
  Local(const Case& c, const Layout& layout, DType dtype, Index heads, Index dim)
      : tensor(dtype, layout.rows(), heads, dim), view(local_view(c, layout.stream(), tensor.view)) {}

  RowTensor rows() const {
    const Index size = size_of(view.dtype);
    return {.data = view.data,
            .rows = view.rows,
            .row_bytes = view.heads * view.dim * size,
            .row_stride = view.row_stride * size,
            .inner = view.inner,
            .outer_stride = view.outer_stride * size};
  }

  Tensor tensor;
  TensorView view;
};

// One side of one rank: which rows it has.
struct Shard {
  const Layout& layout;
  Index rank;
  std::vector<Index> tokens = layout.tokens(rank);
};

Local shard(const Case& c, const Shard& side, Tensor& whole) {
  Local local(c, side.layout, whole.view.dtype, whole.view.heads, whole.view.dim);
  side.layout.shard(side.rank, whole.rows(), local.rows());
  const std::vector<double> poison(at(whole.view.dim), std::nan(""));
  for (std::size_t row = 0; row < side.tokens.size(); ++row) {
    for (Index h = 0; side.tokens[row] == kNoToken && h < whole.view.heads; ++h)
      store_row(local.view, static_cast<Index>(row), h, poison.data());
  }
  return local;
}

std::string words(const Traffic& t) {
  return text(t.bytes_sent, " bytes in ", t.messages_sent, " messages sent and ", t.bytes_received, " in ",
              t.messages_received, " received; ", t.bytes_sent_between, " and ", t.bytes_received_between,
              " between nodes");
}

class Ranks {
 public:
  Ranks(Oracle& oracle, const Case& placed, const Way& way)
      : oracle_(oracle),
        case_(placed),
        way_(way),
        layouts_(layouts_of(placed, oracle.problem())),
        results_(oracle.nothing({.out = placed.dtype, .lse = sums(), .gradients = sums()})),
        max_logit_(at(placed.ranks)),
        dsink_(max_logit_) {
    check_format(placed, oracle.problem());
  }

  AttendReport run() {
    if (way_.world == nullptr) {
      run_ranks(case_.ranks, [this](Communicator& communicator) { run_rank(communicator); });
    } else {
      run_rank(*way_.world);
      share(*way_.world);
    }
    compare_ranks("max_logit", max_logit_);
    compare_ranks("dsink", dsink_);
    results_.max_logit = max_logit_.front();
    results_.dsink = dsink_.front();
    return {weft::words(way_.schedule), oracle_.compare(results_), fault_, flags(way_.schedule)};
  }

 private:
  DType sums() const { return sum_type(case_.dtype); }  // of statistics and gradients here

  void run_rank(Communicator& communicator) {
    const Shard q{layouts_.q, communicator.rank()}, k{layouts_.k, communicator.rank()};
    const weft::Place place = place_of(way_.kernel, way_.world != nullptr ? q.rank : 0);
    const Heads heads{.q = case_.heads_q, .k = case_.heads_k, .map = case_.head_map};
    Schedule schedule = make_schedule(oracle_.problem(), layouts_, q.rank, heads, way_.schedule);
    // Bytes between nodes are counted too, if the schedule knows nodes.
    communicator.set_node(uses(way_.schedule, "node") ? way_.schedule.node : 1);
    Executor executor(communicator, std::move(schedule),
                      {.kernel = way_.kernel, .checked = way_.checked, .place = place});
    const Local own_q = shard(case_, q, oracle_.q()), own_k = shard(case_, k, oracle_.k()),
                own_v = shard(case_, k, oracle_.v()), dout = shard(case_, q, oracle_.dout());
    const auto local = [&](const Shard& side, DType dtype, Index n, Index dim) {
      return Local(case_, side.layout, dtype, n, dim);
    };
    const Local out = local(q, case_.dtype, case_.heads_q, case_.dim_v), lse = local(q, sums(), case_.heads_q, 1),
                dq = local(q, sums(), case_.heads_q, case_.dim_qk), dk = local(k, sums(), case_.heads_k, case_.dim_qk),
                dv = local(k, sums(), case_.heads_k, case_.dim_v);
    const Tensor max_logit(sums(), 1, case_.heads_q, 1), dsink(sums(), 1, case_.heads_q, 1);

    DeviceMirror mirror(place);
    const ExecutorForwardArgs forward{.q = mirror.in(own_q.view),
                                      .k = mirror.in(own_k.view),
                                      .v = mirror.in(own_v.view),
                                      .attention = mirror.in(oracle_.attention()),
                                      .out = mirror.out(out.view),
                                      .lse = mirror.out(lse.view),
                                      .max_logit = mirror.out(max_logit.view),
                                      .place = place};
    const ExecutorBackwardArgs backward{.q = forward.q,
                                        .k = forward.k,
                                        .v = forward.v,
                                        .attention = forward.attention,
                                        .dout = mirror.in(dout.view),
                                        .out = forward.out,
                                        .lse = forward.lse,
                                        .dq = mirror.out(dq.view),
                                        .dk = mirror.out(dk.view),
                                        .dv = mirror.out(dv.view),
                                        .dsink = oracle_.learnable() ? mirror.out(dsink.view) : TensorView{},
                                        .place = place};
    mirror.send();
    communicator.reset_traffic();
    executor.forward(forward);
    check_traffic(executor, communicator, Pass::forward);
    communicator.reset_traffic();
    executor.backward(backward);
    check_traffic(executor, communicator, Pass::backward);
    mirror.fetch();

    unshard(q, "out", out, results_.out);
    unshard(q, "lse", lse, results_.lse);
    unshard(q, "dq", dq, results_.dq);
    unshard(k, "dk", dk, results_.dk);
    unshard(k, "dv", dv, results_.dv);
    max_logit_[at(q.rank)] = to_f64(max_logit.view);
    if (oracle_.learnable()) dsink_[at(q.rank)] = to_f64(dsink.view);
  }

  // Every process gets every rank's results, so that all come to the same verdict.
  void share(Communicator& world) {
    const auto me = at(world.rank());
    share_rows(world, layouts_.q, {&results_.out, &results_.lse, &results_.dq});
    share_rows(world, layouts_.k, {&results_.dk, &results_.dv});
    for (std::vector<std::vector<double>>* of : {&max_logit_, &dsink_}) {
      std::vector<Block> blocks;
      for (std::vector<double>& numbers : *of) {
        numbers.resize((*of)[me].size());
        blocks.push_back(block_of(numbers.data(), numbers.size() * sizeof(double)));
      }
      world.all_gather(blocks[me], blocks).wait();
    }
    double faults = fault_ ? 1 : 0;
    world.all_reduce(&faults, DType::f64, 1, Reduce::sum).wait();
    if (faults > 0) fail("another rank has seen a fault");
  }

  void share_rows(Communicator& world, const Layout& layout, const std::vector<Tensor*>& tensors) {
    for (Tensor* tensor : tensors) {
      std::vector<std::vector<std::byte>> all(at(world.ranks()), tensor->bytes);
      std::vector<Block> blocks;
      for (std::vector<std::byte>& bytes : all) blocks.push_back(block_of(bytes.data(), bytes.size()));
      world.all_gather(block_of(tensor->bytes.data(), tensor->bytes.size()), blocks).wait();
      for (Index rank = 0; rank < world.ranks(); ++rank) {
        for (const Index token : layout.tokens(rank)) {
          if (token == kNoToken) continue;
          const Index offset = token * tensor->row_bytes();
          std::copy_n(all[at(rank)].begin() + offset, tensor->row_bytes(), tensor->bytes.begin() + offset);
        }
      }
    }
  }

  static Block block_of(void* data, std::size_t size) {
    return {.data = data, .rows = 1, .bytes = static_cast<Index>(size)};
  }

  // Ranks write to different tokens, so they need no lock.
  void unshard(const Shard& side, std::string_view name, const Local& local, Tensor& whole) {
    side.layout.unshard(side.rank, local.rows(), whole.rows());
    std::vector<double> got(at(local.view.dim));
    for (std::size_t row = 0; row < side.tokens.size(); ++row) {
      for (Index h = 0; side.tokens[row] == kNoToken && h < local.view.heads; ++h) {
        load_row(local.view, static_cast<Index>(row), h, got.data());
        const double sink = oracle_.sink(h);
        const double rounded = sums() == DType::f64 ? sink : static_cast<double>(static_cast<float>(sink));
        const double want = name == "lse" ? rounded : 0;
        if (std::any_of(got.begin(), got.end(), [&](double x) { return !(x == want); }))
          fail(text("rank ", side.rank, ": ", name, " of row ", row, ", which holds no token, is ", got.front(),
                    " instead of ", want));
      }
    }
  }

  void check_traffic(const Executor& executor, const Communicator& communicator, Pass pass) {
    if (way_.checked) return;
    const TensorShape shape{.dtype = case_.dtype,
                            .dim_qk = case_.dim_qk,
                            .dim_v = case_.dim_v,
                            .out = case_.dtype,
                            .dout = case_.dtype,
                            .dq = sums(),
                            .lse = sums(),
                            .max_logit = true,
                            .dsink = oracle_.learnable()};
    const Traffic want = traffic(executor.schedule(), shape, pass), got = communicator.traffic();
    if (got == want) return;
    fail(text("rank ", communicator.rank(), pass == Pass::forward ? ", forward: " : ", backward: ", words(got),
              "; traffic() says ", words(want)));
  }

  void compare_ranks(std::string_view name, const std::vector<std::vector<double>>& of) {
    const auto same = [](double a, double b) {
      return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
    };
    for (std::size_t rank = 1; rank < of.size(); ++rank) {
      if (!std::equal(of[rank].begin(), of[rank].end(), of[0].begin(), of[0].end(), same))
        fail(text(name, " of rank ", rank, " is not that of rank 0"));
    }
  }

  void fail(std::string what) {
    const std::lock_guard lock(mutex_);
    if (!fault_) fault_ = std::move(what);
  }

  Oracle& oracle_;
  const Case& case_;
  const Way& way_;
  Layouts layouts_;
  Results results_;
  std::vector<std::vector<double>> max_logit_, dsink_;  // by rank
  std::mutex mutex_;
  std::optional<std::string> fault_;
};

// Why the case must be refused, if it must: the table's reason, or that of a kernel asked for by its name.
std::optional<Refusal> due_refusal(const Oracle& oracle, const Case& placed, const Way& way) {
  const Layouts layouts = layouts_of(placed, oracle.problem());
  Use use = use_of(placed, layouts, way.schedule);
  use.dtype = DType::f32;  // make_schedule comes first, and does not know the tensors
  if (std::optional<Refusal> no = weft::refusal(use)) return no;
  use.dtype = placed.dtype;
  if (std::optional<Refusal> no = weft::refusal(use)) return no;
  if (way.kernel.empty() || way.kernel == "cpu") return {};  // the best that can
  const std::optional<std::string> reason = refusal(placed, way.kernel);
  return reason ? std::optional(Refusal{*reason, ""}) : std::nullopt;
}

bool says(const Error& error, const Refusal& refusal) {
  return error.problem().find(refusal.problem) != std::string::npos &&
         (refusal.remedy.empty() || error.remedy() == refusal.remedy);
}

}  // namespace

std::string flags(const ScheduleOptions& options) {
  std::string out = text("--schedule ", name(options.kind));
  for (const ScheduleOption& option : schedule_options()) {
    if (option.is_default(options)) continue;
    std::string flag(option.name);
    std::replace(flag.begin(), flag.end(), '_', '-');
    out += text(" --", flag, " ", option.value(options));
  }
  return out;
}

Use use_of(const Case& c, const Layouts& layouts, const ScheduleOptions& options) {
  return {.schedule = options.kind,
          .key_order = options.key_order,
          .stride_q = layouts.q.rank_order().stride(),
          .stride_k = layouts.k.rank_order().stride(),
          .dtype = c.dtype};
}

Arithmetic executor_arithmetic(const Case& c) {
  if (c.dtype != DType::f64) return kernel_arithmetic(c.dtype, DType::f32);
  Arithmetic by = exact_arithmetic(DType::f64);  // what ranks sum is f64, and so are the gradients
  by.gradients = rounding(DType::f64);
  return by;
}

AttendReport check_schedule(Oracle& oracle, const Case& placed, const Way& way) {
  return Ranks(oracle, placed, way).run();
}

Tried try_schedule(Oracle& oracle, const Case& placed, const Way& way) {
  std::optional<Refusal> due;
  try {
    due = due_refusal(oracle, placed, way);
    AttendReport report = check_schedule(oracle, placed, way);
    if (due) return {.failure = text("a hole: computed, although it should be refused: ", due->problem)};
    return {.report = std::move(report)};
  } catch (const Error& error) {
    if (due && says(error, *due)) return {.refused = std::move(due)};
    if (due) return {.failure = text("refused with '", error.what(), "' instead of '", due->problem, "'")};
    return {.failure = text("a hole: refused, although the capability table does not: ", error.what())};
  } catch (const std::exception& error) {
    return {.failure = text("threw ", error.what())};
  }
}

}  // namespace weft::check
