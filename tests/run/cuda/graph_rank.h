// One rank's attention in CUDA graphs: what is captured, and what it is replayed on.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device_array.h"
#include "index.h"
#include "kernel/cuda/gpu_problem.h"
#include "plan/cuda/host_plan.h"

namespace weft::test {

struct Setting {
  LayoutKind kind;
  bool sequence_order;  // keys; otherwise in rank order
  Mask mask;
  Index ranks = 1, rank = 0;
  Index dqk = 64, dv = 64;
  Sink::Kind sink = Sink::Kind::none;
  std::vector<Index> head_map = {};  // of 2 query heads onto 2; none: onto 1
  Index scale = 1;                   // tokens, times this

  std::string name() const {
    return std::string(weft::name(kind)) + (sequence_order ? ", sequence order" : ", rank order") + ", rank " +
           std::to_string(rank) + " of " + std::to_string(ranks) + ", dims " + std::to_string(dqk) + ":" +
           std::to_string(dv) +
           (mask.chunk       ? ", chunked"
            : mask.left >= 0 ? ", window"
                             : "");
  }
};

inline constexpr Index kSequences = 9, kTokens = 240;

struct Lengths {
  std::string name;
  Index first;               // offset of the first sequence
  std::vector<Index> used;   // at most kSequences
  std::vector<Index> spare;  // rows after each; none: 0
};

// Odd lengths, empty sequences, fewer of them, padding, nothing at all.
inline std::vector<Lengths> all_lengths() {
  return {{"odd", 0, {67, 1, 45, 21, 39, 20}, {}},
          {"one sequence", 0, {207}, {}},
          {"empty ones", 0, {0, 50, 0, 0, 86, 2, 0, 27, 0}, {}},
          {"padded", 12, {33, 3, 0, 60, 51}, {7, 0, 9, 1, 5}},
          {"short ones", 24, {5, 6, 7, 1, 2, 3, 19, 18, 17}, {0, 4}},
          {"nothing", 0, {}, {}},
          {"odd again", 0, {67, 1, 45, 21, 39, 20}, {}}};
}

// Host and device have the same offsets; padded lengths are multiples of `multiple`.
struct Offsets {
  Offsets(const Lengths& lengths, Index scale, Index multiple) : cu{0}, padded{scale * lengths.first} {
    for (std::size_t i = 0; i < at(kSequences); ++i) {
      const Index length = i < lengths.used.size() ? scale * lengths.used[i] : 0;
      const Index spare = i < lengths.spare.size() ? scale * lengths.spare[i] : 0;
      used.push_back(length);
      cu.push_back(cu.back() + length);
      padded.push_back(padded.back() + ceil_div(length + spare, multiple) * multiple);
    }
  }
  std::vector<Index> used, cu, padded;
};

// Device memory of a tensor, at one address for all replays.
class Mirror {
 public:
  explicit Mirror(const ConstTensorView& host) : bytes_(spanned_bytes(host)) {}
  template <class View>
  View like(View host) const {
    if (host.data != nullptr) host.data = bytes_.get();
    return host;
  }
  void set(const ConstTensorView& host) {
    if (bytes_.size() > 0) bytes_.set({static_cast<const std::uint8_t*>(host.data), bytes_.size()});
  }
  void read(const TensorView& host) const {
    const std::vector<std::uint8_t> now = bytes_.host();
    std::copy(now.begin(), now.end(), static_cast<std::uint8_t*>(host.data));
  }

 private:
  DeviceArray<std::uint8_t> bytes_;
};

struct Graph {
  cudaGraphExec_t exec = nullptr;
  ~Graph() { cudaGraphExecDestroy(exec); }
};

// One rank's attention with everything it needs on the device; graphs of a plan and one pass each.
class Rank {
 public:
  Rank(const Setting& setting, DType dtype, bool wide)
      : setting_(setting),
        dtype_(dtype),
        wide_(wide),
        layout_{setting.kind, setting.ranks},
        cu_(bytes(Offsets({}, 1, 1).cu)),
        padded_(bytes(Offsets({}, 1, 1).cu)),
        context_(gpu(stream_.stream)),
        shapes_(problem({"", 0, {}, {}}, 1)),
        plan_(context_, device_plan_capacity(plan_args())) {
    forward();  // memory is taken here, not in a capture
    backward(false);
  }

  // The problem that the offsets give, with the host's slices; random tensors, NaN where nobody looks.
  KernelProblem problem(const Lengths& lengths, unsigned seed) const {
    const Offsets offsets(lengths, setting_.scale, multiple());
    const Stream stream = Stream::from_used(offsets.padded, offsets.used, tokens());
    const Problem asked(stream, setting_.mask);
    const Layout layout = make_layouts(setting_.kind, asked, setting_.ranks).q;
    const Index rows = rows_for(setting_.kind, tokens(), setting_.ranks);
    const Index keys = setting_.sequence_order ? tokens() : rows * setting_.ranks;
    const RunList runs = setting_.sequence_order ? layout.sequence_order() : layout.rank_order();
    AttentionProblem p{.tq = rows, .tk = keys, .dqk = setting_.dqk, .dv = setting_.dv, .dtype = dtype_};
    p.hk = setting_.head_map.empty() ? 1 : 2;
    p.sink = setting_.sink;
    return {lengths.name, filled(p, host_plan(asked, layout.runs(setting_.rank), runs, rows), seed), setting_.head_map};
  }

  void set_offsets(const Lengths& lengths) {
    const Offsets offsets(lengths, setting_.scale, multiple());
    set_offsets(offsets.cu, offsets.padded);
  }
  void set_offsets(const std::vector<Index>& cu, const std::vector<Index>& padded) {
    cu_.set(bytes(cu));
    padded_.set(bytes(padded));
  }

  DevicePlanArgs plan_args() const {
    const DeviceStream s{cu_.get(), padded_.get(), wide_ ? OffsetType::i64 : OffsetType::i32, kSequences, tokens()};
    return {s,
            {},
            setting_.mask,
            layout_.runs(setting_.rank),
            setting_.sequence_order ? DeviceLayout::sequence_order() : layout_.rank_order()};
  }
  // Arguments in device memory, shaped as every problem's are.
  KernelForwardArgs forward() { return on_device(Outputs(shapes_.p).forward_args(shapes_)); }
  KernelBackwardArgs backward(bool deterministic) {
    KernelBackwardArgs args = on_device(Outputs(shapes_.p).backward_args(shapes_));
    args.deterministic = deterministic;
    return args;
  }

  // Everything that a pass reads, and poison where it writes.
  void set(const KernelProblem& problem, const Outputs& outputs, bool gradients_alone = false) {
    const AttentionProblem& p = problem.p;
    if (!gradients_alone) {
      for (const auto& [name, buffer] : {std::pair{"q", &p.q},
                                         {"k", &p.k},
                                         {"v", &p.v},
                                         {"dout", &p.dout},
                                         {"sink", &p.sink_logits},
                                         {"out", &outputs.forward.out},
                                         {"lse", &outputs.forward.lse},
                                         {"max_logit", &outputs.forward.max_logit}})
        mirror(name, buffer->view()).set(buffer->view());
    }
    for (const auto& [name, buffer] : gradients(outputs)) mirror(name, buffer->view()).set(buffer->view());
  }
  void read(const Outputs& outputs) {
    for (const auto& [name, buffer] : {std::pair{"out", &outputs.forward.out},
                                       {"lse", &outputs.forward.lse},
                                       {"max_logit", &outputs.forward.max_logit}})
      mirror(name, buffer->view()).read(buffer->view());
    for (const auto& [name, buffer] : gradients(outputs)) mirror(name, buffer->view()).read(buffer->view());
  }

  void launch(const Graph& graph) {
    expect_ok(cudaGraphLaunch(graph.exec, stream_.stream));
    stream_.wait();
  }
  void replay(const Graph& graph, const Lengths& lengths, const KernelProblem& problem, const Outputs& got) {
    set_offsets(lengths);
    set(problem, got);
    launch(graph);
    read(got);
  }
  std::unique_ptr<Graph> plan_and(const std::function<void()>& work) {
    stream_.wait();
    return std::make_unique<Graph>(capture(stream_.stream, [&] {
      plan_.plan(plan_args());
      work();
    }));
  }

  Index tokens() const { return setting_.scale * kTokens; }
  cudaStream_t stream() const { return stream_.stream; }
  DeviceContext& context() { return context_; }
  DevicePlan& plan() { return plan_; }

 private:
  static std::vector<std::pair<const char*, const Buffer*>> gradients(const Outputs& o) {
    return {{"dq", &o.backward.dq}, {"dk", &o.backward.dk}, {"dv", &o.backward.dv}, {"dsink", &o.backward.dsink}};
  }
  Index multiple() const { return setting_.kind == LayoutKind::dual_chunk ? 2 * setting_.ranks : 1; }
  std::vector<std::uint8_t> bytes(const std::vector<Index>& offsets) const { return offset_bytes(offsets, wide_); }
  Mirror& mirror(const std::string& name, const ConstTensorView& host) {
    return mirrors_.try_emplace(name, host).first->second;
  }
  template <class View>
  View at_mirror(const char* name, const View& host) {
    return host.data == nullptr ? host : mirror(name, host).like(host);
  }
  // What both passes have: inputs, out and lse.
  template <class Args>
  void move_inputs(Args& args) {
    args.slices = {};
    args.device_plan = &plan_;
    args.q = at_mirror("q", args.q);
    args.k = at_mirror("k", args.k);
    args.v = at_mirror("v", args.v);
    args.attention.sink.logits = at_mirror("sink", args.attention.sink.logits);
    args.out = at_mirror("out", args.out);
    args.lse = at_mirror("lse", args.lse);
    args.place = context_.place();
  }
  KernelForwardArgs on_device(KernelForwardArgs args) {
    move_inputs(args);
    args.max_logit = at_mirror("max_logit", args.max_logit);
    return args;
  }
  KernelBackwardArgs on_device(KernelBackwardArgs args) {
    move_inputs(args);
    args.dout = at_mirror("dout", args.dout);
    args.dq = at_mirror("dq", args.dq);
    args.dk = at_mirror("dk", args.dk);
    args.dv = at_mirror("dv", args.dv);
    args.dsink = at_mirror("dsink", args.dsink);
    return args;
  }

  Setting setting_;
  DType dtype_;
  bool wide_;
  DeviceLayout layout_;
  TestStream stream_;
  DeviceArray<std::uint8_t> cu_, padded_;
  DeviceContext context_;
  KernelProblem shapes_;
  std::map<std::string, Mirror> mirrors_;
  DevicePlan plan_;
};

}  // namespace weft::test
