// What ranks compare in checked mode: questions that differ in one thing have different numbers, in that part alone.
#include "run/fingerprint.h"

#include <gtest/gtest.h>

#include "weft/kernel.h"

namespace weft::run {
namespace {

// The parts in which two lists differ.
std::vector<std::string> differing(const std::vector<Fingerprint>& a, const std::vector<Fingerprint>& b) {
  std::vector<std::string> parts;
  EXPECT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    if (a[i].value != b[i].value) parts.emplace_back(a[i].part);
  return parts;
}

using Parts = std::vector<std::string>;

std::vector<Fingerprint> of(const Problem& problem, const Layouts& layouts, const ScheduleOptions& options = {},
                            const Heads& heads = {4, 2}) {
  return fingerprints(make_schedule(problem, layouts, 0, heads, options));
}
std::vector<Fingerprint> of(const Problem& problem) {
  return of(problem, make_layouts(LayoutKind::contiguous, problem, 4));
}

const std::vector<Index> kOffsets{0, 8, 16};
Stream stream(Index used, Index tokens = 16) {
  return Stream::from_used(kOffsets, std::vector<Index>{8, used}, tokens);
}

TEST(Fingerprint, OfPackings) {
  const auto plain = of(Problem(stream(8), {}));
  EXPECT_EQ(differing(plain, of(Problem(stream(8), {}))), Parts{});
  EXPECT_EQ(differing(plain, of(Problem(stream(7), {}))), Parts{"packing"});
  EXPECT_EQ(differing(plain, of(Problem(Packing(stream(8), stream(7)), {}))), Parts{"packing"});
  EXPECT_EQ(differing(plain, of(Problem(Packing(stream(7), stream(8)), {}))), Parts{"packing"});
  EXPECT_EQ(differing(of(Problem(Stream::from_lengths(std::vector<Index>{5, 11}), {})),
                      of(Problem(Stream::from_lengths(std::vector<Index>{6, 10}), {}))),
            Parts{"packing"});
}

TEST(Fingerprint, OfMasks) {
  std::vector<Mask> masks{{},           {.causal = true}, {.align = Align::bottom_right},  {.left = 3}, {.right = 3},
                          {.chunk = 3}, {.chunk = 4},     {.slices = std::vector<Slice>{}}};
  const Slice slice{1, 7, 1, 7, -3, 3};
  for (const Slice& s : {slice, Slice{2, 7, 1, 7, -3, 3}, Slice{1, 6, 1, 7, -3, 3}, Slice{1, 7, 2, 7, -3, 3},
                         Slice{1, 7, 1, 6, -3, 3}, Slice{1, 7, 1, 7, -2, 3}, Slice{1, 7, 1, 7, -3, 2}})
    masks.push_back({.slices = std::vector<Slice>{s}});
  for (std::size_t i = 0; i < masks.size(); ++i)
    for (std::size_t j = 0; j < masks.size(); ++j)
      EXPECT_EQ(differing(of(Problem(stream(8), masks[i])), of(Problem(stream(8), masks[j]))),
                i == j ? Parts{} : Parts{"mask"})
          << i << " " << j;
}

TEST(Fingerprint, OfLayouts) {
  const Problem problem(stream(8), {});
  const auto make = [&](LayoutKind kind) { return make_layouts(kind, problem, 4); };
  const std::vector<std::vector<weft::Run>> runs{{{0, 0, 4, 1}}, {{0, 4, 4, 1}}, {{0, 8, 4, 1}}, {{0, 12, 4, 1}}};
  std::vector<std::vector<weft::Run>> swapped = runs;
  std::swap(swapped[2], swapped[3]);
  std::vector<std::vector<weft::Run>> cut = runs;
  cut[1] = {{0, 6, 2, 1}, {2, 4, 2, 1}};
  const auto given = [&](const std::vector<std::vector<weft::Run>>& of) {
    const Layout layout = Layout::explicit_runs(stream(8), of);
    return Layouts{layout, layout};
  };
  const Layouts contiguous = make(LayoutKind::contiguous), zigzag = make(LayoutKind::zigzag);
  std::vector<Layouts> all{
      contiguous,     zigzag,     make(LayoutKind::dual_chunk), make(LayoutKind::striped), given(runs),
      given(swapped), given(cut), {contiguous.q, zigzag.k},     {zigzag.q, contiguous.k}};
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t j = 0; j < all.size(); ++j)
      EXPECT_EQ(differing(of(problem, all[i]), of(problem, all[j])), i == j ? Parts{} : Parts{"layout"})
          << i << " " << j;
}

TEST(Fingerprint, OfLayoutsThatAreDealtByAMask) {
  const Stream documents = Stream::from_lengths(std::vector<Index>{300, 20, 64, 128});
  const Problem causal(documents, {.causal = true}), window(documents, {.causal = true, .left = 3}), all(documents, {});
  const auto number = [](const Problem& problem, Index ranks) {
    return Layout::balanced(problem, ranks).fingerprint();
  };
  EXPECT_EQ(number(causal, 4), number(causal, 4));
  EXPECT_NE(number(causal, 4), number(window, 4));
  EXPECT_NE(number(causal, 4), number(all, 4));
  const auto dealt_by = [&](const Problem& by) {
    return of(causal, {Layout::balanced(by, 4), Layout::balanced(by, 4)});
  };
  EXPECT_EQ(differing(dealt_by(causal), dealt_by(causal)), Parts{});
  EXPECT_EQ(differing(dealt_by(causal), dealt_by(all)), Parts{"layout"});
  const Layout layout = Layout::balanced(causal, 4), copy = layout;  // computed once, for all copies
  EXPECT_EQ(layout.fingerprint(), copy.fingerprint());
  EXPECT_EQ(layout.fingerprint(), layout.fingerprint());
}

TEST(Fingerprint, OfSinks) {
  std::vector<float> x(256), logits{0.5F, -1, 2, 0}, others{0.5F, -1, 2.0000002F, 0};
  const std::vector<double> same(logits.begin(), logits.end());
  const TensorView view = thd(x.data(), DType::f32, 4, 4, 8);
  const auto with = [&](const auto& values, DType dtype) {
    return fingerprints(KernelForwardArgs{{.q = view,
                                           .k = view,
                                           .v = view,
                                           .attention = {.sink = Sink::learnable(per_head(values.data(), dtype, 4))},
                                           .out = view}});
  };
  EXPECT_EQ(differing(with(logits, DType::f32), with(logits, DType::f32)), Parts{});
  EXPECT_EQ(differing(with(logits, DType::f32), with(same, DType::f64)), Parts{});
  EXPECT_EQ(differing(with(logits, DType::f32), with(others, DType::f32)), Parts{"values of the sink"});
}

TEST(Fingerprint, OfOptions) {
  EXPECT_EQ(differing(fingerprints(ExecutorOptions{}), fingerprints(ExecutorOptions{.deterministic = true})),
            Parts{"deterministic"});
  const KvBufferOptions plain{.rows = 8, .heads = 2, .dim_qk = 4, .dim_v = 4};
  const auto changed = [&](const auto& change) {
    KvBufferOptions options = plain;
    change(options);
    return differing(fingerprints(plain), fingerprints(options));
  };
  EXPECT_EQ(changed([](KvBufferOptions&) {}), Parts{});
  EXPECT_EQ(changed([](KvBufferOptions& o) { o.rows = 9; }), Parts{"rows of the buffer"});
  EXPECT_EQ(changed([](KvBufferOptions& o) { o.heads = 4; }), Parts{"heads"});
  EXPECT_EQ(changed([](KvBufferOptions& o) { o.dim_qk = 8; }), Parts{"dim of k and v"});
  EXPECT_EQ(changed([](KvBufferOptions& o) { o.dim_v = 8; }), Parts{"dim of k and v"});
  EXPECT_EQ(changed([](KvBufferOptions& o) { o.dtype = DType::bf16; }), Parts{"dtype of k and v"});
  EXPECT_EQ(changed([](KvBufferOptions& o) { o.drop = true; }), Parts{"drop"});
}

TEST(Fingerprint, OfMicroSequences) {
  const auto of_micros = [](std::vector<Index> lengths, Index micros, const Mask& mask) {
    const MicroSequences m(Stream::from_lengths(lengths), {.ranks = 2, .micros = micros});
    return fingerprints(m, m.problem(mask));
  };
  const auto plain = of_micros({10, 6}, 2, {.causal = true});
  EXPECT_EQ(differing(plain, of_micros({10, 6}, 2, {.causal = true})), Parts{});
  EXPECT_EQ(differing(plain, of_micros({9, 7}, 2, {.causal = true})), Parts{"packing"});
  EXPECT_EQ(differing(plain, of_micros({10, 6}, 2, {})), Parts{"mask"});
  EXPECT_EQ(differing(plain, of_micros({10, 6}, 4, {.causal = true})), Parts{"micro-sequences"});
}

TEST(Fingerprint, OfSchedulesAndHeads) {
  const Problem problem(stream(8), {});
  const Layouts layouts = make_layouts(LayoutKind::contiguous, problem, 4);
  using Kind = ScheduleKind;
  const std::vector<ScheduleOptions> all{{},
                                         {.kind = Kind::ring},
                                         {.kind = Kind::ring, .ranks_per_step = 1},
                                         {.key_order = KeyOrder::rank},
                                         {.head_groups = 2},
                                         {.kind = Kind::hybrid},
                                         {.kind = Kind::hybrid, .ulysses = 4},
                                         {.kind = Kind::hybrid, .outer = Kind::all_gather},
                                         {.kind = Kind::exact},
                                         {.kind = Kind::exact, .stages = 3},
                                         {.kind = Kind::exact, .node = 2}};
  for (std::size_t i = 0; i < all.size(); ++i)
    for (std::size_t j = 0; j < all.size(); ++j)
      EXPECT_EQ(differing(of(problem, layouts, all[i]), of(problem, layouts, all[j])),
                i == j ? Parts{} : Parts{"schedule"})
          << i << " " << j;
  const auto plain = of(problem, layouts);
  const std::vector<Index> map{0, 0, 0, 1};
  EXPECT_EQ(differing(plain, of(problem, layouts, {}, {2, 2})), Parts{"heads"});
  EXPECT_EQ(differing(plain, of(problem, layouts, {}, {4, 4})), Parts{"heads"});
  EXPECT_EQ(differing(plain, of(problem, layouts, {}, {4, 2, map})), Parts{"heads"});
}

TEST(Fingerprint, OfCalls) {
  std::vector<float> x(256), logits(4);
  const TensorView view = thd(x.data(), DType::f32, 4, 4, 8), numbers = per_head(logits.data(), DType::f32, 4);
  const KernelForwardArgs plain{{.q = view, .k = view, .v = view, .out = view}};
  const auto changed = [&](const auto& change) {
    KernelForwardArgs args = plain;
    change(args);
    return differing(fingerprints(plain), fingerprints(args));
  };
  const Parts attention{"attention (scale, softcap, sink, head_map)"};
  const std::vector<Index> map{0, 1, 2, 3};
  EXPECT_EQ(changed([](KernelForwardArgs&) {}), Parts{});
  EXPECT_EQ(changed([](KernelForwardArgs& a) { a.q.dtype = DType::bf16; }), Parts{"dtype of q"});
  EXPECT_EQ(changed([](KernelForwardArgs& a) { a.q.dim = 4; }), Parts{"dim of q and v"});
  EXPECT_EQ(changed([](KernelForwardArgs& a) { a.v.dim = 4; }), Parts{"dim of q and v"});
  EXPECT_EQ(changed([&](KernelForwardArgs& a) { a.max_logit = numbers; }), Parts{"whether max_logit is asked for"});
  EXPECT_EQ(changed([](KernelForwardArgs& a) { a.attention.scale = 0; }), attention);
  EXPECT_EQ(changed([](KernelForwardArgs& a) { a.attention.scale = 0.5; }), attention);
  EXPECT_EQ(changed([](KernelForwardArgs& a) { a.attention.softcap = 1; }), attention);
  EXPECT_EQ(changed([](KernelForwardArgs& a) { a.keys_per_split = 4096; }), Parts{"keys_per_split"});
  EXPECT_EQ(changed([](KernelForwardArgs& a) { a.attention.sink = Sink::off_by_one(); }), attention);
  EXPECT_EQ(changed([&](KernelForwardArgs& a) { a.attention.head_map = map; }), attention);
  const Parts types_forward{"dtype of out and lse"};
  EXPECT_EQ(changed([](KernelForwardArgs& a) { a.out.dtype = DType::bf16; }), types_forward);
  EXPECT_EQ(changed([&](KernelForwardArgs& a) { a.lse = view; }), types_forward);
  EXPECT_EQ(differing(fingerprints(plain, "cpu.scalar"), fingerprints(plain, "reference")), Parts{"kernel"});
  EXPECT_EQ(differing(fingerprints(plain, "cpu"), fingerprints(plain, "")), Parts{});  // they mean the same
  const KernelBackwardArgs backward{{.q = view, .k = view, .v = view}};
  KernelBackwardArgs asked = backward;
  asked.dsink = numbers;
  EXPECT_EQ(differing(fingerprints(backward), fingerprints(asked)), Parts{"whether dsink is asked for"});
  const auto changed_backward = [&](const auto& change) {
    KernelBackwardArgs args = backward;
    change(args);
    return differing(fingerprints(backward), fingerprints(args));
  };
  const Parts types{"dtype of out, lse, dout and dq"};
  EXPECT_EQ(changed_backward([](KernelBackwardArgs& a) { a.attention.softcap = 1; }), attention);
  EXPECT_EQ(changed_backward([&](KernelBackwardArgs& a) { a.dout = view; }), types);
  EXPECT_EQ(changed_backward([&](KernelBackwardArgs& a) { a.dq = view; }), types);
  EXPECT_EQ(differing(fingerprints(backward, "cpu.scalar"), fingerprints(backward, "reference")), Parts{"kernel"});
}

}  // namespace
}  // namespace weft::run
